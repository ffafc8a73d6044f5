"""The arguments of a convolution, checked from sizes alone and turned into a Geometry.

What is refused here is what PyTorch refuses, with its exception types and (where PyTorch has one
text for all backends) its words. The public functions hand a refused call on to PyTorch's own
operator, so that the user sees PyTorch's error; the registered operators raise the one made here.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from convt3d.geometry import Geometry, Triple

_AXES = ("depth", "height", "width")
_LARGEST = 2**31 - 1

Ints = int | Sequence[int]
Parameters = tuple[Ints, Ints | str, Ints | None, int, Ints]
"""Of a call, as given: stride, padding, output_padding (None: a Conv3d), groups and dilation."""


def triple(name: str, value: Any) -> Triple:
    """``value`` as three ints, the way PyTorch reads an ``int[3]`` argument called ``name``.

    Raises:
        TypeError: neither an integer nor a tuple or list of integers (bool is none).
        RuntimeError: a sequence of a length other than 1 or 3.
    """
    if type(value) is int:
        return (value, value, value)
    if type(value) is tuple and len(value) == 3:
        a, b, c = value
        if type(a) is int and type(b) is int and type(c) is int:
            return value
    if not isinstance(value, (tuple, list)):
        one = _integer(value)
        if one is None:
            raise _not_ints(name, "tuple of ints", value)
        return (one, one, one)
    items = [_integer(item) for item in value]
    if None in items:
        raise _not_ints(name, "tuple of ints", value)
    if len(items) == 1:
        items *= 3
    if len(items) != 3:
        raise RuntimeError(
            f"expected {name} to be a single integer value or a list of 3 values to match the "
            f"convolution dimensions, but got {name}={items}"
        )
    return (items[0], items[1], items[2])  # type: ignore[return-value]


def _integer(value: Any) -> int | None:
    """``value`` if PyTorch's argument parser takes it for an int, else None."""
    if isinstance(value, torch.SymInt):  # must stay symbolic
        return value  # type: ignore[return-value]
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _not_ints(name: str, wanted: str, value: Any) -> TypeError:
    return TypeError(f"argument '{name}' must be {wanted}, not {type(value).__name__}")


def group_count(value: Any) -> int:
    """The ``groups`` argument as an int; TypeError as PyTorch raises it."""
    groups = _integer(value)
    if groups is None:
        raise _not_ints("groups", "int", value)
    return groups


def check(
    input_size: Sequence[int],
    weight_size: Sequence[int],
    bias_size: Sequence[int] | None,
    stride: Triple,
    padding: Triple,
    output_padding: Triple,
    groups: int,
    dilation: Triple,
    transposed: bool = True,
) -> tuple[Geometry, bool]:
    """Check sizes and parameters together, in PyTorch's order.

    Args:
        input_size: (N, C_in, D, H, W) or unbatched (C_in, D, H, W).
        weight_size: (C_in, C_out / groups, kD, kH, kW); of a convolution that is not transposed
            (C_out, C_in / groups, kD, kH, kW).
        bias_size: (C_out,) or None.

    Returns:
        The geometry, and whether the input is batched.

    Raises:
        RuntimeError: whatever PyTorch refuses: ranks, channels, groups, a non-positive stride,
            dilation or output, a negative padding, an output_padding that reaches both stride and
            dilation, a tensor without elements beside an empty batch; and parameters beyond 32
            bits.
    """
    input_size, weight_size = list(input_size), list(weight_size)
    if len(input_size) not in (4, 5):
        raise RuntimeError(
            f"Expected 4D (unbatched) or 5D (batched) input to {_name(transposed)}, "
            f"but got input of size: {input_size}"
        )
    batched = len(input_size) == 5
    _check_parameters(len(weight_size), stride, padding, output_padding, groups, dilation)

    given = f"weight of size {weight_size}"
    if weight_size[0] < groups or weight_size[0] == 0:
        raise RuntimeError(
            f"Given groups={groups}, expected weight to be at least {groups} at dimension 0, "
            f"but got {given} instead"
        )
    if weight_size[0] % groups != 0:
        raise RuntimeError(
            f"Given groups={groups}, expected weight to be divisible by {groups} at dimension 0, "
            f"but got {given} instead"
        )
    channels, other = input_size[-4], weight_size[1] * groups
    expected, out_channels = (weight_size[0], other) if transposed else (other, weight_size[0])
    what = f"transposed=1, {given}" if transposed else f"groups={groups}, {given}"
    if channels != expected:
        raise RuntimeError(
            f"Given {what}, expected input{input_size} to have {expected} "
            f"channels, but got {channels} channels instead"
        )
    if bias_size is not None and (len(bias_size) != 1 or bias_size[0] != out_channels):
        what = f"transposed=1, {given}" if transposed else given
        raise RuntimeError(
            f"Given {what}, expected bias to be 1-dimensional with {out_channels} "
            f"elements, but got bias of size {list(bias_size)} instead"
        )
    if any(n == 0 for n in weight_size):
        raise RuntimeError(f"non-empty 5D tensor expected for weight, but got: {weight_size}")

    spatial = input_size[-3:]
    if any(n == 0 for n in spatial):
        raise RuntimeError(
            "Only zero batch or zero channel inputs are supported, "
            f"but got input shape: {input_size}"
        )
    if transposed:
        _check_output_padding(output_padding, stride, dilation)
    kernel_size = (weight_size[2], weight_size[3], weight_size[4])
    geometry = Geometry(
        channels,
        out_channels,
        kernel_size,
        stride,
        padding,
        output_padding,
        dilation,
        groups,
        transposed,
    )
    _check_output(geometry, spatial)
    return geometry, batched


