"""Geometry: the hashable description of one convolution layer, transposed or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any

Triple = tuple[int, int, int]


@dataclass(frozen=True)
class Geometry:
    """One layer: channels, kernel and the four per-axis parameters, axes in the order D, H, W.

    Holds no extents: one Geometry serves every input size, and is the key of every cache.
    ``transposed`` tells a ConvTranspose3d from a Conv3d, which has no ``output_padding``. Backends
    and plans know transposed layers only: a Conv3d reaches them as its :meth:`adjoint`.
    """

    in_channels: int
    out_channels: int
    kernel_size: Triple
    stride: Triple = (1, 1, 1)
    padding: Triple = (0, 0, 0)
    output_padding: Triple = (0, 0, 0)
    dilation: Triple = (1, 1, 1)
    groups: int = 1
    transposed: bool = True

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    def __hash__(self) -> int:
        # Every steady-state call looks this up, so the hash of nine fields is computed once.
        return self._hash

    @property
    def in_channels_per_group(self) -> int:
        return self.in_channels // self.groups

    @property
    def out_channels_per_group(self) -> int:
        return self.out_channels // self.groups

    @property
    def weight_size(self) -> tuple[int, int, int, int, int]:
        """(C_in, C_out / groups, kD, kH, kW); of a Conv3d (C_out, C_in / groups, kD, kH, kW)."""
        if self.transposed:
            return (self.in_channels, self.out_channels_per_group, *self.kernel_size)
        return (self.out_channels, self.in_channels_per_group, *self.kernel_size)

    def output_size(self, input_size: Sequence[int]) -> Triple:
        """Spatial size (D, H, W) of the output for the spatial size of an input; SymInts pass."""
        # Without a loop, since planning asks often; without a cache, whose lock Dynamo rejects.
        d, h, w = input_size
        s0, s1, s2 = self.stride
        p0, p1, p2 = self.padding
        e0, e1, e2 = self.output_padding
        d0, d1, d2 = self.dilation
        k0, k1, k2 = self.kernel_size
        if not self.transposed:
            return (
                (d + 2 * p0 - d0 * (k0 - 1) - 1) // s0 + 1,
                (h + 2 * p1 - d1 * (k1 - 1) - 1) // s1 + 1,
                (w + 2 * p2 - d2 * (k2 - 1) - 1) // s2 + 1,
            )
        return (
            (d - 1) * s0 - 2 * p0 + d0 * (k0 - 1) + e0 + 1,
            (h - 1) * s1 - 2 * p1 + d1 * (k1 - 1) + e1 + 1,
            (w - 1) * s2 - 2 * p2 + d2 * (k2 - 1) + e2 + 1,
        )

    def adjoint(self, input_size: Sequence[int]) -> Geometry:
        """The transposed layer whose gradient by input is this Conv3d on inputs of this size.

        Both have one weight. ``output_padding`` is what makes the transposed layer's output as
        large as ``input_size`` (D, H, W), so it depends on that; SymInts pass.
        """
        axes = zip(
            input_size, self.kernel_size, self.stride, self.padding, self.dilation, strict=True
        )
        d, h, w = ((n + 2 * p - e * (k - 1) - 1) % s for n, k, s, p, e in axes)
        return Geometry(
            self.out_channels,
            self.in_channels,
            self.kernel_size,
            self.stride,
            self.padding,
            (d, h, w),
            self.dilation,
            self.groups,
        )

    @property
    def label(self) -> str:
        """Short name, as ``48->24 k3 s1 p0 d1 g1`` or ``32->32 k3x5x7 s2 p1 op1 d1 g4``.

        That of a Conv3d begins with ``conv``.
        """
        parts = [] if self.transposed else ["conv"]
        parts += [
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
        """Plain dictionary of the fields, ready for JSON; ``transposed`` only of a Conv3d."""
        values = asdict(self)
        if self.transposed:
            del values["transposed"]
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Geometry:
        """Inverse of :meth:`to_dict`; lists (as JSON gives them) become tuples."""
        plain: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in values.items()
        }
        return cls(**plain)


def _short(triple: Triple) -> str:
    return str(triple[0]) if len(set(triple)) == 1 else "x".join(map(str, triple))
