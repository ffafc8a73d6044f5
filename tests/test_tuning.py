"""Tuning: what is timed, what wins, and how it is remembered; the clock is a stand-in."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from typer.testing import CliRunner

from convt3d.bench import shapes, tune
from convt3d.cuda import compiler, plan, timing, tuning, winners
from convt3d.cuda.compiler import KernelSpec
from convt3d.cuda.plan import ndhwc, problem_for
from convt3d.cuda.plan.search import with_problem
from convt3d.cuda.schedule import Gpu, Plan, Problem
from convt3d.geometry import Geometry
from convt3d.layout import strides
from convt3d.operations import OPERATIONS
from convt3d.precision import Arithmetic
from emulator.gpu import EmulatedGpu

GPU = Gpu(name="a GPU for tests")
GEOMETRY = Geometry(16, 24, (3, 3, 3))
PROBLEM = Problem("forward", GEOMETRY, Arithmetic.TF32)
BATCH, SIZE = 2, (17, 18, 19)


@pytest.fixture(name="cache", autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("CONVT3D_CACHE_DIR", str(tmp_path))
    winners.forget()
    yield tmp_path
    winners.forget()


FAMILIES = 4  # that can run the problem


def planned(gpu: Gpu = GPU, size: tuple[int, ...] = SIZE) -> Plan:
    return plan.plan_problem(PROBLEM, BATCH, size, gpu)


def tuned(measure: Callable[[Plan], float], count: int = 8) -> tuning.Outcome:
    return tuning.tune(PROBLEM, BATCH, SIZE, GPU, measure, count)


def favouring(position: int) -> tuple[Plan, Callable[[Plan], float]]:
    """A clock under which the plan at a position is twice as fast as the others."""
    favourite = tuning.candidates(PROBLEM, BATCH, SIZE, GPU)[position]
    return favourite, lambda one: 1.0 if one == favourite else 2.0


def test_candidates_are_compiled_in_the_background_that_launches_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A launch finds them there; one that fails is left to the launch that needs it."""
    threads: set[str] = set()

    def obtain(spec: KernelSpec, target: str) -> compiler.Cubin:
        threads.add(threading.current_thread().name.rpartition("-")[0])
        if ("BROKEN", "1") in spec.macros:
            raise RuntimeError("broken, for a test")
        return compiler.Cubin(b"code", compiled=True)

    monkeypatch.setattr(compiler, "_obtain", obtain)
    monkeypatch.setattr(compiler, "_requests", {})
    file = "ampere/gather/kernel.cu"
    good, broken = (KernelSpec(file, "gather", ((name, "1"),)) for name in ("A", "BROKEN"))
    tuning.compile_kernels({good, broken}, GPU)
    assert threads == {"convt3d-compile"}
    target = compiler.architecture(GPU.capability)
    futures = [job.future for job in compiler._requests.values()]
    assert len(futures) == 2 and all(future.done() for future in futures)
    assert compiler.request(good, target) in futures
    assert compiler.request(broken, target) not in futures


def test_the_winner_is_planned_from_then_on(cache: Path) -> None:
    heuristic = planned()
    favourite, measure = favouring(5)
    assert favourite != heuristic
    outcome = tuned(measure)
    assert (outcome.plan, outcome.ms, outcome.heuristic_ms) == (favourite, 1.0, 2.0)
    # Eight, and the best of each family that is not among them.
    assert outcome.share == 0.5 and outcome.kept and 8 <= outcome.timed <= 8 + FAMILIES
    assert planned() == favourite
    winners.forget()  # as another process
    assert planned() == favourite
    (file,) = (cache / "tuned").iterdir()
    assert json.loads(file.read_text())["facts"]["ms"] == 1.0


def test_it_serves_its_very_extents_and_no_other() -> None:
    heuristic = planned()
    favourite, measure = favouring(3)
    tuned(measure)
    assert planned() == favourite
    assert planned(size=(18, 17, 19)) == heuristic
    assert planned(size=(3, 3, 3)) != favourite
    assert planned(gpu=Gpu(name="another")) == heuristic
    assert planned(gpu=Gpu()) == heuristic


