"""What remains of records of layers under cudnn.benchmark: a row for each operation.

    python tools/tuned_rows.py OUT RECORD...

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
from convt3d.bench.record import digits, record_text  # noqa: E402

TUNED = {"ncdhw": "cudnn_benchmark", "ndhwc": "cudnn_channels_last"}
WHAT = (
    "ms of layers: ours and PyTorch's with cudnn.benchmark = True, PyTorch's as it comes "
    "(default_ms); share: of the hardware limit; each setting in a process of its own"
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
            **_facts(row[OURS]),
            "default_ms": row[DEFAULT]["ms"],
            "cudnn_benchmark_ms": row.get(TUNED[layout], {}).get("ms"),
            **commits[shape, mode, layout, operation],
        }
        for (shape, mode, layout, operation), row in cases.items()
    ]
    return {"environment": environment, "what": WHAT, "rows": rows}


def _facts(row: dict[str, Any]) -> dict[str, Any]:
    """What a row of ours tells beside its time; a training step has none of it."""
    facts = {name: row[name] for name in ("runs_as", "share") if row.get(name) is not None}
    if "error" in row:
        facts["relative_error"] = digits(row["error"]["relative"])
        facts["pytorch_relative_error"] = digits(row["error"]["pytorch_relative"])
    return facts


def main() -> None:
    out, *names = map(pathlib.Path, sys.argv[1:])
    out.write_text(record_text(condensed([json.loads(name.read_text()) for name in names])))


if __name__ == "__main__":
    main()
