"""Writes every figure and every table of results anew from docs/results: ``make figures``.

    python tools/figures.py            # or with --tables: only those, in a second

- docs/figures/: the explanatory drawings (schematics.py), and one plot of each benchmark record;
- README.md, docs/benchmarks.md: what stands between markers (tables.py, network_tables.py).

No figure in these places is typed by hand, and tests fail while one is not that of its record.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

import network_tables
import schematics
import tables

from convt3d.bench import plot
from convt3d.bench.record import Record

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


def main() -> None:
    if "--tables" not in sys.argv[1:]:
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
    return dict(tables.Results(DOCS / "results", "").records())


def documents() -> dict[Path, str]:
    """Documents with tables in them, as they should read."""
    readme = tables.Results(DOCS / "results", "docs/results")
    page = tables.Results(DOCS / "results", "results")
    blocks = {
        ROOT / "README.md": {
            "networks": network_tables.in_readme(readme),
            "results": tables.in_readme(readme),
        },
        DOCS / "benchmarks.md": {**network_tables.blocks(page), **tables.blocks(page)},
    }
    return {path: tables.filled(path.read_text(), found) for path, found in blocks.items()}


if __name__ == "__main__":
    main()