def test_a_difference_within_the_noise_keeps_the_heuristic() -> None:
    favourite, _ = favouring(2)
    outcome = tuned(lambda one: 0.99 if one == favourite else 1.0)
    assert outcome.plan == planned(gpu=Gpu()) and outcome.share == 1.0


def test_candidates_that_fail_are_left_out() -> None:
    favourite, measure = favouring(4)

    def failing(one: Plan) -> float:
        if one != favourite:
            raise torch.cuda.OutOfMemoryError("no memory, for a test")
        return measure(one)

    assert tuned(failing).plan == favourite

    def refused(one: Plan) -> float:
        raise RuntimeError("refused")

    with pytest.raises(RuntimeError, match="could be timed"):
        tuned(refused)


def test_every_family_is_timed() -> None:
    ranked = plan.ranked_plans(PROBLEM, BATCH, SIZE, GPU)
    chosen = tuning.candidates(PROBLEM, BATCH, SIZE, GPU, 3)
    assert chosen[:3] == ranked[:3]
    assert {type(one) for one in chosen} == {type(one) for one in ranked}


@pytest.mark.sample
@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", '{"key": 1}', '{"key": "another", "plan": "x"}', "\x00" * 100],
)
def test_a_damaged_file_is_ignored_and_replaced(cache: Path, content: str) -> None:
    heuristic = planned()
    favourite, measure = favouring(1)
    tuned(measure)
    (file,) = (cache / "tuned").iterdir()
    file.write_text(content)
    winners.forget()
    assert planned() == heuristic
    tuned(measure)
    winners.forget()
    assert planned() == favourite


