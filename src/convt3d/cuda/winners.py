"""Which plan won when candidates were timed, remembered on disk (see records.py).

A file names a plan among those that the cost models offer and holds no more: whatever is in it,
only a plan of ours can run.
"""

from __future__ import annotations

from typing import Any

from convt3d.cuda import records
from convt3d.cuda.records import Extents
from convt3d.cuda.schedule import Gpu, Plan, Problem

_FOLDER = "tuned"
_found: dict[str, str | None] = {}  # what the files say, by their name


def fingerprint(plan: Plan) -> str:
    """A name of a plan that holds as long as its family describes it in the same way."""
    return f"{type(plan).__name__} {records.digest(repr(plan))[:20]}"


def recall(problem: Problem, batch: int, extents: Extents, gpu: Gpu) -> str | None:
    """Fingerprint of the plan that won, or None; ``batch`` and ``extents`` are classes."""
    if not gpu.name:  # no GPU at hand: what was timed elsewhere says nothing
        return None
    key = records.key_of(problem, batch, extents, gpu)
    name = str(records.path_of(_FOLDER, key))
    if name not in _found:
        _found[name] = records.read(_FOLDER, key, _plan_name)
    return _found[name]


def _plan_name(record: dict[str, Any]) -> str:
    if not isinstance(record["plan"], str):
        raise TypeError("the plan's name is no text")
    return record["plan"]


def remember(
    problem: Problem, batch: int, extents: Extents, gpu: Gpu, plan: Plan, facts: dict[str, Any]
) -> bool:
    """Keep the winner, for this process and on disk; whether it could be written.

    ``facts`` (times) are for people who read the file.
    """
    key, name = records.key_of(problem, batch, extents, gpu), fingerprint(plan)
    _found[str(records.path_of(_FOLDER, key))] = name
    return records.write(_FOLDER, key, {"plan": name, **facts})


def forget() -> None:
    """Drop what this process has read."""
    _found.clear()
