"""What plans produce: problems in, kernel launches out. No tensors, no driver, no torch.cuda."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Protocol

import torch

from convt3d.cuda.compiler import KernelSpec
from convt3d.geometry import Geometry, Triple
from convt3d.layout import strides as dense_strides
from convt3d.operations import OPERATIONS as OPERATIONS
from convt3d.precision import Arithmetic


@dataclass(frozen=True)
class Gpu:
    """The properties of a GPU that plans read. The defaults describe an H200.

    ``name`` is empty where no real GPU is meant: what was tuned is then left aside.
    """

    capability: tuple[int, int] = (9, 0)
    multiprocessors: int = 132
    shared_per_block: int = 232448
    shared_per_multiprocessor: int = 233472
    name: str = ""

    @classmethod
    def of(cls, device: int) -> Gpu:
        """Properties of a CUDA device; initialises CUDA."""
        p = torch.cuda.get_device_properties(device)
        return cls(
            (p.major, p.minor),
            p.multi_processor_count,
            getattr(p, "shared_memory_per_block_optin", 99 * 1024),
            getattr(p, "shared_memory_per_multiprocessor", 100 * 1024),
            name=p.name,
        )

    def shared_for(self, resident: int = 1) -> int:
        """Shared memory that a CTA may have where so many share a multiprocessor.

        Each of them takes 1 KB more.
        """
        return min(self.shared_per_block, self.shared_per_multiprocessor // resident - 1024)


@dataclass(frozen=True)
class Problem:
    """One operation of one layer in one dtype and layout: everything that a Plan may bake in.

    ``source`` is the tensor that is gathered from (forward: x; grad_input: the output gradient;
    grad_weight: x) and ``target`` the other one (forward: y; grad_input: the input gradient;
    grad_weight: the output gradient).
    """

    operation: str
    geometry: Geometry
    arithmetic: Arithmetic
    source_channels_last: bool = False
    target_channels_last: bool = False
    bias: bool = False

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    def __hash__(self) -> int:
        return self._hash  # planning asks for it with every plan that it remembers

    def __getstate__(self) -> dict[str, Any]:
        """Fields alone: the hash of a string differs from process to process."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def forward(self) -> bool:
        return self.operation == "forward"

    @property
    def alike(self) -> tuple[Problem, ...]:
        """Other problems for which the same plans are the fastest.

        Those with a bias, or without: a forward pass adds it in the epilogue; a gradient by weight
        brings that by bias along, or leaves it to a pass of its own. Of a gradient by input
        :meth:`canonical` tells. And those in the other type of 16 bits, whose kernels do the same.
        """
        biases = (self.bias,) if self.operation == "grad_input" else (self.bias, not self.bias)
        types = (self.arithmetic, *_OTHER_16_BITS.get(self.arithmetic, ()))
        every = itertools.product(types, biases)
        return tuple(replace(self, arithmetic=a, bias=b) for a, b in every)[1:]

    def canonical(self, input_size: Sequence[int]) -> tuple[Problem, Triple]:
        """The problem that plans are made for, and the spatial size of its layer's input.

        A gradient by input of stride 1 is a forward pass: of the layer with source and target
        channels exchanged, padding ``dilation * (kernel - 1) - padding``, and the weight that
        :func:`flipped` describes. Its kernels are faster. All other problems are what they are;
        so is a kernel of one tap, of which nothing could be flipped.
        """
        d, h, w = input_size
        g = self.geometry
        p0, p1, p2 = (
            e * (k - 1) - p for k, p, e in zip(g.kernel_size, g.padding, g.dilation, strict=True)
        )
        if (
            self.operation != "grad_input"
            or g.stride != (1, 1, 1)
            or g.kernel_size == (1, 1, 1)
            or any(g.output_padding)
            or g.groups != 1
            or min(p0, p1, p2) < 0
        ):
            # A gradient by input, which is the output of a Conv3d, has plans without a bias: that
            # is a step of the epilogue which is attached to them (epilogue.py).
            apart = self.bias and self.operation == "grad_input"
            return (replace(self, bias=False) if apart else self), (d, h, w)
        forward = replace(
            g,
            in_channels=g.out_channels,
            out_channels=g.in_channels,
            padding=(p0, p1, p2),
        )
        return replace(self, operation="forward", geometry=forward), g.output_size(input_size)

    def extents(self, input_size: Sequence[int]) -> tuple[Triple, Triple]:
        """Extents (D, H, W) of source and target for those of the layer's input.

        Of a gradient by weight they are those of input and output, as of a forward pass.
        """
        d, h, w = input_size
        output = self.geometry.output_size(input_size)
        return (output, (d, h, w)) if self.operation == "grad_input" else ((d, h, w), output)

    @property
    def channels_last(self) -> bool | None:
        """The layout of both tensors, of which one of one channel is in either.

        None where they differ.
        """
        source, target = self.source_channels_last, self.target_channels_last
        one_group = self.geometry.groups == 1
        if source == target or (one_group and self.target_channels == 1):
            return source
        return target if one_group and self.source_channels == 1 else None

    @functools.cached_property
    def source_channels(self) -> int:
        """Channels per group of the source tensor."""
        g = self.geometry
        return (
            g.out_channels_per_group if self.operation == "grad_input" else g.in_channels_per_group
        )

    @functools.cached_property
    def target_channels(self) -> int:
        """Channels per group of the target tensor."""
        g = self.geometry
        return (
            g.in_channels_per_group if self.operation == "grad_input" else g.out_channels_per_group
        )

    @functools.cached_property
    def element_bytes(self) -> int:
        return 2 if self.arithmetic in (Arithmetic.F16, Arithmetic.BF16) else 4

    @property
    def map_element(self) -> str:
        """What a tensor map calls the activations' elements."""
        return {
            Arithmetic.TF32: "tfloat32",  # which TMA rounds to
            Arithmetic.IEEE: "float32",
            Arithmetic.F16: "float16",
            Arithmetic.BF16: "bfloat16",
        }[self.arithmetic]

    @property
    def words_per_value(self) -> int:
        """Words of an operand on matrix units: two TF32 parts of a split float32."""
        return 2 if self.arithmetic is Arithmetic.IEEE else 1

    @property
    def type_macros(self) -> tuple[tuple[str, str], ...]:
        """The element type and arithmetic, as the kernels spell them."""
        kind, math = {
            Arithmetic.TF32: ("Float32", "MathTf32"),
            Arithmetic.IEEE: ("Float32", "MathIeee"),
            Arithmetic.F16: ("Float16", "Math16<Float16>"),
            Arithmetic.BF16: ("BFloat16", "Math16<BFloat16>"),
        }[self.arithmetic]
        return (("CONVT3D_TYPE", kind), ("CONVT3D_MATH", math))


