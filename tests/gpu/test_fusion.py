"""Fused epilogues on CUDA: against float64, beside the same steps by PyTorch, and into slices."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from convt3d.cuda import backend, cudnn
from convt3d.fusion import KINDS, Fusion, fusion_of
from convt3d.geometry import Geometry

SCALARS = {"add_scalar": (0.3,), "mul_scalar": (-1.7,), "leaky_relu": (0.1,), "clamp": (-0.4, 0.9)}
# A clamp leaves the values that rounding moves across its limits, of a few of those around them.
TOLERANCE = {torch.float32: 3e-3, torch.float16: 3e-3, torch.bfloat16: 1.2e-2}

#: Geometry of the transposed layer, and spatial size of its input.
LAYERS: dict[str, tuple[Geometry, tuple[int, int, int]]] = {
    "dense": (Geometry(32, 48, (3, 3, 3), (1, 1, 1), (1, 1, 1)), (9, 20, 24)),
    "stride 2": (Geometry(64, 32, (3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1)), (8, 12, 16)),
    "stride 2, odd rows": (Geometry(16, 32, (3, 3, 3), (2, 2, 2), (1, 1, 1)), (7, 13, 17)),
    "k4 s2, small": (Geometry(256, 128, (4, 4, 4), (2, 2, 2), (1, 1, 1)), (4, 4, 4)),
    "patches": (Geometry(96, 64, (2, 2, 2), (2, 2, 2), (0, 0, 0)), (6, 10, 32)),
    "phases without taps": (
        Geometry(16, 24, (3, 3, 3), (2, 2, 2), (1, 1, 1), dilation=(2, 2, 2)),
        (6, 9, 24),
    ),
    "few channels out": (Geometry(32, 1, (5, 5, 5), (2, 2, 2), (2, 2, 2)), (6, 12, 20)),
    "groups": (Geometry(64, 64, (3, 3, 3), (2, 2, 2), (1, 1, 1), groups=4), (6, 11, 22)),
    "depthwise": (Geometry(32, 32, (3, 3, 3), (1, 1, 1), (1, 1, 1), groups=32), (8, 14, 20)),
}
CHAINS = (
    ("scale", "add", "shift", "leaky_relu"),
    ("silu",),
    ("mul", "clamp"),
    ("gelu", "mul_scalar"),
    ("relu",),
)


@pytest.fixture(autouse=True)
def never_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernels run, faster or not."""
    monkeypatch.setattr(cudnn, "left_to_pytorch", lambda *_: None)
    monkeypatch.setattr(backend, "_prepared", {})


def steps_of(kinds: Sequence[str]) -> Fusion:
    return fusion_of(kinds, [v for kind in kinds for v in SCALARS.get(kind, ())])


