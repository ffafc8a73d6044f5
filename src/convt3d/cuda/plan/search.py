"""Plans of other tiles, plans by their costs, and the cheapest without pricing every one."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

from convt3d.cuda.schedule import Problem

Base = TypeVar("Base")
Priced = TypeVar("Priced")


def with_tile(plan: Priced, **choices: object) -> Priced:
    """The plan with other choices of its tile."""
    any_plan: Any = plan
    other: Priced = replace(any_plan, tile=replace(any_plan.tile, **choices))
    return other


def with_problem(plan: Priced, problem: Problem) -> Priced:
    """The same choices for a problem that they serve as well."""
    any_plan: Any = plan
    other: Priced = replace(any_plan, problem=problem)
    return other


def by_cost(found: Iterable[tuple[float, Priced]]) -> list[tuple[float, Priced]]:
    """Plans with their costs, cheapest first; of equal ones in their order."""
    return sorted(found, key=lambda item: item[0])


def cheapest(
    bases: Iterable[tuple[float, Base]],
    price: Callable[[Base], Iterable[tuple[float, Priced]]],
    below: float | None = None,
    most: int = 1,
) -> list[tuple[float, Priced]]:
    """Plans with their costs, cheapest first; of equal ones in the order of the bases.

    Args:
        bases: what plans are derived from, each with a bound that no cost of them undercuts.
        price: the plans of a base with their costs; those of infinite cost are dropped.
        below: the least cost known so far. Bases whose bound exceeds it, or the least cost found
            here, are not priced. None: price all of them.
        most: how many of the cheapest must be found; where they are several, ``below`` spares none.
    """
    found: list[tuple[float, int, Priced]] = []
    least = [] if below is None or most > 1 else [below]  # of the costs known, in order
    for bound, index, base in sorted(
        ((bound, index, base) for index, (bound, base) in enumerate(bases)), key=_first_two
    ):
        if below is not None and len(least) >= most and bound > least[most - 1]:
            break
        for cost, plan in price(base):
            if cost < float("inf"):
                found.append((cost, index, plan))
                bisect.insort(least, cost)
    return [(cost, plan) for cost, _, plan in sorted(found, key=_first_two)]


def _first_two(item: tuple[float, int, object]) -> tuple[float, int]:
    return item[:2]
