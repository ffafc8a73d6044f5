"""Fills the table of results in a README from a record: no figure is typed by hand.

``python -m convt3d.bench.readme README.md docs/results/cpu-quick.json``
"""

from __future__ import annotations

import argparse
from pathlib import Path

from convt3d.bench.cases import MODES, PASSES
from convt3d.bench.report import fill_readme
from convt3d.bench.run import Record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("readme", type=Path)
    parser.add_argument("record", type=Path)
    parser.add_argument("--pass", dest="passes", action="append", help="only these; repeatable")
    parser.add_argument("--mode", action="append", help="only these, as tf32; repeatable")
    arguments = parser.parse_args()
    source = arguments.record.resolve().relative_to(arguments.readme.resolve().parent)
    record = Record.load(arguments.record)
    record.rows = {
        key: row
        for key, row in record.rows.items()
        if row["pass"] in (arguments.passes or PASSES) and row["mode"] in (arguments.mode or MODES)
    }
    fill_readme(arguments.readme, record, source.as_posix())


if __name__ == "__main__":
    main()
