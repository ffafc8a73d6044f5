"""Launches that several families put together in the same way, and their arguments."""

from __future__ import annotations

from collections.abc import Sequence

from convt3d.cuda.compiler import KernelSpec, name_of
from convt3d.cuda.schedule import WEIGHT_STRIDES, Launch, Schedule
from convt3d.geometry import Triple


def packed_first(
    product: Launch,
    blocks: int,
    packed_bytes: int,
    *,
    shared_bytes: int = 0,
    order: Triple = (0, 1, 2),
    aligned: tuple[str, ...] = (),
) -> Schedule:
    """A product whose weights ``pack.cu`` of its folder packs before, with the same macros.

    Args:
        product: the launch of the product; the packed weight is its argument "packed".
        blocks: CTAs that pack, of 256 threads.
        packed_bytes: of the packed weight.
        shared_bytes: of a CTA that packs.
        order: which axis of the weight the kernels number 0, 1 and 2.
        aligned: see Schedule.
    """
    file = f"{product.kernel.file.rpartition('/')[0]}/pack.cu"
    pack = Launch(
        KernelSpec(file, f"convt3d_{name_of(file)}", product.kernel.macros),
        blocks,
        256,
        shared_bytes,
        ("weight", "packed", *weight_strides(order)),
    )
    return Schedule((pack, product), {"packed": packed_bytes}, aligned)


def weight_strides(order: Triple) -> tuple[str, ...]:
    """The weight's strides, those of its axes in the order of a kernel's axes 0, 1 and 2."""
    return (*WEIGHT_STRIDES[:2], *(WEIGHT_STRIDES[2 + axis] for axis in order))


def with_strides(size: Sequence[int], order: Triple = (0, 1, 2)) -> tuple[int, ...]:
    """Extents along a kernel's axes, then elements from a position to the next along 0 and 1.

    Args:
        size: extents along D, H and W.
        order: which of these the kernel numbers 0, 1 and 2.
    """
    strides = (size[1] * size[2], size[2], 1)
    return (*(size[axis] for axis in order), strides[order[0]], strides[order[1]])
