"""Which plan won when candidates were timed: on disk, by the very extents (records.py, codec.py).

A winner is that of the very extents that were timed: a plan that wins there may lose at others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from convt3d.cuda import codec, records
from convt3d.cuda.schedule import Gpu, Plan, Problem
from convt3d.log import log_once

_FOLDER = "tuned"
_found: dict[str, Plan | None] = {}  # what the files say, by their name


def recall(problem: Problem, batch: int, input_size: Sequence[int], gpu: Gpu) -> Plan | None:
    """The plan that won, or None.

    Args:
        problem: in its canonical form.
        batch: number of samples.
        input_size: spatial size (D, H, W) of the layer's input.
        gpu: where it was timed.
    """
    if not gpu.name:  # no GPU at hand: what was timed elsewhere says nothing
        return None
    key = records.key_of(problem, batch, tuple(input_size), gpu)
    name = str(records.path_of(_FOLDER, key))
    if name not in _found:
        _found[name] = records.read(_FOLDER, key, codec.unsealed)
    return _found[name]


def remember(
    problem: Problem,
    batch: int,
    input_size: Sequence[int],
    gpu: Gpu,
    plan: Plan,
    facts: dict[str, Any],
) -> bool:
    """Keep the winner, for this process and on disk; whether it could be written.

    ``facts`` (times) are for people who read the file.
    """
    key = records.key_of(problem, batch, tuple(input_size), gpu)
    _found[str(records.path_of(_FOLDER, key))] = plan
    try:
        record = codec.sealed(plan)
    except TypeError as error:
        log_once(f"the winner of {problem.geometry.label} is not remembered: {error}")
        return False
    return records.write(_FOLDER, key, {**record, **facts})


def forget() -> None:
    """Drop what this process has read."""
    _found.clear()
