"""The table of measured winners: its lines are whole, and their plans launch what was timed."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from convt3d.bench import shapes, tune
from convt3d.bench.tune import jobs
from convt3d.cuda import tuning
from convt3d.cuda.plan import choose, table
from convt3d.cuda.plan.search import with_problem
from convt3d.cuda.schedule import Gpu, Plan, Problem
from convt3d.geometry import Geometry
from convt3d.operations import OPERATIONS
from convt3d.precision import Arithmetic

GPU = Gpu()
ROWS = table.rows()


def problem_of(key: str) -> tuple[Problem, int, tuple[int, ...]]:
    """What a key says: the other direction of ``table.key_of``."""
    operation, arithmetic, layouts, *words = key.split()
    bias = words[0] == "bias"
    channels, k, s, p, op, d, g, n, size = words[bias:]

    def triple(word: str, name: str) -> Any:
        return tuple(int(v) for v in word.removeprefix(name).split("x"))

    source, target = (layout == "ndhwc" for layout in layouts.split("-"))
    c_in, c_out = map(int, channels.split("-"))
    geometry = Geometry(
        c_in,
        c_out,
        triple(k, "k"),
        triple(s, "s"),
        triple(p, "p"),
        triple(op, "op"),
        triple(d, "d"),
        int(g.removeprefix("g")),
    )
    problem = Problem(operation, geometry, Arithmetic(arithmetic), source, target, bias)
    return problem, int(n.removeprefix("n")), triple(size, "")


def test_lines_are_whole_and_differ() -> None:
    assert len(ROWS) > 600
    assert len({row["key"] for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert table.key_of(*problem_of(row["key"])) == row["key"]
        assert 0 < row["ms"] <= row["model_ms"] and row["timed"] >= 1
        assert problem_of(row["key"])[0] == problem_of(row["key"])[0].canonical((1, 1, 1))[0]


def test_plans_launch_what_was_timed() -> None:
    """A planner that changes what a tile means makes a line stale: time it anew."""
    stale = []
    for row in ROWS:
        problem, batch, size = problem_of(row["key"])
        winner = table.recall(problem, batch, size, GPU)
        assert winner is not None and winner.plan.problem == problem, row["key"]
        assert (winner.ms, winner.next_ms) == (row["ms"], row["next_ms"])
        assert json.loads(json.dumps(table.record_of(winner.plan))) == row["plan"]
        if table.digest(winner.plan, batch, size) != row["launches"]:
            stale.append(row["key"])
    assert not stale, f"{len(stale)} lines are stale, such as {stale[:3]}: convt3d tune --table"


@pytest.mark.parametrize("kind", ["transposed", "conv"])
def test_named_layers_are_in_it(kind: str) -> None:
    """In both layouts, TF32 and bfloat16, but for what was not reached when it was measured."""
    layers = shapes.select([kind])
    wanted = jobs(layers, ["tf32", "bf16"], ["ncdhw", "ndhwc"], list(OPERATIONS), (9, 0))
    found = 0
    for job in wanted:
        problem, size = job.problem.canonical(job.shape.input_size)
        found += table.recall(problem, job.shape.batch, size, GPU) is not None
    assert found >= 0.9 * len(wanted)


def test_it_is_asked_before_the_cost_models() -> None:
    row = next(row for row in ROWS if row["ms"] < 0.9 * row["model_ms"])
    problem, batch, size = problem_of(row["key"])
    ranked = choose.ranked_plans(problem, batch, size, GPU)
    plan, by = choose.decide(problem, batch, size, GPU)
    assert plan != ranked[0] and "timed on an H200" in by
    other = (size[0], size[1], size[2] + 8)
    assert choose.decide(problem, batch, other, GPU)[1] == "the cost models"
    for gpu in (Gpu((8, 0), 108, 166912, 167936), Gpu(multiprocessors=66)):
        assert table.recall(problem, batch, size, gpu) is None


@pytest.mark.parametrize("operation", ["forward", "grad_weight"])
def test_with_and_without_a_bias_a_plan_is_the_same(operation: str) -> None:
    """One of the epilogue, or the gradient by it: that comes along, or is a pass of its own."""
    row = next(row for row in ROWS if row["key"].startswith(operation))
    problem, batch, size = problem_of(row["key"])
    known = table.recall(problem, batch, size, GPU)
    other = table.recall(replace(problem, bias=not problem.bias), batch, size, GPU)
    assert known is not None and other is not None
    assert other.plan.problem.bias is not problem.bias
    assert with_problem(other.plan, problem) == known.plan


def test_both_types_of_16_bits_run_the_same_plans() -> None:
    seen = set()
    for row in ROWS:
        problem, batch, size = problem_of(row["key"])
        if problem.arithmetic is not Arithmetic.BF16:
            continue
        half = replace(problem, arithmetic=Arithmetic.F16)
        timed, other = (table.recall(p, batch, size, GPU) for p in (problem, half))
        assert timed is not None and other is not None, row["key"]
        assert other.plan == with_problem(timed.plan, half)
        assert "timed in bf16 on an" in str(other) and "in bf16" not in str(timed)
        launches = [one.plan.schedule(batch, size).launches for one in (timed, other)]
        for one, two in zip(*launches, strict=True):
            assert (one.grid, one.block, one.shared_bytes) == (
                two.grid,
                two.block,
                two.shared_bytes,
            )
        seen.add(type(other.plan))
    assert len(seen) > 5
    single = replace(problem_of(ROWS[0]["key"])[0], arithmetic=Arithmetic.TF32)
    assert all(one.arithmetic is Arithmetic.TF32 for one in single.alike)


def test_the_bias_of_a_strided_conv3d_has_plans_of_its_own() -> None:
    row = next(row for row in ROWS if row["key"].startswith("grad_input"))
    problem, batch, size = problem_of(row["key"])
    assert table.recall(replace(problem, bias=not problem.bias), batch, size, GPU) is None


def test_winners_of_all_layers_with_a_bias_are_found() -> None:
    """What a training step asks for is not what was timed: it brings the gradient by bias."""
    seen = 0
    for shape in shapes.select(["transposed"]):
        problem = choose.problem_for(
            "grad_weight", shape.geometry, torch.bfloat16, channels_last=True
        )
        size = (*shape.input_size,)
        alone, said = choose.decide(problem, shape.batch, size, GPU)
        both = replace(problem, bias=True)
        plan, why = choose.decide(both, shape.batch, size, GPU)
        if "timed" in said:
            seen += 1
            assert why == said and plan == with_problem(alone, both), shape.name
    assert seen > 5


def test_a_plan_that_does_not_fit_is_not_taken() -> None:
    row = max(ROWS, key=lambda row: "SweepPlan" in row["plan"]["type"])
    problem, batch, size = problem_of(row["key"])
    assert table.recall(problem, batch, size, replace(GPU, shared_per_block=48 << 10)) is None


@pytest.mark.parametrize(
    "damage",
    [{"type": "os.system", "fields": {}}, {"fields": {}}, {"type": None, "fields": {"x": 1}}],
)
def test_a_line_that_is_not_understood_is_ignored(
    damage: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = ROWS[0]
    lines = {row["key"]: json.dumps({**row, "plan": damage})}
    monkeypatch.setattr(table, "_lines", lambda name: lines)
    problem, batch, size = problem_of(row["key"])
    assert table.recall(problem, batch, size, GPU) is None
    plan: Plan = choose.plan_as_given(problem, batch, size, GPU)
    assert plan.problem == problem


def test_looking_up_is_quick() -> None:
    table.recall(*problem_of(ROWS[0]["key"]), GPU)  # reads the file
    keys = [problem_of(row["key"]) for row in ROWS[::10]]
    begin = time.process_time()
    for key in keys:
        table.recall(*key, GPU)
    assert (time.process_time() - begin) / len(keys) < 0.005


def test_tuning_writes_lines(tmp_path: Path) -> None:
    """What ``convt3d tune --table`` puts into a file is what the planner reads."""
    (shape,) = shapes.select(["n=1,in=16,out=8,size=6,k=3"])
    todo = jobs([shape], ["tf32"], ["ncdhw"], list(OPERATIONS), (9, 0))

    def run(problem: Problem, batch: int, size: tuple[int, ...]) -> tuning.Outcome:
        times = itertools.chain([3.0, 1.0], itertools.repeat(2.0))
        return tuning.tune(problem, batch, size, Gpu(), lambda _: next(times), 3)

    found = [row["line"] for row in tune.rows(todo, run)]
    path = tmp_path / "table.jsonl"
    table.update(path, found)
    table.update(path, found[:1])
    lines = {line["key"]: line for line in map(json.loads, path.read_text().splitlines())}
    assert len(lines) == len({line["key"] for line in found}) and list(lines) == sorted(lines)
    for key, line in lines.items():
        problem, batch, size = problem_of(key)
        plan = table.plan_of(line["plan"], problem, GPU)
        assert table.digest(plan, batch, size) == line["launches"]
        assert (line["ms"], line["model_ms"], line["next_ms"]) == (1.0, 3.0, 2.0)


def test_tuning_times_the_winner_of_the_table() -> None:
    row = next(row for row in ROWS if row["ms"] < 0.9 * row["model_ms"])
    problem, batch, size = problem_of(row["key"])
    winner = table.recall(problem, batch, size, GPU)
    quick = tuning.candidates(problem, batch, size, GPU, tuning.QUICK)
    assert winner is not None and quick[0] == winner.plan
    assert quick.count(winner.plan) == 1