def test_a_winner_by_weight_serves_with_the_gradient_by_bias(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone = replace(PROBLEM, operation="grad_weight")
    both = replace(alone, bias=True)
    plans = tuning.candidates(alone, BATCH, SIZE, GPU, 8)
    favourite = plans[-1]
    assert plan.plan_problem(both, BATCH, SIZE, GPU) != with_problem(favourite, both)
    tuning.tune(alone, BATCH, SIZE, GPU, lambda one: 1.0 if one == favourite else 2.0, 8)
    assert plan.plan_problem(both, BATCH, SIZE, GPU) == with_problem(favourite, both)

    def refusing(*_: object) -> None:
        raise ValueError("does not take them")

    monkeypatch.setattr(type(favourite), "schedule", refusing)
    assert plan.plan_problem(both, BATCH, SIZE, GPU) != with_problem(favourite, both)


def test_a_winner_in_one_type_of_16_bits_serves_the_other() -> None:
    bf16, f16 = (replace(PROBLEM, arithmetic=one) for one in (Arithmetic.BF16, Arithmetic.F16))
    plans = tuning.candidates(bf16, BATCH, SIZE, GPU, 8)
    favourite = plans[-1]
    assert plan.plan_problem(f16, BATCH, SIZE, GPU) != with_problem(favourite, f16)
    tuning.tune(bf16, BATCH, SIZE, GPU, lambda one: 1.0 if one == favourite else 2.0, 8)
    assert plan.plan_problem(f16, BATCH, SIZE, GPU) == with_problem(favourite, f16)
    assert plan.plan_problem(replace(f16, bias=True), BATCH, SIZE, GPU).problem.bias
    own = next(one for one in plans if one != favourite)  # timed in that very type: it comes first
    own = with_problem(own, f16)
    tuning.tune(f16, BATCH, SIZE, GPU, lambda one: 1.0 if one == own else 2.0, 8)
    assert plan.plan_problem(f16, BATCH, SIZE, GPU) == own
    assert plan.plan_problem(bf16, BATCH, SIZE, GPU) == favourite


def test_a_plan_that_is_no_more_is_ignored(cache: Path) -> None:
    heuristic = planned()
    tuned(favouring(1)[1])
    (file,) = (cache / "tuned").iterdir()
    record = json.loads(file.read_text()) | {"plan": "OldPlan 123"}
    file.write_text(json.dumps(record))
    winners.forget()
    assert planned() == heuristic


def test_a_folder_that_cannot_be_written(cache: Path) -> None:
    (cache / "tuned").write_text("in the way")
    favourite, measure = favouring(1)
    assert not tuned(measure).kept
    assert planned() == favourite  # in this process
    winners.forget()
    assert planned() != favourite


def test_nothing_is_left_half_written(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        assert not tuned(favouring(1)[1]).kept
    assert list((cache / "tuned").iterdir()) == []


# ---------------------------------------------------------------- command line


def call(*arguments: str) -> tuple[int, str]:
    from convt3d.cli import app

    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


def test_rows_and_table() -> None:
    (shape,) = shapes.select(["n=1,in=16,out=8,size=6,k=3,bias=1"])
    todo = tune.jobs([shape], ["tf32", "bf16"], ["ncdhw", "ndhwc"], list(OPERATIONS), (9, 0))
    assert len(todo) == 12
    assert {job.problem.arithmetic for job in todo} == {Arithmetic.TF32, Arithmetic.BF16}
    assert {job.problem.bias for job in todo if job.operation != "forward"} == {False}

    def run(problem: Problem, batch: int, size: tuple[int, ...]) -> tuning.Outcome:
        if problem.operation == "grad_weight":
            raise RuntimeError("no room")
        times = itertools.chain([2.0], itertools.repeat(1.0))
        return tuning.tune(problem, batch, size, GPU, lambda _: next(times), 2)

    found = list(tune.rows(todo, run))
    assert tune.mean_share(found) == pytest.approx(0.5)
    assert [row.get("failed") for row in found].count("no room") == 4
    assert json.loads(json.dumps(found)) == found
    assert tune.table(found).row_count == 13


def test_a_conv3d_is_tuned_as_what_runs() -> None:
    (shape,) = shapes.select(["n=1,in=16,out=8,size=6x7x8,k=3,bias=1,conv=1"])
    todo = tune.jobs([shape], ["tf32"], ["ncdhw"], list(OPERATIONS), (9, 0))
    found: list[tuple[Problem, tuple[int, ...]]] = []

    def run(problem: Problem, batch: int, size: tuple[int, ...]) -> tuning.Outcome:
        found.append((problem, size))
        raise RuntimeError("seen")

    rows = list(tune.rows(todo, run))
    assert [row["pass"] for row in rows] == list(OPERATIONS)
    # It is timed as a Conv3d, on a weight that lies in memory as that of one does.
    assert [(one.operation, one.bias, size) for one, size in found] == [
        ("grad_input", True, (4, 5, 6)),
        ("forward", False, (4, 5, 6)),
        ("grad_weight", False, (4, 5, 6)),
    ]
    # A gradient by input of stride 1 is a forward pass, of the flipped weight.
    forward, size = found[0][0].canonical(found[0][1])
    assert (forward.operation, forward.bias, size) == ("forward", True, (6, 7, 8))
    assert forward.geometry.in_channels == 16
    assert found[1][0].geometry.in_channels == 8


def test_tune_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, output = call("tune", "--shape", "kb61")
    assert code == 1 and "no usable GPU" in output
    assert call("tune", "--dtype", "fp64")[0] == 1


def test_cache_commands(cache: Path) -> None:
    pytest.importorskip("cuda.core")
    assert call("cache", "path")[1].strip() == str(cache)
    layer = "n=1,in=4,out=4,size=4,k=1"
    code, output = call("cache", "warm", "--shape", layer, "--passes", "forward", "--json")
    assert code == 0 and json.loads(output)["kernels"] >= 1
    tuned(favouring(1)[1])
    sizes = json.loads(call("cache", "size", "--json")[1])
    assert sizes["kernels"]["files"] >= 1 and sizes["tuned plans"]["files"] == 1
    assert "tuned plans" in call("cache", "size")[1]
    assert json.loads(call("cache", "clear", "--tuned", "--json")[1])["files"] == 1
    assert planned() == planned(gpu=Gpu())
    assert "deleted" in call("cache", "clear")[1]
    assert json.loads(call("cache", "size", "--json")[1])["kernels"]["files"] == 0
    assert call("cache", "clear")[0] == 0


def test_one_channel_leaves_the_layout_to_the_other_tensor() -> None:
    """PyTorch is timed on a weight of the layer's format, as it runs in a network."""
    geometry = Geometry(1, 8, (3, 3, 3), (1, 1, 1), (1, 1, 1), transposed=False)
    adjoint = geometry.adjoint((4, 4, 4))
    for last in (False, True):
        problem = plan.problem_for("grad_weight", adjoint, torch.bfloat16, last)
        assert (problem.source_channels_last, problem.target_channels_last) == (last, False)
        assert problem.channels_last is last
        tensors = tuning.operands(problem, 2, (4, 4, 4), torch.device("cpu"))
        assert tensors["weight"].stride() == strides(adjoint.weight_size, last)
    mixed = plan.problem_for("grad_weight", GEOMETRY, torch.bfloat16, (True, False))
    assert mixed.channels_last is None


@pytest.mark.more
def test_candidates_of_a_conv3d_are_timed_on_its_own_weight(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Conv3d's forward pass runs plans of another operation, on its weight as it lies."""
    geometry = Geometry(32, 64, (3, 3, 3), (1, 1, 1), (1, 1, 1), (0, 0, 0), (1, 1, 1), 1)
    problem = problem_for("grad_input", geometry, torch.bfloat16, bias=True)
    canonical, size = problem.canonical((4, 5, 6))
    every = ndhwc.ranked(canonical, 1, size, GPU)
    plans = [next(p for _, p in every if p.tile.direct == direct) for direct in (True, False)]
    tensors: dict[str, torch.Tensor] = {}
    made = tuning.operands

    def operands(*arguments: Any) -> dict[str, torch.Tensor]:
        tensors.update(made(*arguments))
        return tensors

    def milliseconds(run: Callable[[], object], **_: Any) -> float:
        tensors["target"].fill_(math.nan)
        run()
        x, w, b = (tensors[name].double() for name in ("source", "weight", "bias"))
        wanted = torch.nn.functional.conv3d(x, w, b, padding=1)
        torch.testing.assert_close(tensors["target"].double(), wanted, rtol=0.02, atol=0.05)
        return 1.0

    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(tuning, "operands", operands)
    monkeypatch.setattr(tuning, "milliseconds", milliseconds)
    monkeypatch.setattr(tuning, "compile_kernels", lambda *_: None)
    monkeypatch.setattr(tuning, "candidates", lambda *_: plans)
    monkeypatch.setattr(timing, "FLUSH_BYTES", 4)
    with EmulatedGpu([]) as gpu:
        tuning.tune_here(problem, 1, (4, 5, 6), torch.device("cpu"), 2)
    files = [spec.file for spec in gpu.launches]
    assert files == [
        *("layout/channels_last.cu", "layout/channels_last.cu", "ndhwc/kernel.cu"),
        *("ndhwc/pack.cu", "layout/channels_last.cu", "ndhwc/kernel.cu"),
    ]


def test_what_is_timed_is_the_call_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device sleeps and flushes its cache before the first event; nothing else lies between."""
    order: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            order.append("event")

    class Flush:
        def zero_(self) -> None:
            order.append("flush")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda _: order.append("sleep"))
    begin, end = timing.events_around(lambda: order.append("call"), cast(torch.Tensor, Flush()))
    assert begin is not end
    assert order == ["sleep", "flush", "event", "call", "event"]
    order.clear()
    timing.events_around(lambda: order.append("call"))
    assert order == ["sleep", "event", "call", "event"]
