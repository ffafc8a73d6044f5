"""The tensor maps of a patch kernel: of weights, cells and outputs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from convt3d.cuda.plan.patch.layout import PatchLayout, weight_box
from convt3d.cuda.schedule import TensorMap


def weight_map(plan: PatchLayout) -> TensorMap:
    """Boxes of 128 bytes of k by the columns of a product, of the weight in its usual order.

    Forward, k is the other dimension: 128 bytes of columns by a chunk of channels. The kernel
    leaves the map alone where the weight's strides are others.
    """
    p = plan.problem
    element = p.map_element
    if p.forward:
        extents = (plan.columns, p.source_channels, p.geometry.groups)
        row = plan.weight_box_row
        return TensorMap.dense(
            "weight", element, extents, (row // p.element_bytes, plan.chunk_lines, 1), row
        )
    depth = p.source_channels * math.prod(p.geometry.stride)
    box = (128 // p.element_bytes, plan.tile.columns)
    return TensorMap.dense("weight", element, (depth, p.geometry.in_channels), box, 128)


def source_map(plan: PatchLayout, batch: int, input_size: Sequence[int]) -> TensorMap:
    """Boxes of 128 bytes of cells, of channels_last sources of 128 bytes of channels."""
    extents, box, steps = (_cells if plan.channel_lines else _gradient)(plan, batch, input_size)
    element = plan.problem.map_element
    return TensorMap.dense("source", element, extents, box, 128, steps)


_Map = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Extents, box, and element strides if there are some."""


def _cells(plan: PatchLayout, batch: int, input_size: Sequence[int]) -> _Map:
    """Of lines that are channels."""
    p, cells, lines = plan.problem, plan.block_cells, plan.chunk_lines
    d, h, w = input_size
    channels, groups, row = p.source_channels, p.geometry.groups, 128 // p.element_bytes
    if plan.tile.staged and p.source_channels_last:
        across = plan.box_width(input_size)
        return (channels * groups, w, h, d, batch), (lines, across, cells // across, 1, 1), ()
    if plan.tile.staged:
        across = min(plan.box_width(input_size), row)
        return (w, h, d, channels * groups, batch), (across, row // across, 1, lines, 1), ()
    if p.source_channels_last:
        return (channels, groups, d * h * w, batch), (lines, 1, cells, 1), ()
    return (d * h * w, channels, groups, batch), (row, lines, 1, 1), ()


def _gradient(plan: PatchLayout, batch: int, input_size: Sequence[int]) -> _Map:
    """Parts of rows of the output gradient."""
    p, row = plan.problem, 128 // plan.problem.element_bytes
    d, h, w = p.geometry.output_size(input_size)
    if p.source_channels_last:
        # Rows of H at the distance of a stride, of cells that are their slots and channels.
        _, stride1, stride2 = p.geometry.stride
        across = plan.box_width(input_size)
        extents = (stride2 * p.source_channels, input_size[2], h, d, batch)
        rows = plan.block_cells // across * stride1
        return extents, (row, across, rows, 1, 1), (1, 1, stride1, 1, 1)
    if plan.tile.fold:
        h, w = 1, h * w
    box = weight_box(p, plan.tile.fold > 0)
    assert box is not None
    return (w, h, d, p.geometry.out_channels, batch), (row, *box, 1), ()


def target_map(plan: PatchLayout, batch: int, input_size: Sequence[int]) -> TensorMap:
    """Boxes of the outputs of a consumer's cells, of some channels."""
    p, staged = plan.problem, plan.tile.staged
    stride0, stride1, stride2 = p.geometry.stride
    width = plan.box_width(input_size)
    rows = plan.block_cells // width
    extents: tuple[int, ...]
    box: tuple[int, ...]
    swizzle = 0
    if not p.forward:
        d, h, w = input_size
        extents, box = (p.geometry.in_channels, w, h, d, batch), (staged, width, rows, 1, 1)
        swizzle = 128
    else:
        d, h, w = p.geometry.output_size(input_size)
        rows, elements = rows * stride1, plan.row_elements
        slots = staged // (stride1 * elements)  # of D, where channels are last
        if not p.target_channels_last:
            extents = (w, h, d, p.geometry.out_channels, batch)
            box = (width * stride2, rows, stride0, staged // math.prod(p.geometry.stride), 1)
        elif elements * p.element_bytes % 16 == 0:
            extents = (elements, input_size[2], h, d, batch)
            box = (elements, width, rows, slots, 1)
        else:
            extents = (elements * input_size[2], h, d, batch, 1)
            box = (elements * width, rows, slots, 1, 1)
    element = "float32" if p.element_bytes == 4 else p.map_element
    return TensorMap.dense("target", element, extents, box, swizzle)
