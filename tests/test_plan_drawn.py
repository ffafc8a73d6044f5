"""Random layers of the sizes that networks have: plans launch on weights of either memory format.

Smaller ones, whose numbers are checked, are ``support.geometries.cases``.
"""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from convt3d.bench.shapes import Shape
from convt3d.cuda.operation import Operation
from convt3d.cuda.plan import problem_for
from convt3d.cuda.schedule import OPERATIONS, Gpu
from convt3d.geometry import Geometry
from convt3d.precision import Arithmetic

_LAYERS = 12  # of a seed
_MOST_ELEMENTS = 4e8
_CHANNELS = (
    1, 2, 3, 5, 8, 12, 16, 20, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 256, 320, 512,
)  # fmt: skip
_EXTENTS = (1, 2, 3, 5, 7, 8, 10, 12, 16, 20, 24, 28, 32, 48, 64, 96)
_MODES = (
    (torch.bfloat16, None),
    (torch.float16, None),
    (torch.float32, None),
    (torch.float32, Arithmetic.IEEE),
)


def _drawn(r: random.Random) -> Shape | None:
    """A layer and its input; None where PyTorch would refuse the draw, or it is too large."""
    many, few, groups = r.choice(_CHANNELS), r.choice(_CHANNELS), 1
    if r.random() < 0.25:
        groups = r.choice((2, 3, 4, many))
        many, few = (max(1, n // groups) * groups for n in (many, few))
    kernel, stride = r.choice((1, 2, 3, 3, 3, 4, 5)), r.choice((1, 1, 2, 3))
    dilation = r.choice((1, 1, 1, 2))
    kernels = tuple(kernel if r.random() < 0.7 else r.choice((1, 3, 7)) for _ in range(3))
    strides = tuple(stride if r.random() < 0.85 else r.choice((1, 2)) for _ in range(3))
    paddings = tuple(r.randint(0, (k - 1) * dilation // 2 + 1) for k in kernels)
    transposed = r.random() < 0.5
    extra = tuple(r.randint(0, max(s, dilation) - 1) if transposed else 0 for s in strides)
    size = (r.choice(_EXTENTS), r.choice(_EXTENTS), r.choice(_EXTENTS))
    try:
        geometry = Geometry(
            many, few, kernels, strides, paddings, extra, (dilation,) * 3, groups,
            transposed=transposed,
        )  # fmt: skip
        shape = Shape(geometry.label, r.choice((1, 2, 4, 16)), size, False, geometry)
        elements = (math.prod(shape.x_size), math.prod(shape.y_size))
    except ValueError:
        return None
    fits = min(shape.x_size) > 0 and min(shape.y_size) > 0 and max(elements) <= _MOST_ELEMENTS
    return shape if fits else None


@pytest.mark.sample(every=8)
@pytest.mark.parametrize("seed", range(8))
def test_plans_of_drawn_layers_can_be_launched(seed: int) -> None:
    r, gpu = random.Random(seed), Gpu()
    drawn = (_drawn(r) for _ in range(1000))
    layers = itertools.islice((shape for shape in drawn if shape is not None), _LAYERS)
    for shape in layers:
        for name in OPERATIONS:
            one, operation = shape.as_transposed(name)
            dtype, arithmetic = r.choice(_MODES)
            last = r.random() < 0.5
            problem = problem_for(operation, one.geometry, dtype, last, arithmetic=arithmetic)
            for layout in (torch.contiguous_format, torch.channels_last_3d):
                weight = torch.empty(one.geometry.weight_size, dtype=dtype, device="meta")
                weight = weight.to(memory_format=layout)
                asked = Operation.of(problem, one.batch, one.input_size, weight)
                for launch in asked.launches(gpu):
                    assert launch.shared_bytes <= gpu.shared_per_block
