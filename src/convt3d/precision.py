"""Which arithmetic PyTorch's own switches allow for a convolution.

TF32 for convolutions is governed by PyTorch's cuDNN / conv switch alone, never by
``torch.set_float32_matmul_precision``. torch 2.9 replaced ``torch.backends.cudnn.allow_tf32`` by
``torch.backends.cudnn.conv.fp32_precision``; reading the old name there can warn or raise.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from functools import partial
from typing import Any

import torch


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


def arithmetic_for(dtype: torch.dtype, groups: int) -> Arithmetic:
    """Arithmetic of a convolution in ``dtype`` under the present switches.

    float32 is TF32 only if allowed and ``groups == 1``: PyTorch's own grouped convolutions are
    float32-grade whatever the switch says, and nobody may lose accuracy by switching to us.

    Raises:
        KeyError: a dtype that has no arithmetic here (complex, integer, float8).
    """
    if dtype == torch.float32:
        return Arithmetic.TF32 if groups == 1 and conv_tf32_allowed() else Arithmetic.IEEE
    return _BY_DTYPE[dtype]
