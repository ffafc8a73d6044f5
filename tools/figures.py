"""Writes every figure and every table of results anew from docs/results: ``make figures``.

    python tools/figures.py

- docs/figures/: the explanatory drawings (schematics.py), and one plot of each benchmark record;
- README.md: the tables of the records that it shows;
- docs/benchmarks.md: plot and table of every record, those of whole networks too (tables.py).

No figure in these places is typed by hand, and tests fail while one is not that of its record.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

import schematics
import tables

from convt3d.bench import plot, report, shapes
from convt3d.bench.record import Record

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
SHOWN_IN_README = "h200-forward-tf32"
NETWORKS_IN_README = "networks-h200"
LIBRARIES_IN_README = "networks-libraries*-h200"
UP_LAYERS_IN_README = "models-h200"


def main() -> None:
    for path, text in schematics.drawings(DOCS / "figures").items():
        path.write_text(text)
        print(path.relative_to(ROOT))
    for name, record in records().items():
        path = DOCS / "figures" / f"{name}.svg"
        plot.draw(record, path)
        print(path.relative_to(ROOT))
    for path, text in documents().items():
        path.write_text(text)
        print(path.relative_to(ROOT))


def records() -> dict[str, Record]:
    """Every benchmark record of docs/results by name; files of other kinds are passed over."""
    found = {}
    for path in sorted((DOCS / "results").glob("*.json"), key=_order):
        try:
            found[path.stem] = Record.load(path)
        except ValueError:
            continue
    return found


def _order(path: Path) -> tuple[bool, str]:
    return path.stem.startswith("cpu"), path.stem


def documents() -> dict[Path, str]:
    """Documents with tables in them, as they should read."""
    known = records()
    shown = known[SHOWN_IN_README]
    source = f"docs/results/{SHOWN_IN_README}.json"
    table = f"{report.markdown(shown, errors=False)} Raw data: [{source}]({source})."
    sections = tables.sections(DOCS / "results")
    sections += [section(name, record) for name, record in known.items()]
    found = {
        path: report.filled(path.read_text(), body)
        for path, body in (
            (ROOT / "README.md", table),
            (DOCS / "benchmarks.md", "\n\n".join(sections)),
        )
    }
    networks = [
        tables.networks_in_readme(DOCS / "results", NETWORKS_IN_README),
        tables.libraries_in_readme(DOCS / "results", LIBRARIES_IN_README),
        tables.up_layers_in_readme(DOCS / "results", UP_LAYERS_IN_README),
    ]
    if any(networks):
        markers = report.NETWORKS_BEGIN, report.NETWORKS_END
        found[ROOT / "README.md"] = report.filled(
            found[ROOT / "README.md"], "\n\n".join(filter(None, networks)), *markers
        )
    return found


def section(name: str, record: Record) -> str:
    """Heading, plot and table of one record."""
    found = report.lines(record)
    device = record.environment["gpu"] or "CPU"
    passes = ", ".join(dict.fromkeys(line.operation for line in found))
    modes = ", ".join(dict.fromkeys(line.mode for line in found))
    known = shapes.named("all")
    kinds = dict.fromkeys(known[line.shape].kind for line in found if line.shape in known)
    layers = "" if kinds else ", other layers"
    of = "Conv3d, " if list(kinds) == ["conv"] else ""
    return "\n".join(
        [
            f"## {device}: {of}{passes} ({modes}{layers})\n",
            f"![Speed-ups and roofline of {name}](figures/{name}.svg)\n",
            report.markdown(record),
            f"\nRaw data: [results/{name}.json](results/{name}.json), "
            f"by {command(record)}, {record.started[:10]}.",
        ]
    )


def command(record: Record) -> str:
    """The command that made a record; of a long list of layers only their number."""
    words = record.command
    layers = [i for i, word in enumerate(words) if word == "--shape"]
    if len(layers) <= 2:
        return f"`convt3d {' '.join(words)}`"
    left_out = {j for i in layers for j in (i, i + 1)}
    kept = [word for i, word in enumerate(words) if i not in left_out]
    return f"`convt3d {' '.join(kept)} --shape ...` ({len(layers)} layers)"


if __name__ == "__main__":
    main()
