"""Which plan the cost models chose, remembered on disk (see records.py): choosing takes time.

A file holds the plan itself (see codec.py). The key has a digest of the planner's own text: a
changed cost model chooses anew.
"""

from __future__ import annotations

import functools
import pathlib

from convt3d.cuda import codec, records
from convt3d.cuda.records import Extents
from convt3d.cuda.schedule import Gpu, Plan, Problem
from convt3d.log import log_once

_FOLDER = "chosen"


@functools.cache
def _planner() -> str:
    """A digest of the text that chooses."""
    return records.digest_of_files(pathlib.Path(__file__).parent, "*.py")


def _key(problem: Problem, batch: int, extents: Extents, gpu: Gpu) -> str:
    return f"{records.key_of(problem, batch, extents, gpu)}; planner {_planner()}"


def recall(problem: Problem, batch: int, extents: Extents, gpu: Gpu) -> Plan | None:
    """The plan that was chosen, or None; ``extents`` are those of the layer's input."""
    if not gpu.name:  # no GPU at hand: nothing waits for a first call
        return None

    return records.read(_FOLDER, _key(problem, batch, extents, gpu), codec.unsealed)


def remember(problem: Problem, batch: int, extents: Extents, gpu: Gpu, plan: Plan) -> bool:
    """Keep a choice on disk; whether it could be written."""
    if not gpu.name:
        return False
    try:
        record = codec.sealed(plan)
    except TypeError as error:
        log_once(f"the choice of {problem.geometry.label} is not remembered: {error}")
        return False
    return records.write(_FOLDER, _key(problem, batch, extents, gpu), record)