def flipped(weight_size: Sequence[int], strides: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """A weight with its two channel dimensions exchanged and its taps in reverse.

    ``weight_size`` and ``strides`` (in elements) are of the weight as it lies in memory. The result
    is the strides of that view and the offset of its first element.
    """
    by_in, by_out, *by_tap = strides
    offset = sum((k - 1) * s for k, s in zip(weight_size[2:], by_tap, strict=True))
    return (by_out, by_in, *(-s for s in by_tap)), offset


_OTHER_16_BITS = {
    Arithmetic.F16: (Arithmetic.BF16,),
    Arithmetic.BF16: (Arithmetic.F16,),
}
_MAP_ELEMENTS = {"float32": 4, "tfloat32": 4, "float16": 2, "bfloat16": 2}
MAP_ALIGNMENT = 16
"""Of the address of a tensor that a tensor map describes, in bytes."""
MAP_BOX = 256
"""The largest extent of a tensor map's box."""


@dataclass(frozen=True)
class TensorMap:
    """How TMA sees a tensor: a kernel parameter ``const __grid_constant__ TensorMap``.

    Every sequence is innermost first. What a box covers outside of the extents becomes zero.

    Args:
        tensor: name of the tensor or workspace, described from its first element on. A tensor whose
            address is no multiple of 16 bytes is copied before the launch.
        element: "float32", "tfloat32" (rounded to nearest on load), "float16" or "bfloat16".
        extents: of one to five dimensions, in elements.
        strides: in bytes, of all dimensions but the innermost, which is contiguous.
        box: extents of what one load or store moves, in elements.
        swizzle: 0, or the bytes of a box's row, 64 or 128: shorter rows would not be neighbours.
        element_strides: steps between the elements that a box moves; all 1 if absent. Dimension i
            of the box in shared memory has ``ceil(box[i] / element_strides[i])`` elements.

    Raises:
        ValueError: what cuTensorMapEncodeTiled refuses.
    """

    tensor: str
    element: str
    extents: Sequence[int]
    strides: Sequence[int]
    box: Sequence[int]
    swizzle: int = 0
    element_strides: Sequence[int] = ()

    def __post_init__(self) -> None:
        rank = len(self.extents)
        if not 1 <= rank <= 5 or len(self.strides) != rank - 1 or len(self.box) != rank:
            raise ValueError("1 to 5 extents, a stride fewer, and as many box extents")
        if not all(0 < n <= 2**32 for n in self.extents):
            raise ValueError(f"extents {tuple(self.extents)} are not from 1 to 2^32")
        if not all(s % 16 == 0 and 0 < s < 2**40 for s in self.strides):
            raise ValueError(f"strides {tuple(self.strides)} are not multiples of 16 below 2^40")
        if not all(0 < n <= MAP_BOX for n in self.box):
            raise ValueError(f"box {tuple(self.box)} is not from 1 to {MAP_BOX}")
        row = self.box[0] * self.element_bytes
        if row % 16:
            raise ValueError(f"{self.box[0]} elements of a box's row are no multiple of 16 bytes")
        if self.swizzle not in (0, 64, 128):
            raise ValueError(f"swizzle {self.swizzle} is not 0, 64 or 128")
        if self.swizzle and row != self.swizzle:
            raise ValueError(f"a box's row has not the {self.swizzle} bytes of the swizzle")
        steps = self.steps
        if len(steps) != rank or steps[0] != 1 or not all(1 <= n <= 8 for n in steps):
            raise ValueError(f"element strides {steps} are not 1, then from 1 to 8")

    @classmethod
    def dense(
        cls,
        tensor: str,
        element: str,
        extents: Sequence[int],
        box: Sequence[int],
        swizzle: int = 0,
        element_strides: Sequence[int] = (),
        order: Sequence[int] = (),
    ) -> TensorMap:
        """The map of a tensor without gaps, whose extents and box are in the order of memory.

        ``order``: its dimensions as the map has them, by their numbers; as in memory if absent.
        """
        order = tuple(order) or tuple(range(len(extents)))
        strides = [_MAP_ELEMENTS[element] * math.prod(extents[:i]) for i in order]
        steps = tuple(element_strides) and tuple(element_strides[i] for i in order)
        return cls(
            tensor,
            element,
            tuple(extents[i] for i in order),
            tuple(strides[1:]),
            tuple(box[i] for i in order),
            swizzle,
            steps,
        )

    @property
    def element_bytes(self) -> int:
        return _MAP_ELEMENTS[self.element]

    @property
    def steps(self) -> tuple[int, ...]:
        """Element strides, one a dimension."""
        return tuple(self.element_strides) or (1,) * len(self.extents)


@dataclass(frozen=True)
class Launch:
    """One kernel launch.

    ``arguments`` are in the order of the kernel's parameters: pointers, given by the name of a
    tensor ("source", "weight", "target", "bias": null where absent) or workspace, and tensor maps;
    then numbers, as numpy scalars or the names of the weight's strides ("weight_stride_in", "_out",
    "_d", "_h", "_w", 64 bits each, in elements).

    ``dependent``: the kernel may start while the one before it still runs, once all blocks of that
    have called ``grid_dependency_launch()`` or ended (programmatic dependent launch). Some block of
    it must call ``grid_dependency_wait()`` in any case, and every block before it reads what the
    other wrote. No effect before compute capability 9.0.
    """

    kernel: KernelSpec
    grid: int
    block: int
    shared_bytes: int
    arguments: tuple[Any, ...]
    dependent: bool = False

    def on(self, gpu: Gpu) -> Launch:
        """The launch, adapted to a GPU.

        Blocks of a dependent launch are placed while the kernel before still fills most
        multiprocessors: several would share one multiprocessor while others have none. So the
        launch asks for enough shared memory that each has room for an even share of the blocks and
        no more. On an H200, 28 of 102 plans took 0.49 to 0.95 times as long with it, the others
        0.97 to 1.03 (docs/results/even-shares.json).
        """
        if gpu.capability < (9, 0):
            return replace(self, dependent=False)
        share = div_up(self.grid, gpu.multiprocessors)
        # The least of which share + 1 blocks do not fit, in multiples of 16 bytes.
        bytes_ = gpu.shared_for(share + 1) // 16 * 16 + 16
        if not (self.dependent and 0 < self.shared_bytes < bytes_ <= gpu.shared_per_block):
            return self
        return replace(self, shared_bytes=bytes_)


WEIGHT_STRIDES = tuple(f"weight_stride_{axis}" for axis in ("in", "out", "d", "h", "w"))


class WeightLayout(NamedTuple):
    """How a weight lies in memory, if without gaps; or that whose view by :func:`flipped` it is."""

    channels_last: bool
    flipped: bool = False

    def strides(self, weight_size: Sequence[int]) -> tuple[int, ...]:
        """Of a weight of this size, in elements."""
        if not self.flipped:
            return dense_strides(tuple(weight_size), self.channels_last)
        c_in, c_out, *kernel = weight_size
        in_memory = (c_out, c_in, *kernel)
        return flipped(in_memory, dense_strides(in_memory, self.channels_last))[0]


@dataclass(frozen=True)
class Schedule:
    """The launches of one call, in order, and the scratch memory they share (bytes by name).

    Tensors named in ``aligned`` must start at a multiple of 16 bytes, as those of tensor maps must
    anyway: others are copied before the launch. ``sums_bias``: a gradient by weight that brings the
    one by bias along. ``on_weights``: what runs instead where the weight has one of these layouts,
    the first that it has; where that is flipped, on the weight that the view is of.
    """

    launches: tuple[Launch, ...]
    workspaces: Mapping[str, int] = field(default_factory=dict)
    aligned: tuple[str, ...] = ()
    sums_bias: bool = False
    on_weights: Mapping[WeightLayout, Schedule] = field(default_factory=dict)

    def layout_of(
        self, weight_size: Sequence[int], weight_strides: Sequence[int]
    ) -> WeightLayout | None:
        """Which of ``on_weights`` a weight of these strides (in elements) has, if any."""
        for layout in self.on_weights:
            strides = layout.strides(weight_size)
            if all(
                n == 1 or a == b
                for n, a, b in zip(weight_size, weight_strides, strides, strict=True)
            ):
                return layout
        return None


class Plan(Protocol):
    """A kernel choice for a problem and its extents. It remembers the GPU that it was made for."""

    @property
    def problem(self) -> Problem: ...

    def schedule(self, batch: int, input_size: Sequence[int]) -> Schedule:
        """Launches for a batch and the spatial size (D, H, W) of the layer's input.

        Those are what the plan was made for, or others that the kernel takes too.

        Raises:
            ValueError: the kernel cannot take them.
        """
        ...

    def describe(self) -> dict[str, str]:
        """Human-readable facts: kernel, tile, fragments, shared memory."""
        ...


def not_taken(plan: Plan, input_size: Sequence[int]) -> ValueError:
    """What :meth:`Plan.schedule` raises for extents that the kernel cannot take."""
    return ValueError(f"{type(plan).__name__} does not take {tuple(input_size)}")


def macros(prefix: str, **values: object) -> tuple[tuple[str, str], ...]:
    """Keyword arguments as preprocessor macros; booleans become 0 and 1."""
    return tuple(
        (f"{prefix}{name.upper()}", str(int(v) if isinstance(v, bool) else v))
        for name, v in values.items()
    )


def problem_macros(problem: Problem) -> tuple[tuple[str, str], ...]:
    """The operation, layouts and channels, as most kernels spell them."""
    p = problem
    operation: dict[str, object] = {"forward": p.forward, "bias": p.bias}
    return macros(
        "CONVT3D_",
        **({} if p.operation == "grad_weight" else operation),
        source_channels_last=p.source_channels_last,
        target_channels_last=p.target_channels_last,
        groups=p.geometry.groups,
        source_channels=p.source_channels,
        target_channels=p.target_channels,
    )


def geometry_macros(geometry: Geometry, order: Triple = (0, 1, 2)) -> tuple[tuple[str, str], ...]:
    """Kernel, stride, padding and dilation of the axes D, H, W as macros numbered 0, 1, 2.

    ``order``: which axis has which number.
    """
    g = geometry
    values: dict[str, object] = {}
    for i, axis in enumerate(order):
        values[f"kernel{i}"] = g.kernel_size[axis]
        values[f"stride{i}"] = g.stride[axis]
        values[f"padding{i}"] = g.padding[axis]
        values[f"dilation{i}"] = g.dilation[axis]
    return macros("CONVT3D_", **values)


def widest_vector(channels: int, element_bytes: int) -> int:
    """Elements of the widest copy of 16, 8 or 4 bytes that divides channels; 1 if none does."""
    widths = (16 // element_bytes, 8 // element_bytes, 4 // element_bytes)
    return next((n for n in widths if channels % n == 0), 1)


def div_up(a: int, b: int) -> int:
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    return div_up(a, b) * b
