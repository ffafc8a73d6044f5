"""Which plan the cost models chose, remembered on disk (see records.py): choosing takes time.

A file holds the plan itself, as types and fields. Only the classes listed here are ever made from
it, and what comes out is compared with a digest of the plan that went in. The key has a digest of
the planner's own text: a changed cost model chooses anew.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from typing import Any

from convt3d.cuda import records
from convt3d.cuda.plan import (
    ampere_gather,
    ampere_patch,
    ampere_strided,
    ampere_strided_rows,
    ampere_strided_slices,
    ampere_wgrad,
    col2im,
    depthwise,
    direct,
    ndhwc,
    patch,
    phases,
    rows,
    strided_dgrad,
    sweep,
    transposed,
    wgrad,
    wgrad_ndhwc,
)
from convt3d.cuda.records import Extents
from convt3d.cuda.schedule import Gpu, Plan, Problem
from convt3d.geometry import Geometry
from convt3d.log import log_once
from convt3d.precision import Arithmetic

PLANS: tuple[type[Plan], ...] = (
    direct.DirectPlan,
    direct.DirectWgradPlan,
    ampere_patch.PatchPlan,
    ampere_gather.GatherPlan,
    ampere_wgrad.WgradPlan,
    depthwise.DepthwisePlan,
    depthwise.DepthwiseWgradPlan,
    col2im.Col2imPlan,
    ampere_strided.StridedPlan,
    ampere_strided_rows.StridedRowsPlan,
    ampere_strided_slices.StridedSlicesPlan,
    patch.WgmmaPatchPlan,
    wgrad.WgmmaWgradPlan,
    wgrad_ndhwc.WgmmaWgradNdhwcPlan,
    ndhwc.WgmmaNdhwcPlan,
    phases.WgmmaPhasesPlan,
    transposed.WgmmaTransposedPlan,
    sweep.WgmmaSweepPlan,
    rows.WgmmaRowsPlan,
    strided_dgrad.WgmmaStridedDgradPlan,
)
_PARTS: tuple[type, ...] = (
    Problem,
    Geometry,
    Gpu,
    ampere_patch.Tile,
    ampere_gather.Tile,
    col2im.Col2imTile,
    ampere_strided.Tile,
    ampere_strided_rows.RowsTile,
    ampere_strided_slices.SlicesTile,
    patch.Tile,
    ndhwc.NdhwcTile,
    phases.PhasesTile,
    transposed.TransposedTile,
    sweep.SweepTile,
    rows.RowsTile,
    strided_dgrad.DgradTile,
    wgrad_ndhwc.Tile,
)
_FOLDER = "chosen"
_PLAIN = (bool, int, float, str, type(None))


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"  # several families have a Tile


_CLASSES: dict[str, Any] = {_name(kind): kind for kind in (*PLANS, *_PARTS)}


def encode(value: object) -> Any:
    """A plan, or a part of one, as JSON has it; tuples become lists.

    Raises:
        TypeError: a value of another type than plans are made of.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, tuple) and kind is tuple:
        return [encode(item) for item in value]
    if isinstance(value, Arithmetic):
        return {"type": _name(kind), "value": value.value}
    if _name(kind) not in _CLASSES:
        raise TypeError(f"{kind.__name__} is no part of plans")
    fields = {
        f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(_CLASSES[_name(kind)])
    }
    return {"type": _name(kind), "fields": fields}


def decode(value: Any) -> Any:
    """What :func:`encode` was given.

    Raises:
        ValueError, KeyError, TypeError: not what it gave.
    """
    if isinstance(value, list):
        return tuple(decode(item) for item in value)
    if not isinstance(value, dict):
        return value
    if value["type"] == _name(Arithmetic):
        return Arithmetic(value["value"])
    fields = {name: decode(item) for name, item in value["fields"].items()}
    return _CLASSES[value["type"]](**fields)


def _seal(plan: Plan) -> str:
    """A digest of all that a plan holds: its repr may leave out fields, its JSON has them."""
    return records.digest(repr(plan) + json.dumps(encode(plan)))


@functools.cache
def _planner() -> str:
    """A digest of the text that chooses."""
    return records.digest_of_files(pathlib.Path(__file__).parent, "*.py")


def _key(problem: Problem, batch: int, extents: Extents, gpu: Gpu) -> str:
    return f"{records.key_of(problem, batch, extents, gpu)}; planner {_planner()}"


def recall(problem: Problem, batch: int, extents: Extents, gpu: Gpu) -> Plan | None:
    """The plan that was chosen, or None; ``batch`` and ``extents`` are classes."""
    if not gpu.name:  # no GPU at hand: nothing waits for a first call
        return None

    def plan_of(record: dict[str, Any]) -> Plan:
        plan = decode(record["plan"])
        if not isinstance(plan, PLANS) or _seal(plan) != record["seal"]:
            raise ValueError("damaged")
        return plan

    return records.read(_FOLDER, _key(problem, batch, extents, gpu), plan_of)


def remember(problem: Problem, batch: int, extents: Extents, gpu: Gpu, plan: Plan) -> bool:
    """Keep a choice on disk; whether it could be written."""
    if not gpu.name:
        return False
    try:
        record = {"plan": encode(plan), "seal": _seal(plan)}
    except TypeError as error:
        log_once(f"the choice of {problem.geometry.label} is not remembered: {error}")
        return False
    return records.write(_FOLDER, _key(problem, batch, extents, gpu), record)