class Call:
    """Random operands of an operation; ``run`` gives the fused result, ``plain`` the one before."""

    def __init__(self, layer: str, operation: str, dtype: torch.dtype, last: bool, kinds: Any):
        self.geometry, self.size = LAYERS[layer]
        self.operation, self.last, self.steps = operation, last, steps_of(kinds)
        forward = operation == "forward"
        torch.manual_seed(0)
        x, y = (2, self.geometry.in_channels, *self.size), self.geometry.output_size(self.size)
        y = (2, self.geometry.out_channels, *y)
        source, self.shape = (x, y) if forward else (y, x)
        self.source = self.laid(torch.randn(source, device="cuda", dtype=dtype))
        self.weight = torch.randn(self.geometry.weight_size, device="cuda", dtype=dtype)
        self.bias = torch.randn(self.shape[1], device="cuda", dtype=dtype)
        self.operands = [
            self.laid(torch.randn(self.shape, device="cuda", dtype=dtype))
            if kind == "tensor"
            else torch.randn(self.shape[1], device="cuda")
            for kind in self.steps.operands
        ]

    def laid(self, tensor: torch.Tensor) -> torch.Tensor:
        layout = torch.channels_last_3d if self.last else torch.contiguous_format
        return tensor.contiguous(memory_format=layout)

    def run(self, into: torch.Tensor | None = None) -> torch.Tensor:
        return backend.fused(
            *(self.operation, self.source, self.weight, self.bias, self.geometry, self.size),
            *(self.last, self.steps, self.operands, into),
        )

    def plain(self) -> torch.Tensor:
        of = (self.geometry, self.last)
        if self.operation == "forward":
            return backend.forward(self.source, self.weight, self.bias, *of)
        return backend.grad_input(
            *(self.source, self.weight, self.geometry, self.size, self.last, self.bias)
        )

    def exact(self) -> torch.Tensor:
        g, source, weight = self.geometry, self.source.double(), self.weight.double()
        if self.operation == "forward":
            extra = (g.output_padding, g.groups, g.dilation)
            y = F.conv_transpose3d(source, weight, None, g.stride, g.padding, *extra)
        else:
            y = F.conv3d(source, weight, None, g.stride, g.padding, g.dilation, g.groups)
        y = y + self.bias.double().view(-1, 1, 1, 1)
        return self.steps.apply(y, [operand.double() for operand in self.operands])


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())


COMBINATIONS = list(
    itertools.product(
        LAYERS, ("forward", "grad_input"), (torch.float32, torch.float16, torch.bfloat16),
        (False, True),
    )
)  # fmt: skip


@pytest.mark.parametrize(
    ("number", "layer", "operation", "dtype", "last"),
    [(number, *combination) for number, combination in enumerate(COMBINATIONS)],
)
def test_fused_operations(
    number: int, layer: str, operation: str, dtype: torch.dtype, last: bool
) -> None:
    call = Call(layer, operation, dtype, last, CHAINS[number % len(CHAINS)])
    got, wanted = call.run(), call.exact()
    assert error(got, wanted) <= TOLERANCE[dtype]
    assert got.stride() == call.plain().stride()
    assert torch.equal(got, call.run())


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_pytorchs_to_a_few_ulp(kind: str, last: bool, ieee: None) -> None:
    """The sums are those of the kernel without steps: what differs are the functions alone."""
    for layer in ("dense", "patches", "stride 2"):
        for operation in ("forward", "grad_input"):
            call = Call(layer, operation, torch.float32, last, (kind,))
            plain = call.plain()
            wanted = call.steps.apply(plain, call.operands)
            scale = float(wanted.abs().max())
            torch.testing.assert_close(call.run(), wanted, rtol=2e-6, atol=4e-7 * scale)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not KINDS[kind].operand])
def test_nan_passes(kind: str) -> None:
    call = Call("dense", "forward", torch.float32, False, (kind,))
    call.bias[3] = float("nan")
    assert call.run().isnan().all((0, 2, 3, 4)).nonzero().flatten().tolist() == [3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("operation", ["forward", "grad_input"])
@pytest.mark.parametrize("layer", LAYERS)
def test_slices(layer: str, operation: str, last: bool, dtype: torch.dtype) -> None:
    for before, behind, kinds in ((8, 16, ("relu",)), (3, 2, ("silu",)), (8, 8, ("add",))):
        call = Call(layer, operation, dtype, last, kinds)
        n, channels, *extents = call.shape
        whole = torch.randn(n, before + channels + behind, *extents, device="cuda", dtype=dtype)
        whole = call.laid(whole)
        kept, into = whole.clone(), whole[:, before : before + channels]
        assert call.run(into) is into
        assert torch.equal(into, call.run())
        into.copy_(kept[:, before : before + channels])
        assert torch.equal(whole, kept)


def test_a_captured_call_runs_again() -> None:
    call = Call("stride 2", "grad_input", torch.bfloat16, True, ("scale", "add", "relu"))
    wanted = call.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call.run()
    got.zero_()
    graph.replay()
    assert torch.equal(got, wanted)
