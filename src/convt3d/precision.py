"""Which arithmetic PyTorch's own switches allow for a convolution.

TF32 for convolutions is governed by PyTorch's cuDNN / conv switch alone, never by
``torch.set_float32_matmul_precision``. torch 2.9 replaced ``torch.backends.cudnn.allow_tf32`` by
``torch.backends.cudnn.conv.fp32_precision``; reading the old name there can warn or raise.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from convt3d.geometry import Geometry


class Arithmetic(enum.Enum):
    """How products are formed; sums are kept in float32, or in float64 for F64."""

    TF32 = "tf32"  # operands rounded to nearest, 10 bits of mantissa
    IEEE = "ieee"  # float32-grade: three TF32 products, or CUDA cores
    F16 = "f16"
    BF16 = "bf16"
    F64 = "f64"


def _reader() -> Callable[[], object]:
    getter = getattr(torch._C, "_get_fp32_precision_getter", None)
    if getter is not None:  # a seventh of the time of the public property below
        return partial(getter, "cuda", "conv")
    conv: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    return lambda: conv.fp32_precision


conv_switch: Callable[[], object] = _reader()
"""What PyTorch's switch for convolutions in float32 says now. Never warns or raises."""


def conv_tf32_allowed() -> bool:
    """Whether PyTorch would let cuDNN use TF32 now. Never warns or raises."""
    return conv_switch() in ("tf32", True)


KERNEL_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
"""The dtypes of the CUDA kernels."""

_BY_DTYPE = {
    torch.float16: Arithmetic.F16,
    torch.bfloat16: Arithmetic.BF16,
    torch.float64: Arithmetic.F64,
}


def arithmetic_for(
    dtype: torch.dtype,
    geometry: Geometry,
    operation: str,
    channels_last: bool = False,
    *,
    tf32: bool | None = None,
) -> Arithmetic:
    """Arithmetic of one operation of a transposed layer.

    float32 is TF32 only if that is allowed. It is float32-grade whatever the switch says in grouped
    layers, as PyTorch's often are (cuDNN takes TF32 in some), and in those of few channels that
    :func:`in_float32` names, as cuDNN mostly does: nobody may lose accuracy by switching to us.

    Args:
        dtype: of the tensors.
        geometry: of the transposed layer.
        operation: "forward", "grad_input" or "grad_weight".
        channels_last: the layout of the result.
        tf32: whether TF32 is allowed; None: what PyTorch's switch says now.

    Raises:
        KeyError: a dtype that has no arithmetic here (complex, integer, float8).
    """
    if dtype != torch.float32:
        return _BY_DTYPE[dtype]
    allowed = conv_tf32_allowed() if tf32 is None else tf32
    if not allowed or geometry.groups > 1:
        return Arithmetic.IEEE
    exact = in_float32(geometry, operation, channels_last)
    return Arithmetic.IEEE if exact else Arithmetic.TF32


def in_float32(geometry: Geometry, operation: str, channels_last: bool) -> bool:
    """Whether a forward pass or gradient by input of few channels is float32-grade in any case.

    - Kernel == stride with up to 3 channels on one side: memory bounds it in either arithmetic.
    - Contiguous results from one channel and up to 27 taps: CUDA cores bring them about as fast as
      matrix units, which such products leave mostly empty.
    - Strided forward passes of a transposed layer to up to 3 channels, of more than 125 taps. The
      gradient by the input of a stem of kernel 7 is one. cuDNN is exact there, and of 3 channels
      2.5 times slower still; of 1 channel it is as fast.

    docs/numerics.md has the times and the errors.
    """
    g = geometry
    if operation == "grad_weight":
        return False
    taps, forward = math.prod(g.kernel_size), operation == "forward"
    source, target = g.in_channels, g.out_channels
    if not forward:
        source, target = target, source
    if g.kernel_size == g.stride and min(source, target) <= _FEW_CHANNELS:
        products = source * target * taps
        return products <= _FREE_PRODUCTS * (g.in_channels + g.out_channels * taps)
    if forward and max(g.stride) > 1:
        return target <= _FEW_CHANNELS and taps > _MANY_TAPS
    few_to_many = source == 1 and target >= MANY_CHANNELS
    return few_to_many and taps <= _FEW_TAPS and not channels_last


MANY_CHANNELS = 8
"""As many as CUDA cores compute at once of each value of a layer of few channels."""
_FEW_CHANNELS = 3
_FREE_PRODUCTS = 7  # for each element that is read or written: memory takes longer
_FEW_TAPS, _MANY_TAPS = 27, 125
