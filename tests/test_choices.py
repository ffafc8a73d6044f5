"""Choices of the cost models on disk: what comes back is what went in, or is chosen anew."""

from __future__ import annotations

import importlib
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from convt3d.bench import shapes
from convt3d.cuda import choices, codec
from convt3d.cuda.plan import PLANS
from convt3d.cuda.plan import choose as plan
from convt3d.cuda.schedule import Gpu, Plan, Problem
from convt3d.geometry import Geometry
from convt3d.operations import OPERATIONS
from convt3d.precision import Arithmetic

GPU = Gpu((8, 0), 108, 166912, 167936, name="a GPU for tests")  # whose plans know it
PROBLEM = Problem("forward", Geometry(16, 24, (3, 3, 3)), Arithmetic.TF32)
BATCH, SIZE = 2, (17, 18, 19)
KEY = (PROBLEM, BATCH, SIZE, GPU)


@pytest.fixture(name="cache", autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("CONVT3D_CACHE_DIR", str(tmp_path))
    plan._plan.cache_clear()
    yield tmp_path
    plan._plan.cache_clear()


def planned(gpu: Gpu = GPU) -> tuple[Plan, int]:
    """The plan as in a new process, and how often plans were ranked for it."""
    plan._plan.cache_clear()
    with mock.patch.object(plan, "ranked_plans", wraps=plan.ranked_plans) as ranked:
        return plan.plan_problem(PROBLEM, BATCH, SIZE, gpu), ranked.call_count


def same(one: Any, other: Any) -> bool:
    """Equal, down to the types and the GPU, which comparisons and repr leave out."""
    gpus = (getattr(plan, "gpu", None) for plan in (one, other))
    return one == other and repr(one) == repr(other) and len(set(gpus)) == 1


def test_a_choice_is_made_once(cache: Path) -> None:
    first, ranked = planned()
    assert ranked == 1
    assert len(list((cache / "chosen").iterdir())) == 1
    again, ranked = planned()
    assert ranked == 0 and same(again, first)
    assert again.schedule(BATCH, SIZE).launches == first.schedule(BATCH, SIZE).launches
    other, ranked = planned(Gpu(name=GPU.name, multiprocessors=16))  # a part of the GPU
    assert ranked == 1 and not same(other, first)


def test_nothing_is_kept_without_a_gpu(cache: Path) -> None:
    assert [planned(Gpu())[1] for _ in range(2)] == [1, 1]
    assert not list(cache.iterdir())


def test_a_changed_planner_chooses_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    planned()
    monkeypatch.setattr(choices, "_planner", lambda: "another")
    assert [planned()[1] for _ in range(2)] == [1, 0]


def test_choices_come_back_soon() -> None:
    """Those of 16 bits; test_plan.py has TF32's, of every layer."""
    times = []
    gpu = Gpu(name=GPU.name)
    for name, operation in itertools.product(shapes.QUICK, OPERATIONS):
        shape = shapes.named()[name]
        problem = Problem(operation, shape.geometry, Arithmetic.BF16)
        at = (problem, shape.batch, shape.input_size, gpu)
        chosen = plan.ranked_plans(*at, first_only=True)[0]
        assert choices.remember(*at, chosen)
        begin = time.process_time()
        found = choices.recall(*at)
        times.append(time.process_time() - begin)
        assert same(found, chosen), (name, operation)
    assert statistics.median(times) < 0.005


def test_every_family_survives() -> None:
    """One plan of each, and no plan class is missing from the list."""
    layers = [
        Geometry(64, 64, (3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1)),
        Geometry(64, 32, (2, 2, 2), (2, 2, 2)),
        Geometry(64, 64, (4, 4, 4), (2, 2, 2), (1, 1, 1), groups=64),
        Geometry(64, 64, (3, 3, 3)),
    ]
    known: dict[type, Plan] = {}
    problems = [
        Problem(operation, layer, Arithmetic.BF16, last, last)
        for layer, operation, last in itertools.product(layers, OPERATIONS, (False, True))
    ]
    grouped = Geometry(16, 16, (3, 3, 3), (2, 2, 2), (1, 1, 1), groups=2)
    problems += [Problem(o, grouped, Arithmetic.IEEE) for o in ("forward", "grad_input")]
    for problem in problems:
        for one in plan.ranked_plans(problem, 2, (16, 16, 16), Gpu(name=GPU.name)):
            known.setdefault(type(one), one)
    for one in known.values():
        assert same(codec.decode(json.loads(json.dumps(codec.encode(one)))), one)
    folder = Path(plan.__file__).parent
    names = [".".join(p.relative_to(folder).with_suffix("").parts) for p in folder.rglob("*.py")]
    modules = [importlib.import_module(f"convt3d.cuda.plan.{name}") for name in names]
    classes = {c for module in modules for name, c in vars(module).items() if name.endswith("Plan")}
    assert set(known) == set(PLANS) == classes - {Plan}


def edited(record: dict[str, Any], *path: str, value: object) -> dict[str, Any]:
    inner = record
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return record


@pytest.mark.parametrize(
    "damage",
    [
        lambda record: "",
        lambda record: "[" * 100000,
        lambda record: "[]",
        lambda record: {**record, "key": "another"},
        lambda record: {**record, "plan": None},
        lambda record: {**record, "plan": record["plan"]["fields"]["problem"]},
        lambda record: edited(record, "plan", "type", value="os.system"),
        lambda record: edited(record, "plan", "fields", "gpu", "fields", "name", value="b GPU"),
        lambda record: edited(record, "plan", "fields", "swapped", value=1),
        lambda record: edited(record, "plan", "fields", "more", value=1),
        lambda record: edited(record, "plan", "fields", "problem", value=[]),
    ],
)
def test_a_damaged_file_is_replaced(cache: Path, damage: Any) -> None:
    chosen = plan.ranked_plans(*KEY, first_only=True)[0]
    assert choices.remember(*KEY, chosen)
    (file,) = (cache / "chosen").iterdir()
    content = damage(json.loads(file.read_text()))
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    for ranked in (1, 0):
        found, count = planned()
        assert count == ranked and same(found, chosen)


def test_a_folder_that_cannot_be_written(cache: Path) -> None:
    (cache / "chosen").write_text("in the way")
    (first, ranked), (second, ranked_again) = planned(), planned()
    assert ranked == ranked_again == 1 and same(first, second)


def test_what_json_would_change_is_not_kept() -> None:
    with pytest.raises(TypeError, match="int64"):
        codec.encode((np.int64(1),))
    with pytest.raises(TypeError, match="list"):
        codec.encode([1])
