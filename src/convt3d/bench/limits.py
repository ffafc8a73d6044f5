"""The hardware limit of a case: measured matrix rate and measured copy rate, same process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from convt3d.bench.cases import MODES, Mode
from convt3d.bench.shapes import Shape
from convt3d.bench.timing import Call, Timing, measure
from convt3d.precision import conv_tf32_allowed

MATRIX = "limit: matrix product"
COPY = "limit: copy"


@dataclass(frozen=True)
class Limit:
    """The least time that a pass can take: ``max(operations / rate, bytes / rate)``.

    The float32 rate of mode ``fp32`` is that of cuBLAS on CUDA cores; a kernel that splits float32
    into TF32 parts may pass it.
    """

    ms: float
    bound: str  # "math" or "memory"
    gflop: float
    mbytes: float
    matrix_tflops: float
    copy_tbytes: float

    @classmethod
    def of(cls, shape: Shape, element_size: int, matrix_tflops: float, copy_tbytes: float) -> Limit:
        gflop = shape.operations / 1e9
        mbytes = shape.traffic(element_size) / 1e6
        math_ms, memory_ms = gflop / matrix_tflops, mbytes / copy_tbytes / 1e3
        return cls(
            ms=max(math_ms, memory_ms),
            bound="math" if math_ms > memory_ms else "memory",
            gflop=gflop,
            mbytes=mbytes,
            matrix_tflops=matrix_tflops,
            copy_tbytes=copy_tbytes,
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Ceilings:
    """Two calls to time beside a kernel, and the rates that follow from their times."""

    def __init__(self, mode: Mode, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        # Full rate, as with sides of 8192, at an eighth of the work: what is timed beside it meets
        # a cooler GPU (docs/performance.md).
        side = 4096 if on_cuda else 768
        self.operations = 2 * side**3
        a = torch.randn(side, side, dtype=mode.dtype, device=device)
        b = torch.randn(side, side, dtype=mode.dtype, device=device)
        product = torch.empty_like(a)
        source = torch.empty((512 if on_cuda else 64) << 20, dtype=torch.uint8, device=device)
        source.random_()
        target = torch.empty_like(source)
        self.bytes = 2 * source.numel()
        self.calls: dict[str, Call] = {
            MATRIX: lambda: torch.mm(a, b, out=product),
            COPY: lambda: target.copy_(source),
        }

    def limit(self, shape: Shape, mode: Mode, times: Mapping[str, Timing]) -> Limit:
        """The limit of a pass from times that the calls took beside it."""
        matrix_tflops = self.operations / times[MATRIX].ms / 1e9
        copy_tbytes = self.bytes / times[COPY].ms / 1e9
        return Limit.of(shape, mode.element_size, matrix_tflops, copy_tbytes)


def measure_limit(shape: Shape, dtype: torch.dtype, device: torch.device) -> Limit:
    """The limit of a pass in a dtype under PyTorch's present switches, measured now."""
    tf32 = device.type == "cuda" and conv_tf32_allowed()
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
    mode = MODES[names.get(dtype, "tf32" if tf32 else "fp32")]
    with mode.applied(device):
        ceilings = Ceilings(mode, device)
        return ceilings.limit(shape, mode, measure(ceilings.calls, device, 0.1))
