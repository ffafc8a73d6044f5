"""Writes kernelbench/*.py anew, and the table in docs/kernelbench.md.

    python tools/kernelbench_generate.py [NAME ...]

From kernelbench/problems and the package's kernels, tidied: needs the extra ``tidy`` and NVRTC, no
GPU, and some minutes a file. Measured figures come from the record
docs/results/kernelbench-h200.json (of tools/kernelbench_check.py); files quote it where it measured
the very kernels that they hold.
"""

from __future__ import annotations

import pathlib
import re
import sys
from collections.abc import Mapping
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

BEGIN = "<!-- results: written by tools/kernelbench_generate.py -->\n"
END = "<!-- end of results -->\n"


def main() -> None:
    from convt3d import export
    from convt3d.export.header import shipped_figures

    figures = shipped_figures(ROOT)
    for problem in sorted((ROOT / "kernelbench" / "problems").glob("*.py")):
        if len(sys.argv) > 1 and problem.stem not in sys.argv[1:]:
            continue
        made = export.export(export.from_problem(problem), tidy=True, figures=figures)
        path = ROOT / "kernelbench" / problem.name
        path.write_text(made.text)
        lines = made.text.count("\n")
        print(f"{path.relative_to(ROOT)}: kernels {made.digest}, {lines} lines", flush=True)
    document = ROOT / "docs" / "kernelbench.md"
    text = document.read_text()
    pattern = re.escape(BEGIN) + ".*" + re.escape(END)
    table = "" if figures is None else results_table(figures)
    document.write_text(re.sub(pattern, lambda _: BEGIN + table + END, text, flags=re.DOTALL))


def results_table(figures: Mapping[str, Any]) -> str:
    """The record as a Markdown table; times in milliseconds."""
    facts = figures["environment"]
    lines = [
        f"{facts['gpu']}, torch {facts['torch']}, cuDNN {facts['cudnn']}, "
        f"commit {str(facts['commit'])[:12]}, {figures['date'][:10]}. Milliseconds of a forward "
        "call; 'step' is forward and backward.",
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
