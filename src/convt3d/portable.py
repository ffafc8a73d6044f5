"""The operator from torch operators alone: CPU, and any device without own kernels.

Each operation has several forms; :func:`choose` picks one by a rule that ``docs/portable.md``
explains and ``python -m convt3d.bench.portable`` measures. Tensors are 5-D and already checked
against the geometry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from convt3d import forms, native
from convt3d.geometry import Geometry, Triple
from convt3d.guards import without_autocast
from convt3d.layout import laid_out, onednn_enabled, skips_onednn
from convt3d.polyphase import has_empty_phase

PYTORCH = "PyTorch's operator"
POLYPHASE = "polyphase convolutions"
GEMM = "matrix product and shuffle"
CONVOLUTION = "convolution"
PADDED = "PyTorch's operator, padding laid out"


def forward(
    x: Tensor, w: Tensor, b: Tensor | None, geometry: Geometry, channels_last: bool
) -> Tensor:
    """Transposed convolution, (N, C_in, D, H, W) to (N, C_out, D', H', W')."""
    return _prepared(x, geometry, channels_last)(x, w, b)


def prepare_forward(
    x: Tensor, w: Tensor, b: Tensor | None, geometry: Geometry, channels_last: bool
) -> Callable[[Tensor, Tensor, Tensor | None], Tensor] | None:
    """:func:`forward` for tensors of these shapes, strides, dtypes and device, its form chosen."""
    return _prepared(x, geometry, channels_last) if x.shape[0] > 0 else None


def _prepared(
    x: Tensor, geometry: Geometry, channels_last: bool
) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    form = choose("forward", geometry, *_problem(x.shape[0], x.shape[2:], x, channels_last))
    run = FORWARD[form]
    return lambda x, w, b: laid_out(run(x, w, b, geometry, channels_last), channels_last)


def grad_input(
    gy: Tensor,
    w: Tensor,
    geometry: Geometry,
    input_size: Sequence[int],
    channels_last: bool,
    bias: Tensor | None = None,
) -> Tensor:
    """Gradient by the input, (N, C_in, D, H, W); ``input_size`` is (D, H, W)."""
    form = choose("grad_input", geometry, *_problem(gy.shape[0], input_size, gy, channels_last))
    result = GRAD_INPUT[form](gy, w, geometry, input_size, channels_last, bias)
    return laid_out(result, channels_last)


def grad_weight(x: Tensor, gy: Tensor, geometry: Geometry, channels_last: bool) -> Tensor:
    """Gradient by the weight, (C_in, C_out / groups, kD, kH, kW)."""
    form = choose("grad_weight", geometry, *_problem(x.shape[0], x.shape[2:], x, channels_last))
    return laid_out(GRAD_WEIGHT[form](x, gy, geometry, channels_last), channels_last)


def _problem(
    batch: int, input_size: Sequence[int], tensor: Tensor, channels_last: bool
) -> tuple[int, Triple, torch.dtype, str, bool]:
    depth, height, width = input_size
    return batch, (depth, height, width), tensor.dtype, tensor.device.type, channels_last


# --- Forms ---------------------------------------------------------------------------------------


def _native_forward(
    x: Tensor, w: Tensor, b: Tensor | None, geometry: Geometry, channels_last: bool
) -> Tensor:
    return native.forward(x, w, b, geometry, channels_last)


def _polyphase(
    x: Tensor, w: Tensor, b: Tensor | None, geometry: Geometry, channels_last: bool
) -> Tensor:
    depth, height, width = x.shape[2:]
    packed = forms.polyphase_pack(w, geometry, (depth, height, width))
    return forms.polyphase(x, packed, b, geometry, channels_last, _conv3d)


def _convolution_grad_input(
    gy: Tensor,
    w: Tensor,
    geometry: Geometry,
    input_size: Sequence[int],
    channels_last: bool,
    bias: Tensor | None,
) -> Tensor:
    """The definition of the gradient: a strided convolution, by oneDNN where PyTorch skips that."""
    result = _strided(
        gy, w, bias, geometry.padding, geometry.stride, geometry.dilation, geometry.groups
    )
    return native.cropped(result, input_size)


def products_are_exact() -> bool:
    """Whether matrix products in float32 are of that precision; convolutions have other switches.

    ``torch.set_float32_matmul_precision`` decides, and ``torch.backends.mkldnn.matmul``.
    """
    if _matmul_precision is not None:
        return _matmul_precision("mkldnn", "matmul") not in ("bf16", "tf32")
    return torch.get_float32_matmul_precision() == "highest"


_matmul_precision: Callable[[str, str], str] | None
_matmul_precision = getattr(torch._C, "_get_fp32_precision_getter", None)


def _gemm_forward(
    x: Tensor, w: Tensor, b: Tensor | None, geometry: Geometry, channels_last: bool
) -> Tensor:
    if not products_are_exact():
        return native.forward(x, w, b, geometry, channels_last)
    with without_autocast():
        return forms.gemm_forward(x, w, b, geometry, channels_last)


def _gemm_grad_weight(x: Tensor, gy: Tensor, geometry: Geometry, channels_last: bool) -> Tensor:
    if not products_are_exact():
        return native.grad_weight(x, gy, geometry, channels_last)
    with without_autocast():
        return forms.gemm_grad_weight(x, gy, geometry)


def _padded_grad_weight(x: Tensor, gy: Tensor, geometry: Geometry, channels_last: bool) -> Tensor:
    """Zeros around ``gy`` in place of padding, on axes that are mostly padding."""
    g = geometry
    axes = zip(
        x.shape[2:], gy.shape[2:], g.kernel_size, g.stride, g.padding, g.output_padding, g.dilation,
        strict=True,
    )  # fmt: skip
    around: list[tuple[int, int]] = []
    plain: list[tuple[int, int]] = []  # padding and output_padding that are left
    for n, outputs, k, s, p, extra, d in axes:
        laid_out_here = _is_mostly_padding(n, s, p)
        full = (n - 1) * s + d * (k - 1) + 1
        around.append((p, full - outputs - p) if laid_out_here else (0, 0))
        plain.append((0, 0) if laid_out_here else (p, extra))
    gy = torch.nn.functional.pad(gy, [n for pair in reversed(around) for n in pair])
    (pd, ed), (ph, eh), (pw, ew) = plain
    g = replace(g, padding=(pd, ph, pw), output_padding=(ed, eh, ew))
    return native.grad_weight(x, gy, g, channels_last)


def _is_mostly_padding(size: int, stride: int, padding: int) -> bool:
    """Whether an axis of ``size`` inputs has no more outputs than taps, but for extra ones."""
    return (size - 1) * stride < 2 * padding


def _conv3d(
    x: Tensor, w: Tensor, b: Tensor | None, padding: Triple, dilation: Triple, groups: int
) -> Tensor:
    return _strided(x, w, b, padding, (1, 1, 1), dilation, groups)


def _strided(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    padding: Triple,
    stride: Triple,
    dilation: Triple,
    groups: int,
) -> Tensor:
    n, c, depth, height, _ = x.shape
    if (
        x.dtype == torch.float32
        and x.device.type == "cpu"
        and onednn_enabled()
        and skips_onednn(n, c, depth, height, w.shape[3:], groups)
    ):
        return torch.ops.aten.mkldnn_convolution.default(x, w, b, padding, stride, dilation, groups)
    with without_autocast():
        return torch.conv3d(x, w, b, stride, padding, dilation, groups)


FORWARD: dict[str, Callable[..., Tensor]] = {
    PYTORCH: _native_forward,
    POLYPHASE: _polyphase,
    GEMM: _gemm_forward,
}
GRAD_INPUT: dict[str, Callable[..., Tensor]] = {
    PYTORCH: native.grad_input,
    CONVOLUTION: _convolution_grad_input,
}
GRAD_WEIGHT: dict[str, Callable[..., Tensor]] = {
    PYTORCH: native.grad_weight,
    CONVOLUTION: native.convolution_grad_weight,
    GEMM: _gemm_grad_weight,
    PADDED: _padded_grad_weight,
}
FORMS = {"forward": FORWARD, "grad_input": GRAD_INPUT, "grad_weight": GRAD_WEIGHT}


def applicable(operation: str, geometry: Geometry) -> list[str]:
    """The forms of an operation that give the right result for a geometry."""
    names = list(FORMS[operation])
    if not forms.is_gemm(geometry) and GEMM in names:
        names.remove(GEMM)
    if operation == "grad_weight" and any(
        extra >= s for extra, s in zip(geometry.output_padding, geometry.stride, strict=True)
    ):
        names.remove(CONVOLUTION)  # that convolution would have more outputs than x has voxels
    return names


# --- Choice --------------------------------------------------------------------------------------


def choose(
    operation: str,
    geometry: Geometry,
    batch: int,
    input_size: Triple,
    dtype: torch.dtype,
    device_type: str,
    channels_last: bool,
) -> str:
    """Name of the form that runs, a key of :data:`FORMS`.

    Every threshold is where the measurements of docs/portable.md show a clear win (above 1.15x);
    whatever was not measured (other devices, half precision) goes to PyTorch's operator.
    """
    if device_type != "cpu":
        return PYTORCH
    problem = (geometry, batch, input_size, channels_last)
    return _choose_on_cpu(operation, dtype, *problem, onednn_enabled())


@lru_cache(maxsize=4096)
def _choose_on_cpu(
    operation: str,
    dtype: torch.dtype,
    g: Geometry,
    batch: int,
    size: Triple,
    last: bool,
    onednn: bool,
) -> str:
    if operation == "grad_weight" and _onednn_errs(g, size, dtype):
        return PADDED
    if dtype != torch.float32:
        return PYTORCH
    rule = {
        "forward": _choose_forward,
        "grad_input": _choose_grad_input,
        "grad_weight": _choose_grad_weight,
    }[operation]
    return rule(g, batch, size, last, onednn)


def why_pytorch(dtype: torch.dtype, device_type: str) -> str:
    """Why :func:`choose` leaves an operation in a dtype on a device to PyTorch's operator."""
    if device_type != "cpu":
        return f"no other form was measured on {device_type}"
    if dtype != torch.float32:
        return f"no other form was measured in {str(dtype).removeprefix('torch.')} on cpu"
    return "no other form measured faster for it"


def _onednn_errs(g: Geometry, input_size: Triple, dtype: torch.dtype) -> bool:
    """Whether oneDNN's gradient by weight may be wrong or overrun buffers (docs/portable.md)."""
    least_stride = {torch.float32: 2, torch.float16: 1, torch.bfloat16: 1}.get(dtype)
    return least_stride is not None and any(
        s >= least_stride and _is_mostly_padding(n, s, p)
        for n, s, p in zip(input_size, g.stride, g.padding, strict=True)
    )


def _choose_forward(
    g: Geometry, batch: int, input_size: Triple, channels_last: bool, onednn: bool
) -> str:
    outputs = batch * g.out_channels * prod(g.output_size(input_size))
    strided = g.stride != (1, 1, 1)
    if g.groups > 1:
        least = _least_grouped_outputs(g, strided, channels_last)
        return POLYPHASE if least is not None and outputs >= least else PYTORCH
    if (
        _has_empty_phase(g)
        and outputs >= 1 << 19
        and (g.dilation != (1, 1, 1) or not channels_last)
    ):
        return POLYPHASE
    if onednn and skips_onednn(batch, g.in_channels, *input_size[:2], g.kernel_size[1:], 1):
        work = batch * prod(input_size) * g.in_channels * g.out_channels * prod(g.kernel_size)
        if forms.is_gemm(g):
            return GEMM if channels_last and work >= 1 << 25 else PYTORCH
        least = (1 << 26 if channels_last else 1 << 28) if strided else 1 << 25
        return POLYPHASE if work >= least and g.out_channels >= 16 else PYTORCH
    is_large_gemm = forms.is_gemm(g) and batch * prod(input_size) >= 4096 and outputs >= 3 << 18
    if channels_last:
        return GEMM if is_large_gemm and g.out_channels <= 8 else PYTORCH
    taps = prod(-(-k // s) for k, s in zip(g.kernel_size, g.stride, strict=True))
    if (
        strided
        and 4 * outputs >= _LARGE_BYTES
        and g.out_channels >= 16
        and g.dilation == (1, 1, 1)
        and prod(g.stride) <= 8
        and taps <= 8
    ):
        return POLYPHASE
    return GEMM if is_large_gemm else PYTORCH


def _least_grouped_outputs(g: Geometry, strided: bool, channels_last: bool) -> int | None:
    """Outputs from which phases beat oneDNN's column form, its only one for few channels."""
    per_group = max(g.in_channels_per_group, g.out_channels_per_group)
    if per_group == 1 and (channels_last or not strided):
        return 1 << 19
    if not strided or per_group > 8:
        return None
    if channels_last:
        return 1 << 21 if per_group in (2, 8) else None
    return 1 << 21 if per_group == 8 else _LARGE_BYTES // 4


# Buffers of this size come fresh from the kernel, page by page, at every call (the largest mmap
# threshold of glibc's malloc): then the whole-tensor reorders around oneDNN's deconvolution cost
# more than the deconvolution, while a phase's buffers stay below.
_LARGE_BYTES = 32 << 20


def _choose_grad_input(
    g: Geometry, batch: int, input_size: Triple, channels_last: bool, onednn: bool
) -> str:
    work = batch * prod(input_size) * g.in_channels * g.out_channels * prod(g.kernel_size)
    if (
        onednn
        and skips_onednn(batch, g.in_channels, *input_size[:2], g.kernel_size[1:], g.groups)
        and work >= 1 << 22
        and (channels_last or g.in_channels <= 64 or not forms.is_gemm(g))
    ):
        return CONVOLUTION
    return PYTORCH


def _choose_grad_weight(
    g: Geometry, batch: int, input_size: Triple, channels_last: bool, onednn: bool
) -> str:
    output_size = g.output_size(input_size)
    outputs = batch * g.out_channels * prod(output_size)
    if forms.is_gemm(g):
        many_taps = prod(g.kernel_size) >= 32 and outputs >= 1 << 19 and not channels_last
        enough = outputs >= (1 << 19 if channels_last else 5 << 19)
        return GEMM if many_taps or (g.in_channels >= 128 and enough) else PYTORCH
    kernel = g.kernel_size[1:]
    work = batch * prod(input_size) * g.in_channels * g.out_channels * prod(g.kernel_size)
    if (
        onednn
        and skips_onednn(batch, g.in_channels, *input_size[:2], kernel, g.groups)
        and not skips_onednn(batch, g.out_channels, *output_size[:2], kernel, g.groups)
        and work >= (1 << 26 if channels_last else 1 << 28)
        and CONVOLUTION in applicable("grad_weight", g)
    ):
        return CONVOLUTION
    return PYTORCH


def _has_empty_phase(g: Geometry) -> bool:
    axes = zip(g.kernel_size, g.stride, g.dilation, strict=True)
    return any(has_empty_phase(*axis) for axis in axes)
