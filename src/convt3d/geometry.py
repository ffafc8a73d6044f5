"""Geometry: the checked, hashable description of one transposed-convolution layer.

Every check that PyTorch makes on the arguments of ``conv_transpose3d`` is made here, from sizes
alone, with PyTorch's exception types and (where PyTorch has one text for all backends) its words.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any

import torch

Triple = tuple[int, int, int]

_AXES = ("depth", "height", "width")


@dataclass(frozen=True)
class Geometry:
    """One layer: channels, kernel and the four per-axis parameters, axes in the order D, H, W.

    Holds no extents: one Geometry serves every input size, and is the key of every cache.
    """

    in_channels: int
    out_channels: int
    kernel_size: Triple
    stride: Triple = (1, 1, 1)
    padding: Triple = (0, 0, 0)
    output_padding: Triple = (0, 0, 0)
    dilation: Triple = (1, 1, 1)
    groups: int = 1

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    def __hash__(self) -> int:
        # Every steady-state call looks this up, so the hash of eight fields is computed once.
        return self._hash

    @property
    def in_channels_per_group(self) -> int:
        return self.in_channels // self.groups

    @property
    def out_channels_per_group(self) -> int:
        return self.out_channels // self.groups

    @property
    def weight_size(self) -> tuple[int, int, int, int, int]:
        """Size of the weight, (C_in, C_out / groups, kD, kH, kW)."""
        return (self.in_channels, self.out_channels_per_group, *self.kernel_size)

    def output_size(self, input_size: Sequence[int]) -> Triple:
        """Spatial size (D, H, W) of the output for the spatial size of an input; SymInts pass."""
        # Without a loop, since planning asks often; without a cache, whose lock Dynamo rejects.
        d, h, w = input_size
        s0, s1, s2 = self.stride
        p0, p1, p2 = self.padding
        e0, e1, e2 = self.output_padding
        d0, d1, d2 = self.dilation
        k0, k1, k2 = self.kernel_size
        return (
            (d - 1) * s0 - 2 * p0 + d0 * (k0 - 1) + e0 + 1,
            (h - 1) * s1 - 2 * p1 + d1 * (k1 - 1) + e1 + 1,
            (w - 1) * s2 - 2 * p2 + d2 * (k2 - 1) + e2 + 1,
        )

    @property
    def label(self) -> str:
        """Short name, as ``48->24 k3 s1 p0 d1 g1`` or ``32->32 k3x5x7 s2 p1 op1 d1 g4``."""
        parts = [
            f"{self.in_channels}->{self.out_channels}",
            f"k{_short(self.kernel_size)}",
            f"s{_short(self.stride)}",
            f"p{_short(self.padding)}",
        ]
        if any(self.output_padding):
            parts.append(f"op{_short(self.output_padding)}")
        parts += [f"d{_short(self.dilation)}", f"g{self.groups}"]
        return " ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionary of the fields, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Geometry:
        """Inverse of :meth:`to_dict`; lists (as JSON gives them) become tuples."""
        plain: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in values.items()
        }
        return cls(**plain)


def _short(triple: Triple) -> str:
    return str(triple[0]) if len(set(triple)) == 1 else "x".join(map(str, triple))


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
    return TypeError(
        f"conv_transpose3d(): argument '{name}' must be {wanted}, not {type(value).__name__}"
    )


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
) -> tuple[Geometry, bool]:
    """Check sizes and parameters together, in PyTorch's order.

    Args:
        input_size: (N, C_in, D, H, W) or unbatched (C_in, D, H, W).
        weight_size: (C_in, C_out / groups, kD, kH, kW).
        bias_size: (C_out,) or None.

    Returns:
        The geometry, and whether the input is batched.

    Raises:
        RuntimeError: whatever PyTorch refuses: ranks, channels, groups, a non-positive stride,
            dilation or output, a negative padding, an output_padding that reaches both stride and
            dilation, an input without voxels.
    """
    input_size, weight_size = list(input_size), list(weight_size)
    if len(input_size) not in (4, 5):
        raise RuntimeError(
            "Expected 4D (unbatched) or 5D (batched) input to conv_transpose3d, "
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
    channels = input_size[-4]
    if channels != weight_size[0]:
        raise RuntimeError(
            f"Given transposed=1, {given}, expected input{input_size} to have {weight_size[0]} "
            f"channels, but got {channels} channels instead"
        )
    out_channels = weight_size[1] * groups
    if bias_size is not None and (len(bias_size) != 1 or bias_size[0] != out_channels):
        raise RuntimeError(
            f"Given transposed=1, {given}, expected bias to be 1-dimensional with {out_channels} "
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
    kernel_size = (weight_size[2], weight_size[3], weight_size[4])
    geometry = Geometry(
        channels, out_channels, kernel_size, stride, padding, output_padding, dilation, groups
    )
    output = geometry.output_size(spatial)
    if any(n < 1 for n in output):
        raise RuntimeError(
            f"Given input size per channel: ({_by(spatial)}). Calculated output size per channel: "
            f"({_by(output)}). Output size is too small"
        )
    return geometry, batched


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
    )
    found = _checked.get(key)
    if found is None:
        geometry, batched = check(*key)
        # Sizes may vary without end (variable-length batches); the geometries do not.
        if len(_checked) >= _MAX_CHECKED:
            _checked.clear()
        found = _checked[key] = (_geometries.setdefault(geometry, geometry), batched)
    return found


_geometries: dict[Geometry, Geometry] = {}


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
