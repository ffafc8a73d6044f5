"""Epilogues: steps, checks before a launch, slices, and what is left to PyTorch."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from convt3d.cuda import backend, compiler, cudnn
from convt3d.cuda.epilogue import (
    Epilogue,
    attach,
    check_slice,
    epilogue_of,
    part_channels,
    settle,
    slice_channels,
    starts_aligned,
)
from convt3d.cuda.launch import TENSORS
from convt3d.cuda.plan import direct, ndhwc, plan_problem, ranked_plans
from convt3d.cuda.schedule import Gpu, Problem, Schedule, WeightLayout
from convt3d.fusion import KINDS, fusion_of
from convt3d.geometry import Geometry
from convt3d.layout import Part, empty
from convt3d.precision import Arithmetic

GEOMETRY = Geometry(4, 6, (3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1))
SIZE = (3, 4, 5)
SHAPE = (2, 6, *GEOMETRY.output_size(SIZE))
SCALARS = (0.5, 2.0)


def schedule_of(problem: Problem) -> Schedule:
    return direct.choose_gather(problem).schedule(2, SIZE)


def test_every_kind_has_a_functor() -> None:
    problem = Problem("forward", GEOMETRY, Arithmetic.BF16)
    for name, kind in KINDS.items():
        wide = (True,) if kind.operand else ()
        epilogue = Epilogue((name,), SCALARS[: kind.scalars], wide)
        ((_, steps),) = epilogue.macros(problem)
        assert ("Float32" in steps) == bool(kind.operand)


def test_steps_count_operands_and_scalars() -> None:
    problem = Problem("grad_input", GEOMETRY, Arithmetic.F16)
    fusion = fusion_of(["leaky_relu", "scale", "clamp", "add"], [0.1, -1.0, 1.0])
    scale, add = torch.ones(4), torch.ones(2, 4, *SIZE, dtype=torch.float16)
    epilogue = epilogue_of(fusion, [scale, add], torch.float16, 0)
    epilogue = dataclasses.replace(epilogue, bias=True)
    assert dict(epilogue.macros(problem))["CONVT3D_FUSION"] == (
        "Bias<0,Float16>,LeakyRelu<0>,Scale<1,Float32>,Clamp<1>,Add<2,Float16>"
    )
    *names, scalars = epilogue.arguments
    assert names == ["bias", "operand0", "operand1", "bias", "bias"]
    assert set(names) <= set(TENSORS)
    values = np.frombuffer(scalars.tobytes(), np.float32)
    assert values.tolist() == pytest.approx([0.1, -1.0, 1.0, 0, 0, 0, 0, 0])


def test_what_writes_the_output_takes_the_epilogue() -> None:
    """Of a product and its reduction both are compiled for it, as one program."""
    problem = Problem("forward", GEOMETRY, Arithmetic.TF32)
    (one,) = schedule_of(problem).launches
    packer = dataclasses.replace(
        one,
        kernel=dataclasses.replace(one.kernel, file="x/pack.cu"),
        arguments=("weight", "packed"),
    )
    product = dataclasses.replace(one, arguments=("source", "partial"))
    reduction = dataclasses.replace(one, arguments=("partial", "target"))
    schedule = Schedule((packer, product, reduction))
    epilogue, reason = settle(schedule, problem, Epilogue(("relu",), channels=16))
    assert not reason
    got = attach(schedule, problem, epilogue).launches
    assert got[0] == packer
    assert got[1].arguments == product.arguments and got[1].kernel == got[2].kernel
    assert len(got[2].arguments) == 2 + 6
    assert got[2].kernel.macros[-2:] == (
        ("CONVT3D_FUSION", "Relu"),
        ("CONVT3D_TENSOR_CHANNELS", "16"),
    )
    assert attach(schedule, problem, Epilogue()) is schedule


def test_what_runs_on_a_weight_as_it_lies_has_the_steps() -> None:
    geometry = Geometry(64, 64, (3, 3, 3), (2, 2, 2), (1, 1, 1))
    problem = Problem("forward", geometry, Arithmetic.BF16, True, True, True)
    plan = next(
        plan
        for plan in ranked_plans(problem, 2, (16, 16, 16), Gpu())
        if isinstance(plan, ndhwc.WgmmaNdhwcPlan) and plan.tile.direct
    )
    schedule = attach(plan.schedule(2, (16, 16, 16)), problem, Epilogue(("relu",)))
    as_it_lies = schedule.on_weights[WeightLayout(channels_last=True)]
    for launches in (schedule.launches, as_it_lies.launches):
        assert dict(launches[-1].kernel.macros)["CONVT3D_FUSION"] == "Relu"


def test_kernels_that_run_no_steps_say_so() -> None:
    problem = Problem("forward", GEOMETRY, Arithmetic.TF32)
    (one,) = schedule_of(problem).launches
    other = dataclasses.replace(one, kernel=dataclasses.replace(one.kernel, file="other.cu"))
    epilogue, reason = settle(Schedule((other,)), problem, Epilogue(("relu",)))
    assert epilogue.empty and "other.cu" in reason and reason.count(".") == 1


@pytest.mark.sample
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
@pytest.mark.parametrize("last", [False, True])
def test_every_plan_takes_steps(capability: tuple[int, int], last: bool) -> None:
    """Of strided, kernel == stride, depthwise and dense layers, both operations."""
    gpu = Gpu(capability)
    layers = [
        GEOMETRY,
        Geometry(32, 32, (2, 2, 2), (2, 2, 2), (0, 0, 0)),
        Geometry(32, 32, (3, 3, 3), (1, 1, 1), (1, 1, 1)),
        Geometry(8, 8, (3, 3, 3), (1, 1, 1), (1, 1, 1), groups=8),
        Geometry(64, 64, (4, 4, 4), (2, 2, 2), (1, 1, 1)),
        Geometry(32, 1, (5, 5, 5), (2, 2, 2), (2, 2, 2)),
    ]
    for geometry in layers:
        for operation in ("forward", "grad_input"):
            for arithmetic in (Arithmetic.TF32, Arithmetic.BF16, Arithmetic.IEEE):
                problem = Problem(operation, geometry, arithmetic, last, last, True)
                plan = plan_problem(problem, 2, (16, 16, 16), gpu)
                _, size = problem.canonical((16, 16, 16))
                schedule = plan.schedule(2, size)
                wanted = Epilogue(("relu",), bias=not plan.problem.bias)
                assert settle(schedule, plan.problem, wanted) == (wanted, "")


# ---------------------------------------------------------------- tensors


def sliced(
    last: bool,
    channels: int,
    first: int,
    shape: Any = SHAPE,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    whole = empty((shape[0], channels, *shape[2:]), torch.empty(0, dtype=dtype), last)
    return whole[:, first : first + shape[1]]


@pytest.mark.parametrize("last", [False, True])
def test_slices(last: bool) -> None:
    def channels(tensor: torch.Tensor) -> int | None:
        return slice_channels(tensor.shape, tensor.stride(), last)

    assert channels(sliced(last, 6, 0)) == 6
    assert channels(sliced(last, 16, 3)) == 16
    assert channels(sliced(last, 8, 0)[:, ::2][:, :3]) is None
    assert channels(sliced(last, 16, 0).transpose(2, 3)) is None
    assert channels(sliced(last, 16, 0)[:, :, :, 1:]) is None
    assert channels(sliced(not last, 16, 3)) is None
    assert channels(sliced(last, 16, 3, (1, 6, 3, 1, 1))) == (16 if last else 6)
    assert channels(sliced(last, 16, 3, (1, 6, 1, 1, 1))) == 6
    assert channels(sliced(last, 16, 3, (3, 1, 1, 1, 1))) == 16


def test_alignment_of_slices() -> None:
    assert starts_aligned(sliced(True, 12, 4), 12, True)
    assert not starts_aligned(sliced(True, 12, 3), 12, True)  # the first position
    assert not starts_aligned(sliced(True, 13, 4), 13, True)  # the next ones
    odd = (2, 6, 3, 1, 5)
    assert starts_aligned(sliced(False, 8, 0, odd), 8, False)
    assert not starts_aligned(sliced(False, 7, 0, odd), 7, False)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("shape", [SHAPE, (1, 6, 3, 4, 5), (2, 6, 3, 1, 5), (1, 6, 1, 1, 1)])
def test_a_part_of_a_new_tensor_is_what_its_slice_is(shape: Any, last: bool) -> None:
    assert part_channels(None, shape, torch.float32, last) == 0
    for dtype in (torch.float32, torch.bfloat16):
        for channels, first in ((16, 8), (12, 4), (12, 3), (13, 4), (8, 0), (7, 0), (6, 0)):
            into = sliced(last, channels, first, shape, dtype)
            found = check_slice(into, into, shape, last)
            wanted = found if starts_aligned(into, found, last) else None
            assert part_channels(Part(first, channels), shape, dtype, last) == wanted


def test_what_is_written_to_is_checked() -> None:
    source = torch.empty(2, 4, *SIZE)
    assert check_slice(None, source, SHAPE, False) == 0
    assert check_slice(sliced(False, 6, 0), source, SHAPE, False) == 0
    assert check_slice(sliced(False, 16, 3), source, SHAPE, False) == 16
    for into, message in (
        (sliced(False, 16, 3).bfloat16(), "expected a torch.float32 tensor"),
        (sliced(False, 16, 3)[:1], "to write to, but got"),
        (sliced(True, 16, 3), "expected channels of a dense contiguous tensor"),
        (sliced(False, 16, 3).to("meta"), "to write to on cpu, but it is on meta"),
    ):
        with pytest.raises(RuntimeError, match=message):
            check_slice(into, source, SHAPE, False)


@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("operation", ["forward", "grad_input"])
def test_what_pytorch_runs_is_finished_by_pytorch(
    operation: str, into: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where cuDNN is faster, and where nothing is to be computed."""
    monkeypatch.setattr(backend, "_prepared", {})
    monkeypatch.setattr(cudnn, "left_to_pytorch", lambda *_: "a test asks for it")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(Gpu, "of", lambda _: Gpu())
    forward = operation == "forward"
    channels, size = (6, GEOMETRY.output_size(SIZE)) if forward else (4, SIZE)
    fusion = fusion_of(["scale", "relu"], [])
    for batch in (2, 0):
        source = torch.randn(batch, *((4, *SIZE) if forward else (6, *GEOMETRY.output_size(SIZE))))
        weight, bias = torch.randn(GEOMETRY.weight_size), torch.randn(channels)
        scale = torch.randn(channels)
        whole = torch.zeros(batch, channels + 3, *size)
        target = whole[:, 1 : 1 + channels] if into else None
        got = backend.fused(
            *(operation, source, weight, bias, GEOMETRY, SIZE, False, fusion, [scale], target)
        )
        if forward:
            plain = torch.nn.functional.conv_transpose3d(source, weight, bias, 2, 1, 1)
        else:
            plain = torch.nn.functional.conv3d(source, weight, bias, 2, 1)
        torch.testing.assert_close(got, (plain * scale.view(-1, 1, 1, 1)).relu())
        assert target is None or got is target


