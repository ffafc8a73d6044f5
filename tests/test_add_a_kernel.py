"""The example of docs/add-a-kernel.md: its code is taken from the page, runs and compiles."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from convt3d import reference
from convt3d.cuda import backend, codec, compiler, epilogue
from convt3d.cuda.plan import families
from convt3d.cuda.schedule import Gpu, Problem
from convt3d.fusion import fusion_of
from convt3d.geometry import Geometry
from convt3d.precision import Arithmetic
from emulator import build, harness
from emulator.gpu import EmulatedGpu

PAGE = (Path(__file__).parents[1] / "docs" / "add-a-kernel.md").read_text()
KERNEL = "pointwise/kernel.cu"
LOSS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def code(title: str) -> str:
    """The block of the page with this title."""
    (found,) = re.findall(rf'^```\w+ title="{re.escape(title)}"\n(.*?)^```$', PAGE, re.S | re.M)
    return str(found)


@pytest.fixture
def pointwise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """The module of the page, its kernel among ours, its rows in the lists."""
    read, kernel_text = compiler._read, harness.kernel_text
    file = tmp_path / "kernel.cu"
    file.write_text(code(KERNEL))
    monkeypatch.setattr(
        compiler, "_read", lambda name: file.read_text() if name == KERNEL else read(name)
    )
    monkeypatch.setattr(
        *(harness, "kernel_text"),
        lambda name: build.flatten(file, build.REPLACED) if name == KERNEL else kernel_text(name),
    )
    module = types.ModuleType("pointwise")
    monkeypatch.setitem(sys.modules, "pointwise", module)
    exec(compile(code("plan/pointwise.py"), "plan/pointwise.py", "exec"), module.__dict__)
    monkeypatch.setattr(codec, "_PLANS", {*codec._PLANS})
    monkeypatch.setattr(codec, "_CLASSES", {**codec._CLASSES})
    codec.know((module.PointwisePlan,), (module.Tile,))
    monkeypatch.setattr(epilogue, "FUSING", epilogue.FUSING | {KERNEL})
    monkeypatch.setattr(families, "_CONVOLUTIONS", (*families._CONVOLUTIONS, module.ranked))
    yield module


@pytest.mark.sample
@pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
@pytest.mark.parametrize("columns", [4, 16])
@pytest.mark.parametrize("dtype", LOSS, ids=str)
def test_it_is_right(pointwise: Any, dtype: torch.dtype, columns: int) -> None:
    """Two stages of channels, the last one short; tiles of positions and columns that end early."""
    geometry, size = Geometry(35, 21, (1, 1, 1)), (3, 7, 9)
    torch.manual_seed(0)
    x = torch.randn(2, 35, *size).to(dtype)
    w, b = torch.randn(geometry.weight_size).to(dtype), torch.randn(21).to(dtype)
    whole = torch.randn(2, 21 + 11, *size).to(dtype)
    kept, into, steps = whole.clone(), whole[:, 8:29], fusion_of(["relu", "scale"], [])
    scale = torch.randn(21)

    def plan(problem: Problem, *extents: Any) -> Any:
        return pointwise.PointwisePlan(problem, pointwise.Tile(columns))

    with EmulatedGpu([x, w, b, scale, whole], plan) as gpu:
        plain = backend.forward(x, w, None, geometry, False)
        biased = backend.forward(x, w, b, geometry, False)
        call = ("forward", x, w, b, geometry, size, False, steps, [scale])
        backend.fused(*call, into)
    assert [launch.file for launch in gpu.launches] == [KERNEL] * 3
    exact = reference.forward(x, w, b, geometry)
    tail = steps.apply(exact, [scale.double()])
    without = exact - b.double().view(-1, 1, 1, 1)
    for got, wanted in ((plain, without), (biased, exact), (into, tail)):
        worst = (got.double() - wanted).abs().max() / wanted.abs().max()
        assert worst < LOSS[dtype]
    assert torch.equal(whole[:, :8], kept[:, :8]) and torch.equal(whole[:, 29:], kept[:, 29:])


def test_it_is_planned(pointwise: Any) -> None:
    problem = Problem("forward", Geometry(32, 20, (1, 1, 1)), Arithmetic.IEEE)
    plans = families.ranked_plans(problem, 2, (20, 30, 40), Gpu())
    ours = [plan for plan in plans if isinstance(plan, pointwise.PointwisePlan)]
    assert len(ours) == 4
    assert codec.decode(codec.encode(ours[0])) == ours[0]
    assert ours[0].describe()["tile"].endswith("columns")
    small = pointwise.ranked(problem, 1, (1, 1, 8), Gpu())
    assert small[0][1].tile.column_tile == 4  # a CTA a tile: the least work in each


@pytest.mark.parametrize(
    ("geometry", "operation", "last", "reason"),
    [
        (Geometry(32, 20, (1, 1, 1)), "grad_input", False, "forward passes"),
        (Geometry(32, 20, (1, 1, 1)), "forward", True, "contiguous"),
        (Geometry(32, 20, (1, 1, 3)), "forward", False, "kernel of 1 x 1 x 1"),
        (Geometry(32, 20, (1, 1, 1), (1, 2, 1)), "forward", False, "at stride 1"),
        (Geometry(32, 20, (1, 1, 1), groups=4), "forward", False, "no groups"),
    ],
)
def test_what_it_declines(
    pointwise: Any, geometry: Geometry, operation: str, last: bool, reason: str
) -> None:
    problem = Problem(operation, geometry, Arithmetic.F16, last, last)
    assert reason in pointwise.refusal(problem)
    assert pointwise.ranked(problem, 1, (4, 4, 4), Gpu()) == []


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_it_compiles(pointwise: Any, target: str) -> None:
    missing = compiler.missing_library()
    if missing is not None:
        pytest.skip(missing)
    problem = Problem("forward", Geometry(35, 21, (1, 1, 1)), Arithmetic.BF16, bias=True)
    ((_, plan), *_) = pointwise.ranked(problem, 2, (3, 7, 9), Gpu())
    (launch,) = plan.schedule(2, (3, 7, 9)).launches
    assert compiler.compile_cubin(launch.kernel, target)[:4] == b"\x7fELF"
