"""Writes kernelbench/*.py anew from kernelbench/problems and the package's kernels.

    python tools/kernelbench_generate.py

Measured figures come from docs/results/kernelbench-h200.json where that measured these kernels.
"""

from __future__ import annotations

import pathlib
import sys

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "src"))


def main() -> None:
    from convt3d import export
    from convt3d.export.writer import shipped_figures

    figures = shipped_figures(ROOT)
    for problem in sorted((ROOT / "kernelbench" / "problems").glob("*.py")):
        made = export.export(export.from_problem(problem), figures=figures)
        path = ROOT / "kernelbench" / problem.name
        path.write_text(made.text)
        print(f"{path.relative_to(ROOT)}: kernels {made.digest}, {len(made.text) // 1024} KiB")


if __name__ == "__main__":
    main()
