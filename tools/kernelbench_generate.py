"""Writes kernelbench/*.py anew, and the table in docs/kernelbench.md.

    python tools/kernelbench_generate.py [--level2] [--figures] [NAME ...]

From kernelbench/problems and the package's kernels, tidied: needs the extra ``tidy`` and NVRTC, no
GPU, and some minutes a file. Measured figures come from docs/results/kernelbench-level1.json, a
record of tools/kernelbench_check.py; files quote it where it measured the very kernels that they
hold, and --figures writes nothing else of them. With --level2, kernelbench/level2/*.py and the
second table, from the record docs/results/kernelbench-level2.json.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import sys
from collections.abc import Mapping
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

BEGIN = "<!-- results: written by tools/kernelbench_generate.py -->\n"
END = "<!-- end of results -->\n"
BEGIN_LEVEL2 = "<!-- results of level 2: written by tools/kernelbench_generate.py --level2 -->\n"
END_LEVEL2 = "<!-- end of results of level 2 -->\n"


def main() -> None:
    from convt3d import export
    from convt3d.export.header import quoting, shipped_figures

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="files; default all")
    parser.add_argument("--level2", action="store_true", help="the files of level 2")
    parser.add_argument("--figures", action="store_true", help="measured figures alone")
    arguments = parser.parse_args()
    level2, wanted = arguments.level2, arguments.names
    level = "level2" if level2 else ""
    figures = shipped_figures(ROOT, level2)
    for problem in sorted((ROOT / "kernelbench" / "problems" / level).glob("*.py")):
        if wanted and problem.stem not in wanted:
            continue
        path = ROOT / "kernelbench" / level / problem.name
        if arguments.figures:
            if path.exists():
                path.write_text(quoting(path.read_text(), problem.stem, figures or {}))
            continue
        if level2:
            network = export.network_of(problem)
            made = export.export_network(network, tidy=True, figures=figures)
        else:
            made = export.export(export.from_problem(problem), tidy=True, figures=figures)
        path.write_text(made.text)
        lines = made.text.count("\n")
        print(f"{path.relative_to(ROOT)}: kernels {made.digest}, {lines} lines", flush=True)
    document = ROOT / "docs" / "kernelbench.md"
    begin, end = (BEGIN_LEVEL2, END_LEVEL2) if level2 else (BEGIN, END)
    pattern = re.escape(begin) + ".*" + re.escape(end)
    make = level2_table if level2 else results_table
    table = "" if figures is None else make(figures)
    text = document.read_text()
    document.write_text(re.sub(pattern, lambda _: begin + table + end, text, flags=re.DOTALL))


def _facts(figures: Mapping[str, Any]) -> str:
    """Where and when a record was made, and which files on another GPU or at another commit."""
    facts = figures["environment"]
    others: dict[str, list[str]] = {}
    for name, row in figures["files"].items():
        elsewhere = [row["gpu"]] if "gpu" in row else []
        elsewhere += [row["commit"][:12]] if "commit" in row else []
        if elsewhere:
            others.setdefault(", ".join(elsewhere), []).append(name)
    at = "".join(f"; {', '.join(names)}: {where}" for where, names in others.items())
    return (
        f"{facts['gpu']}, torch {facts['torch']}, cuDNN {facts['cudnn']}, "
        f"commit {str(facts['commit'])[:12]}{at}, {figures['date'][:10]}. Milliseconds of a "
        "forward call"
    )


def level2_table(figures: Mapping[str, Any]) -> str:
    """The record of level 2 as a Markdown table; times in milliseconds."""
    lines = [
        f"{_facts(figures)}.",
        "",
        "| file | trials | largest difference | ModelNew | Model | times | other checks |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in figures["files"].items():
        if "error" in row:
            lines.append(f"| {name} | failed |" + " |" * 5)
            continue
        checks = [check["passed"] for check in row["checks"].values()]
        cells = [
            name,
            f"{row['trials_passed']}/{row['trials']}",
            f"{row['largest_difference']:.1e}",
            f"{row['model_new_ms']:.3f}",
            f"{row['model_ms']:.3f}",
            f"{row['model_ms'] / row['model_new_ms']:.1f}",
            f"{sum(checks)}/{len(checks)}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(["", *lines, "", ""])


def results_table(figures: Mapping[str, Any]) -> str:
    """The record as a Markdown table; times in milliseconds."""
    lines = [
        f"{_facts(figures)}; 'step' is forward and backward.",
        "",
        "| file | trials | largest difference | ModelNew | Model | times | package's module "
        "| step | Model's step | other checks |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in figures["files"].items():
        if "error" in row:
            lines.append(f"| {name} | failed |" + " |" * 8)
            continue
        checks = [check["passed"] for check in row["checks"].values()]
        module = f"{row['module_ms']:.3f}" if "module_ms" in row else "-"
        cells = [
            name,
            f"{row['trials_passed']}/{row['trials']}",
            f"{row['largest_difference']:.1e}",
            f"{row['model_new_ms']:.3f}",
            f"{row['model_ms']:.3f}",
            f"{row['model_ms'] / row['model_new_ms']:.1f}",
            module,
            f"{row['model_new_train_ms']:.3f}",
            f"{row['model_train_ms']:.3f}",
            f"{sum(checks)}/{len(checks)}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(["", *lines, "", ""])


if __name__ == "__main__":
    main()
