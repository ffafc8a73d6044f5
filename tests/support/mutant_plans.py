"""What a mutation of a planner changes: the schedules of frozen plans, or only which are listed.

    python -m support.mutant_plans freeze FILE    ranks plans of the tests' layers and keeps some
    python -m support.mutant_plans compare FILE   prints what came of them: same, choice or changed

A planner that lists fewer plans, or the same ones in another order, chooses otherwise and is right
all the same; a schedule that differs, or a plan that was not listed before, may be wrong.
"""

from __future__ import annotations

import itertools
import pickle
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from convt3d.cuda import plan
from convt3d.cuda.schedule import OPERATIONS, Gpu, Plan, Problem
from convt3d.geometry import Triple
from convt3d.precision import Arithmetic
from support.plans import spread

PLANS = 12  # of a problem and family, evenly over the ranking
GPUS = (Gpu(), Gpu((8, 0), 108, 166912, 167936))
ARITHMETICS = (Arithmetic.TF32, Arithmetic.BF16, Arithmetic.IEEE, Arithmetic.F16)
LAYOUTS = ((False, False), (True, True), (False, True))


def problems() -> Iterator[tuple[Problem, int, Triple, Gpu]]:
    """The tests' layers; arithmetics, layouts and architectures take turns."""
    import test_compile_kernels
    import test_emulator_kernels

    layers = [(geometry, (16, 16, 16)) for geometry in test_compile_kernels.LAYERS.values()]
    layers += test_emulator_kernels.LAYERS.values()
    for i, ((geometry, size), operation) in enumerate(itertools.product(layers, OPERATIONS)):
        arithmetic, layout = ARITHMETICS[i % len(ARITHMETICS)], LAYOUTS[i // 2 % len(LAYOUTS)]
        problem = Problem(operation, geometry, arithmetic, *layout, operation == "forward")
        yield problem, 2, size, GPUS[i % 5 == 4]


def listed(problem: Problem, batch: int, size: Triple, gpu: Gpu) -> list[Plan]:
    """The plans of a problem, best first."""
    return plan.ranked_plans(problem, batch, size, gpu)


def schedule_of(one: Plan, batch: int, size: Triple) -> str:
    """The launches of a plan, in words, or what it raises."""
    try:
        return repr(one.schedule(batch, size))
    except Exception as error:
        return repr(error)


def freeze() -> list[Any]:
    """Of every problem: the names of all its plans, and some plans with their schedules."""
    found = []
    for problem, batch, size, gpu in problems():
        plans = listed(problem, batch, size, gpu)
        kept = [(one, schedule_of(one, batch, size)) for one in spread(plans, PLANS)]
        found.append((frozenset(map(repr, plans)), kept))
    return found


def compare(frozen: Sequence[Any]) -> str:
    """What this planner makes of plans that another froze."""
    order = False
    asked = list(problems())
    for (_, kept), (_, batch, size, _) in zip(frozen, asked, strict=True):
        if any(schedule_of(one, batch, size) != before for one, before in kept):
            return "changed"
    for (names, kept), call in zip(frozen, asked, strict=True):
        try:
            plans = listed(*call)
        except Exception:
            return "changed"
        now = frozenset(map(repr, plans))
        if now - names:
            return "changed"
        order |= now != names or [one for one, _ in kept] != list(spread(plans, PLANS))
    return "choice" if order else "same"


if __name__ == "__main__":
    command, path = sys.argv[1], Path(sys.argv[2])
    if command == "freeze":
        path.write_bytes(pickle.dumps(freeze()))
    else:
        print(compare(pickle.loads(path.read_bytes())))
