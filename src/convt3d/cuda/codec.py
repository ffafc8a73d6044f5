"""Plans as JSON and back: types and fields, and a digest that tells whether they came back whole.

Only classes that the planner has named (:func:`know`) are ever made from a text.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

from convt3d.cuda import records
from convt3d.cuda.schedule import Gpu, Plan, Problem
from convt3d.geometry import Geometry
from convt3d.precision import Arithmetic

_PLAIN = (bool, int, float, str, type(None))


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"  # several families have a Tile


_PLANS: set[type[Plan]] = set()
_CLASSES: dict[str, Any] = {_name(kind): kind for kind in (Problem, Geometry, Gpu)}


def know(plans: Iterable[type[Plan]], tiles: Iterable[type]) -> None:
    """Make plans of these classes, which may have tiles of those."""
    _PLANS.update(plans)
    _CLASSES.update((_name(kind), kind) for kind in (*_PLANS, *tiles))


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
    return make(value["type"], decode_fields(value["fields"]))


def class_of(name: str) -> Any:
    """The class of a part of plans; KeyError if there is none of this name."""
    return _CLASSES[name]


def decode_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields as :func:`encode` gives them; raises as :func:`decode`."""
    return {name: decode(item) for name, item in fields.items()}


def make(name: str, fields: dict[str, Any]) -> Any:
    """A plan, or a part of one, by the name of its class; raises as :func:`decode`."""
    return class_of(name)(**fields)


def seal(plan: Plan) -> str:
    """A digest of all that a plan holds: its repr may leave out fields, its JSON has them."""
    return records.digest(repr(plan) + json.dumps(encode(plan)))


def unsealed(record: dict[str, Any]) -> Plan:
    """The plan of a record that has ``plan``, by :func:`encode`, and ``seal``, by :func:`seal`.

    Raises:
        ValueError, KeyError, TypeError: it is damaged, or of another version.
    """
    plan = decode(record["plan"])
    if type(plan) not in _PLANS or seal(plan) != record["seal"]:
        raise ValueError("damaged")
    return plan


def sealed(plan: Plan) -> dict[str, Any]:
    """What :func:`unsealed` takes; raises TypeError as :func:`encode`."""
    return {"plan": encode(plan), "seal": seal(plan)}
