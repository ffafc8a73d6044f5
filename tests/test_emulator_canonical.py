"""Gradients by input of stride 1 as forward passes on the flipped weight, with a Conv3d's bias."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from convt3d import reference
from convt3d.cuda import backend, plan
from convt3d.cuda.schedule import Gpu, Problem
from convt3d.geometry import Geometry, Triple
from convt3d.precision import Arithmetic
from emulator import build
from emulator.gpu import EmulatedGpu
from test_emulator_kernels import DTYPES, LOSS

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))

LAYERS: dict[str, tuple[Geometry, Triple]] = {
    "k3 p1": (Geometry(24, 16, (3, 3, 3), padding=(1, 1, 1)), (4, 5, 8)),
    "k2x3x4 p0x1x2 d1x2x1": (
        Geometry(8, 12, (2, 3, 4), padding=(0, 1, 2), dilation=(1, 2, 1)),
        (4, 5, 6),
    ),
    "few channels": (Geometry(1, 2, (3, 3, 3), padding=(1, 1, 1)), (4, 5, 8)),
    "to one channel": (Geometry(1, 16, (3, 3, 3), padding=(1, 1, 1)), (4, 5, 8)),
}


def family(kernel: str) -> Any:
    """Picks the first plan whose product is in a file, of a problem's canonical form."""

    def pick(problem: Problem, batch: int, size: Triple, gpu: Gpu) -> Any:
        canonical, extents = problem.canonical(size)
        assert canonical.forward
        for candidate in plan.ranked_plans(canonical, batch, extents, gpu):
            launches = candidate.schedule(batch, extents).launches
            if any(one.kernel.file == kernel for one in launches):
                return candidate
        raise AssertionError(f"{kernel} has no plan of {canonical}")

    return pick


CASES = [
    ("k3 p1", "ampere/gather/kernel.cu", Arithmetic.TF32, False),
    ("k3 p1", "sweep/kernel.cu", Arithmetic.TF32, False),
    ("k3 p1", "sweep/kernel.cu", Arithmetic.BF16, True),
    ("k3 p1", "phases/kernel.cu", Arithmetic.TF32, False),
    ("k2x3x4 p0x1x2 d1x2x1", "sweep/kernel.cu", Arithmetic.F16, False),
    ("k2x3x4 p0x1x2 d1x2x1", "ampere/gather/kernel.cu", Arithmetic.IEEE, True),
    ("to one channel", "col2im/kernel.cu", Arithmetic.TF32, False),
    ("few channels", "depthwise/conv.cu", Arithmetic.IEEE, False),
    ("few channels", "direct/conv.cu", Arithmetic.BF16, True),
]


@pytest.mark.sample(every=8)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "sliced"])
@pytest.mark.parametrize("name, kernel, arithmetic, last", CASES)
def test_flipped(name: str, kernel: str, arithmetic: Arithmetic, last: bool, layout: str) -> None:
    geometry, size = LAYERS[name]
    dtype = DTYPES[arithmetic]
    generator = torch.Generator().manual_seed(7)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    gy, b = values(2, geometry.out_channels, *geometry.output_size(size)), values(24)
    b = b[: geometry.in_channels]
    w = values(*geometry.weight_size)
    if layout == "channels_last":
        w = w.contiguous(memory_format=torch.channels_last_3d)
    elif layout == "sliced":
        w = values(*geometry.weight_size[:-1], 2 * geometry.kernel_size[2])[..., 1::2]
    if last:
        gy = gy.contiguous(memory_format=torch.channels_last_3d)
    with EmulatedGpu([gy, w, b], family(kernel), arithmetic) as gpu:
        got = backend.grad_input(gy, w, geometry, size, last, b)
    assert kernel in {spec.file for spec in gpu.launches}
    wanted = reference.grad_input(gy, w, geometry, size) + b.double().view(-1, 1, 1, 1)
    scale = reference.grad_input(gy.abs(), w.abs(), geometry, size)
    scale += b.double().abs().view(-1, 1, 1, 1)
    assert ((got.double() - wanted).abs() <= LOSS[arithmetic] * scale).all()


def test_a_strided_layer_adds_its_bias_apart() -> None:
    geometry, size = Geometry(12, 16, (3, 3, 3), (2, 2, 2), (1, 1, 1)), (3, 4, 5)
    gy = torch.randn(1, 16, *geometry.output_size(size))
    w, b = torch.randn(geometry.weight_size), torch.randn(12)
    with EmulatedGpu([gy, w, b], plan.plan_problem, Arithmetic.IEEE):
        got = backend.grad_input(gy, w, geometry, size, False, b)
    wanted = reference.grad_input(gy, w, geometry, size) + b.double().view(-1, 1, 1, 1)
    torch.testing.assert_close(got.double(), wanted, atol=1e-4, rtol=1e-4)
