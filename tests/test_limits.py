"""Operations, bytes and limits of the named shapes, against figures recorded on an H200."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given

from convt3d.bench import shapes
from convt3d.bench.cases import MODES
from convt3d.bench.limits import COPY, MATRIX, Ceilings, Limit
from convt3d.bench.shapes import Shape
from convt3d.bench.timing import Timing
from support.geometries import Case, cases

# Measured with torch 2.11+cu130: matrix rates in TFLOP/s, copy rate in TB/s.
RATES = {"tf32": 356.51, "bf16": 789.17, "fp32": 50.9}
COPY_RATE = 4.3
# Per shape: operations in GFLOP; bytes in MB and limit in ms for tf32 and bf16.
RECORDED = {
    "kb58": (56.4, 113.6, 0.1581, 56.8, 0.0714),
    "kb61": (260.9, 844.2, 0.7319, 422.1, 0.3306),
    "kb68": (1288.5, 1786.9, 3.6142, 893.5, 1.6327),
    "kb70": (440.3, 2081.8, 1.235, 1040.9, 0.5579),
    "kb72": (5.5, 127.4, 0.0296, 63.7, 0.0148),
    "kb73": (55.9, 1178.8, 0.2743, 589.4, 0.1372),
    "kb73_g4": (14.0, 1178.8, 0.2743, 589.4, 0.1372),
    "kb77": (26.6, 604.6, 0.1407, 302.3, 0.0704),
    "nnunet_320_320": (1.7, 11.8, 0.0047, 5.9, 0.0021),
    "nnunet_256_128": (4.3, 41.9, 0.012, 21.0, 0.0054),
    "nnunet_128_64": (8.6, 167.8, 0.039, 83.9, 0.0195),
    "nnunet_64_32": (17.2, 671.1, 0.1562, 335.5, 0.0781),
    "monai_64_32_k3": (24.0, 283.1, 0.0672, 141.6, 0.0329),
    "gan_512_256_k4": (46.0, 41.9, 0.1291, 21.0, 0.0583),
    "gan_128_64_k4": (249.9, 671.1, 0.701, 335.5, 0.3167),
    "pangu_384_5": (56.0, 992.5, 0.231, 496.3, 0.1155),
    "dw_64_k4": (4.2, 1208.0, 0.2811, 604.0, 0.1405),
}


def test_all_named_shapes_are_recorded() -> None:
    assert set(shapes.named()) == set(RECORDED)


@pytest.mark.parametrize("name", RECORDED)
def test_named_shapes_have_the_recorded_limits(name: str) -> None:
    shape = shapes.named()[name]
    gflop, mbytes, limit_ms, mbytes_16, limit_16_ms = RECORDED[name]
    full = Limit.of(shape, 4, RATES["tf32"], COPY_RATE)
    half = Limit.of(shape, 2, RATES["bf16"], COPY_RATE)
    assert full.gflop == pytest.approx(gflop, abs=0.051)
    assert full.mbytes == pytest.approx(mbytes, abs=0.051)
    assert half.mbytes == pytest.approx(mbytes_16, abs=0.051)
    assert full.ms == pytest.approx(limit_ms, rel=2e-3, abs=6e-5)
    assert half.ms == pytest.approx(limit_16_ms, rel=2e-3, abs=6e-5)


def test_bound_names_the_larger_part() -> None:
    shape = shapes.named()["kb61"]
    assert Limit.of(shape, 4, RATES["tf32"], COPY_RATE).bound == "math"
    assert Limit.of(shape, 4, 1e6, COPY_RATE).bound == "memory"
    assert Limit.of(shape, 4, RATES["fp32"], COPY_RATE).ms == pytest.approx(5.1259, rel=1e-3)


@given(cases())
def test_operations_count_every_product_that_reaches_the_output(case: Case) -> None:
    g = case.geometry
    shape = Shape("any", case.batch, case.input_size, False, g)
    output = g.output_size(case.input_size)
    pairs = 1
    for axis in range(3):
        reached = [
            i * g.stride[axis] - g.padding[axis] + k * g.dilation[axis]
            for i, k in itertools.product(range(case.input_size[axis]), range(g.kernel_size[axis]))
        ]
        pairs *= sum(0 <= o < output[axis] for o in reached)
    assert shape.operations == 2 * case.batch * pairs * g.in_channels * g.out_channels_per_group


@pytest.mark.parametrize(
    "text",
    [
        "n=2,in=3,out=4,size=5x6x7,k=3,p=1,conv=1",
        "n=1,in=4,out=6,size=7x8x9,k=3x2x5,s=2x3x1,p=1x0x2,d=1x2x1,g=2,conv=1",
        "n=1,in=2,out=2,size=8,k=4,s=4,p=2,conv=1",
    ],
)
def test_operations_of_a_conv3d_are_the_products_with_elements_of_its_input(text: str) -> None:
    """A Conv3d of ones counts them, once for each output channel and channel of its group."""
    shape = shapes.parse(text)
    g = shape.geometry
    x, w = torch.ones(shape.x_size), torch.ones(g.weight_size)
    products = torch.conv3d(x, w, None, g.stride, g.padding, g.dilation, g.groups).sum()
    assert shape.operations == 2 * int(products)


def test_ceilings_turn_times_into_rates() -> None:
    mode = MODES["fp32"]
    ceilings = Ceilings(mode, torch.device("cpu"))
    for call in ceilings.calls.values():
        call()
    times = {MATRIX: Timing(10.0, 10.0, 10.0, 3), COPY: Timing(20.0, 20.0, 20.0, 3)}
    limit = ceilings.limit(shapes.named()["kb61"], mode, times)
    assert limit.matrix_tflops == pytest.approx(ceilings.operations / 0.010 / 1e12)
    assert limit.copy_tbytes == pytest.approx(ceilings.bytes / 0.020 / 1e12)