def test_pytorch_runs_what_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    source, weight = torch.randn(2, 4, *SIZE), torch.randn(GEOMETRY.weight_size)
    bias, scale = torch.randn(6), torch.rand(6)
    plain = torch.nn.functional.conv_transpose3d(source, weight, bias, 2, 1, 1)
    refused = compiler.CompilationError("insufficient registers")
    monkeypatch.setattr(backend, "_prepared", {})
    monkeypatch.setattr(backend, "gpu_of", lambda _: Gpu())
    monkeypatch.setattr(backend, "prepared_by", mock.Mock(side_effect=refused))
    monkeypatch.setattr(backend, "_on_device", lambda _: contextlib.nullcontext())
    with pytest.warns(RuntimeWarning, match="PyTorch's operator runs instead: insufficient"):
        got = backend.forward(source, weight, bias, GEOMETRY, False)
    torch.testing.assert_close(got, plain)
    with pytest.warns(RuntimeWarning, match="insufficient"):
        kind = (weight, bias, GEOMETRY, SIZE, False)
        got = backend.fused("forward", source, *kind, fusion_of(["scale"], []), [scale])
    torch.testing.assert_close(got, plain * scale.view(-1, 1, 1, 1))


def test_unfitting_arguments_launch_nothing() -> None:
    source = torch.empty(2, 4, *SIZE)
    weight = torch.empty(GEOMETRY.weight_size)
    with (
        mock.patch.object(backend, "_prepare") as prepare,
        pytest.raises(RuntimeError, match="expected 1 operands"),
    ):
        fusion = fusion_of(["scale"], [])
        backend.fused("forward", source, weight, None, GEOMETRY, SIZE, False, fusion)
    assert not prepare.called