def _name(transposed: bool) -> str:
    return "conv_transpose3d" if transposed else "conv3d"


def _check_parameters(
    weight_dim: int,
    stride: Triple,
    padding: Triple,
    output_padding: Triple,
    groups: int,
    dilation: Triple,
) -> None:
    if weight_dim < 3:
        raise RuntimeError("weight should have at least three dimensions")
    if weight_dim != 5:
        wanted = weight_dim - 2
        raise RuntimeError(
            f"expected stride to be a single integer value or a list of {wanted} values to match "
            f"the convolution dimensions, but got stride={list(stride)}"
        )
    if any(p < 0 for p in padding):
        raise RuntimeError("negative padding is not supported")
    if any(p < 0 for p in output_padding):
        raise RuntimeError("negative output_padding is not supported")
    if any(s <= 0 for s in stride):
        raise RuntimeError("non-positive stride is not supported")
    if any(d <= 0 for d in dilation):
        raise RuntimeError("dilation should be greater than zero")
    if groups <= 0:
        raise RuntimeError("non-positive groups is not supported")
    if any(n > _LARGEST for n in (*stride, *padding, *output_padding, *dilation)):
        raise RuntimeError(f"stride, padding and dilation beyond {_LARGEST} are not supported")


def _check_output_padding(output_padding: Triple, stride: Triple, dilation: Triple) -> None:
    if any(op >= s and op >= d for op, s, d in zip(output_padding, stride, dilation, strict=True)):
        raise RuntimeError(
            "output padding must be smaller than either stride or dilation, but got "
            + " ".join(
                f"{name}_{axis}: {value}"
                for name, values in (
                    ("output_padding", output_padding),
                    ("stride", stride),
                    ("dilation", dilation),
                )
                for axis, value in zip(_AXES, values, strict=True)
            )
        )


def _check_output(geometry: Geometry, spatial: Sequence[int]) -> None:
    g = geometry
    if not g.transposed:
        padded = [n + 2 * p for n, p in zip(spatial, g.padding, strict=True)]
        reach = [d * (k - 1) + 1 for d, k in zip(g.dilation, g.kernel_size, strict=True)]
        if any(n < k for n, k in zip(padded, reach, strict=True)):
            raise RuntimeError(
                f"Calculated padded input size per channel: ({_by(padded)}). Kernel size: "
                f"({_by(reach)}). Kernel size can't be greater than actual input size"
            )
        return
    output = g.output_size(spatial)
    if any(n < 1 for n in output):
        raise RuntimeError(
            f"Given input size per channel: ({_by(spatial)}). Calculated output size per channel: "
            f"({_by(output)}). Output size is too small"
        )


def _by(size: Sequence[int]) -> str:
    return " x ".join(map(str, size))


_Key = tuple[Any, ...]
_MAX_CHECKED = 4096
_checked: dict[_Key, tuple[Geometry, bool]] = {}


def normalise(
    input_size: Sequence[int],
    weight_size: Sequence[int],
    bias_size: Sequence[int] | None,
    stride: Any,
    padding: Any,
    output_padding: Any,
    groups: Any,
    dilation: Any,
    transposed: bool = True,
) -> tuple[Geometry, bool]:
    """:func:`check` on arguments as a user writes them, remembered: a repeat is one look-up.

    The sizes must be hashable (``Tensor.shape``), so this is for concrete sizes, not SymInts.
    Equal arguments give the identical Geometry object.
    """
    stride = triple("stride", stride)
    padding = triple("padding", padding)
    output_padding = triple("output_padding", output_padding)
    dilation = triple("dilation", dilation)
    if type(groups) is not int:
        groups = group_count(groups)
    key = (
        input_size,
        weight_size,
        bias_size,
        stride,
        padding,
        output_padding,
        groups,
        dilation,
        transposed,
    )
    found = _checked.get(key)
    if found is None:
        geometry, batched = check(*key)
        # Sizes may vary without end (variable-length batches); the geometries do not.
        if len(_checked) >= _MAX_CHECKED:
            _checked.clear()
        found = _checked[key] = (interned(geometry), batched)
    return found


_geometries: dict[Geometry, Geometry] = {}


def interned(geometry: Geometry) -> Geometry:
    """The one object that stands for all Geometries equal to this one; its hash is known."""
    return _geometries.setdefault(geometry, geometry)


def check_types(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raise PyTorch's RuntimeError when dtypes or devices differ."""
    dtype, device = input.dtype, input.device
    if (
        weight.dtype is dtype
        and weight.device == device
        and (bias is None or (bias.dtype is dtype and bias.device == device))
    ):
        return
    for name, other in (("weight", weight), ("bias", bias)):
        if other is None or (dtype == other.dtype and device == other.device):
            continue
        mine, theirs = input.type(), other.type()
        if mine == theirs:  # same kind of tensor on another device of that kind
            mine, theirs = f"{mine} on {input.device}", f"{theirs} on {other.device}"
        wanted = " or input should be a MKLDNN tensor and weight is a dense tensor"
        raise RuntimeError(
            f"Input type ({mine}) and {name} type ({theirs}) should be the same"
            + (wanted if name == "weight" else "")
        )
