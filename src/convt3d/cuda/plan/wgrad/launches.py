"""Launches of ``wgrad/kernel.cu``: macros, tensor maps and arguments."""

from __future__ import annotations

import math

import numpy as np

from convt3d.cuda.compiler import KernelSpec
from convt3d.cuda.plan.launches import weight_strides
from convt3d.cuda.plan.wgrad.call import Fill
from convt3d.cuda.plan.wgrad.sums import Work
from convt3d.cuda.schedule import (
    Launch,
    Schedule,
    TensorMap,
    div_up,
    macros,
)
from convt3d.geometry import Triple

_FILE = "wgrad/kernel.cu"
_THREADS = 256  # of the second pass
_ITEM_TAPS = 8  # that a thread of it adds up, at most

_Dims = tuple[tuple[int, int], ...]  # extents and strides, in elements, innermost first


def schedule(work: Work) -> Schedule:
    """A product, and where sums are split or the bias is wanted the pass that adds them up."""
    k, layout, tile = work.kernel, work.layout, work.tile
    bias, direct = layout.sums_bias, work.direct
    weight = weight_strides(k.order)
    sums = ("sums",) if bias else ()
    put_down = direct or k.phases
    product = Launch(
        KernelSpec(_FILE, "convt3d_wgrad", _macros(work, direct=direct, skips=work.skips)),
        work.ctas,
        128 * (1 + k.consumers),
        max(tile.shared_bytes, k.sum_bytes if put_down else 0),
        (
            *("source", "target", "weight" if direct else "partial", "weight", *sums),
            *_maps(work),
            *_numbers(work),
            *weight,
        ),
    )
    runs = layout.fill.as_it_lies or layout.fill is Fill.VOLUME
    aligned = ("target",) if runs else ()
    if direct and not bias:
        return Schedule((product,), {}, aligned)
    bits = _share_bits(max(work.splits))
    taps = min(math.prod(k.taps), _ITEM_TAPS)
    items = k.channel_tile_m * div_up(math.prod(k.taps), taps) * (k.columns // 4)
    blocks = 0 if direct else k.tiles * div_up(items, _THREADS >> bits)
    channels = div_up(k.problem.geometry.out_channels, _THREADS // 32) if bias else 0
    reduce = Launch(
        KernelSpec(_FILE, "convt3d_reduce", _macros(work, direct=direct)),
        blocks + channels,
        _THREADS,
        4 * _THREADS * 4 * (taps | 1),
        (
            *("weight" if direct else "partial", "weight"),
            *(("sums", "bias") if bias else ()),
            *map(np.int32, (bits, *work.splits)),
            *weight,
        ),
        dependent=True,
    )
    workspaces = {} if direct else {"partial": 4 * work.ctas * k.cta_elements}
    if bias:
        workspaces["sums"] = 4 * work.ctas * k.cta_blocks * 64
    return Schedule((product, reduce), workspaces, aligned, bias)


def _share_bits(splits: int) -> int:
    """The logarithm of how many threads add up the splits of the same elements, two each or so."""
    return next(n for n in range(6) if splits <= 2 << n or n == 5)


def _macros(work: Work, *, direct: bool, skips: bool = False) -> tuple[tuple[str, str], ...]:
    k, layout = work.kernel, work.layout
    call, p = layout.call, k.problem
    values: dict[str, object] = {
        "groups": p.geometry.groups,
        "source_channels": p.source_channels,
        "target_channels": p.target_channels,
        "column_taps": k.taps_across,
        "channel_tile_n": k.channel_tile_n,
        "channel_tile_m": k.channel_tile_m,
        "blocks": k.blocks,
        "consumers": k.consumers,
        "cluster": k.cluster,
        "stages": k.stages,
        "ieee": k.ieee,
        "warp_products": k.warp_products,
        "phase_rows": k.phases,
        "source_map": call.source_map,
        "target_fill": int(layout.fill),
        "target_clear": layout.clears,
        "whole_rows": k.whole_rows,
        "fragments": k.fragments,
        "direct_store": direct,
        "slices": call.size[0] if skips else 0,
        "slice_products": call.size[1] * call.size[2] // k.depth if skips else 1,
        "outputs0": call.output[0] if skips else 0,
        "sum_bias": layout.sums_bias,
        "octet_step": layout.octet_step,
        "channel_step": layout.channel_step,
    }
    for axis in range(3):
        values[f"kernel{axis}"] = k.kernel_size[axis]
        values[f"stride{axis}"] = k.stride[axis]
        values[f"padding{axis}"] = k.padding[axis]
        values[f"dilation{axis}"] = k.dilation[axis]
    return p.type_macros + macros("CONVT3D_", **values)


def _numbers(work: Work) -> map[np.int32]:
    call, tile = work.layout.call, work.tile
    return map(
        np.int32,
        (
            *call.size,
            *call.source_strides,
            *call.output,
            *call.target_strides,
            *tile.positions,
            *work.across,
            work.down,
            call.rows[0],
            tile.planes,
            tile.plane.row_pitch,
            tile.plane.channel_pitch,
            work.batch,
            *work.splits,
        ),
    )


# ---------------------------------------------------------------- tensor maps


def _maps(work: Work) -> tuple[TensorMap, ...]:
    source = (_source_map(work),) if work.layout.call.source_map else ()
    return (*source, _target_map(work)) if work.layout.fill.mapped else source


def _source_map(work: Work) -> TensorMap:
    """x as boxes of 128 bytes of W (or of a slice), channels and rows."""
    k, call, positions = work.kernel, work.layout.call, work.tile.positions
    dims = _dims(k.problem.geometry.in_channels, call.size, call.source_strides)
    box: tuple[int, ...] = (positions[1] + k.taps_across - 1, 1)
    if call.flat(positions):
        dims, box = ((math.prod(call.size[1:]), 1), dims[1], dims[3]), (1,)
        if positions[1] == call.size[1]:
            dims, box = ((math.prod(call.size), 1), dims[1]), ()
    return _map(work, "source", dims, (k.chunk, k.channel_tile_n, *box), 128)


def _target_map(work: Work) -> TensorMap:
    """The gradient as boxes of rows, channels and W, or of its volume and channels."""
    k, call, fill, tile = work.kernel, work.layout.call, work.layout.fill, work.tile
    width = tile.plane.channel_pitch
    dims = _dims(k.problem.geometry.out_channels, call.output, call.target_strides)
    box: tuple[int, ...] = (k.rows_of(tile.positions[1]), 1)
    if fill is Fill.FLAT:
        dims, box = ((math.prod(call.output), 1), dims[1]), ()
    elif fill is Fill.LINES:
        lines = call.target_strides[0] // width
        dims = ((width, 1), dims[1], (lines, width), dims[3])
        box = (math.prod(tile.positions[1:]) // k.depth, 1)
    swizzle = 128 if fill.swizzled else 0
    return _map(work, "target", dims, (width, k.channel_tile_m, *box), swizzle)


def _dims(channels: int, size: Triple, strides: tuple[int, int]) -> _Dims:
    """W, channels, rows and slices of a sample."""
    (a, b, c), (stride0, stride1) = size, strides
    return ((c, 1), (channels, a * b * c), (b, stride1), (a, stride0))


def _map(work: Work, tensor: str, dims: _Dims, box: tuple[int, ...], swizzle: int) -> TensorMap:
    """A tensor map of all samples, whose second dimension is channels."""
    problem = work.kernel.problem
    # Sums take the gradient as it is; fragments round it.
    exact = problem.element_bytes == 4 and tensor == "target" and work.layout.sums_bias
    element = "float32" if exact else problem.map_element
    extents, strides = zip(*dims, (work.batch, math.prod(dims[1])), strict=True)
    bytes_ = tuple(n * problem.element_bytes for n in strides[1:])
    return TensorMap(tensor, element, extents, bytes_, (*box, 1), swizzle)
