"""What remains of records of Conv3d layers under cudnn.benchmark: a row for each operation.

    python tools/conv_tuned.py OUT RECORD...

The records are those of ``convt3d bench --tune``. Their rows take ten times the space, and a page
quotes means alone.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from convt3d.bench.contenders import DEFAULT, OURS  # noqa: E402
from convt3d.bench.record import digits  # noqa: E402

TUNED = {"ncdhw": "cudnn_benchmark", "ndhwc": "cudnn_channels_last"}
WHAT = (
    "ms of Conv3d layers: ours and PyTorch's with cudnn.benchmark = True, PyTorch's as it comes "
    "(default_ms); each setting in a process of its own"
)


def condensed(records: list[dict[str, Any]]) -> dict[str, Any]:
    """One record of the environment of the first; rows of another commit name it."""
    environment = records[0]["environment"]
    cases: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
    commits: dict[tuple[str, ...], dict[str, str]] = {}
    for record in records:
        commit = record["environment"]["commit"]
        for row in record["rows"]:
            case = (row["shape"], row["mode"], row["layout"], row["pass"])
            cases.setdefault(case, {})[row["contender"]] = row
            commits[case] = {} if commit == environment["commit"] else {"commit": commit}
    rows = [
        {
            "shape": shape,
            "mode": mode,
            "layout": layout,
            "pass": operation,
            "ms": row[OURS]["ms"],
            "runs_as": row[OURS]["runs_as"],
            "default_ms": row[DEFAULT]["ms"],
            "cudnn_benchmark_ms": row[TUNED[layout]]["ms"],
            "relative_error": digits(row[OURS]["error"]["relative"]),
            "pytorch_relative_error": digits(row[OURS]["error"]["pytorch_relative"]),
            **commits[shape, mode, layout, operation],
        }
        for (shape, mode, layout, operation), row in cases.items()
    ]
    return {"environment": environment, "what": WHAT, "rows": rows}


def main() -> None:
    out, *names = map(pathlib.Path, sys.argv[1:])
    record = condensed([json.loads(name.read_text()) for name in names])
    rows = ",\n  ".join(map(json.dumps, record.pop("rows")))
    head = "".join(f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in record.items())
    out.write_text(f'{{\n{head} "rows": [\n  {rows}\n ]\n}}\n')


if __name__ == "__main__":
    main()
