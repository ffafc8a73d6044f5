"""Every kernel on the emulated GPU, through the package's own plans and argument packing.

Extents are small, with tiles cut by every border; outputs and workspaces start as NaN; results are
held, element by element, to what the arithmetic can lose against the float64 reference.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from convt3d import reference
from convt3d.cuda.compiler import kernel_files
from convt3d.cuda.plan import ampere_patch, ampere_strided, ranked_plans, sweep
from convt3d.cuda.schedule import Gpu, Problem
from convt3d.export.pinned import pin
from convt3d.geometry import Geometry, Triple
from convt3d.operations import OPERATIONS
from convt3d.precision import Arithmetic
from emulator import build
from emulator.gpu import EmulatedGpu, backend
from emulator.harness import Flavour
from support import tf32

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))

DTYPES = {
    Arithmetic.TF32: torch.float32,
    Arithmetic.IEEE: torch.float32,
    Arithmetic.F16: torch.float16,
    Arithmetic.BF16: torch.bfloat16,
}
#: What one product may lose, in units of the sum of |products| of an element: both operands'
#: rounding, float32 sums, and the rounding of the result.
LOSS = {
    Arithmetic.TF32: 2.0**-10,
    Arithmetic.IEEE: 2.0**-20,
    Arithmetic.F16: 2.0**-10,
    Arithmetic.BF16: 2.0**-7,
}


def layer(
    channels: tuple[int, int],
    kernel: int | Triple,
    stride: int | Triple = 1,
    padding: int | Triple = 0,
    output_padding: int | Triple = 0,
    dilation: int | Triple = 1,
    groups: int = 1,
) -> Geometry:
    def triple(value: int | Triple) -> Triple:
        return (value, value, value) if isinstance(value, int) else value

    return Geometry(
        *channels,
        *(triple(v) for v in (kernel, stride, padding, output_padding, dilation)),
        groups,
    )


#: Layer and input size (D, H, W).
LAYERS: dict[str, tuple[Geometry, Triple]] = {
    "k3": (layer((10, 12), 3), (5, 6, 7)),
    "k3 p1, rows of 8": (layer((8, 8), 3, padding=1), (3, 5, 8)),
    "k5x3x2, many channels": (layer((40, 21), (5, 3, 2), padding=(2, 0, 1)), (3, 4, 5)),
    "k3 p1, 32 channels": (layer((32, 40), 3, padding=1), (2, 3, 16)),
    "k3 s2 in groups": (layer((16, 16), 3, 2, 1, 1, groups=2), (4, 5, 8)),
    "k3 s2, rows of 69": (layer((16, 12), 3, 2, 1), (2, 3, 35)),
    "k2 s2, one tap": (layer((16, 8), 2, 2), (4, 5, 6)),
    "k124 s124, one tap": (layer((9, 3), (1, 2, 4), (1, 2, 4)), (3, 4, 8)),
    "everything odd": (layer((9, 5), (3, 2, 5), (2, 1, 3), (1, 0, 2), 0, (2, 1, 2)), (4, 5, 6)),
    "phases without taps": (layer((8, 6), 3, 2, 1, 0, 2), (4, 4, 5)),
    "depthwise k4 s2": (layer((6, 6), 4, 2, 1, groups=6), (4, 5, 6)),
    "depthwise k3, rows of 8": (layer((3, 3), 3, padding=1, groups=3), (5, 4, 8)),
    "one channel k13": (layer((1, 1), 13, 2, 6), (3, 2, 3)),
    "one channel": (layer((1, 2), 3, padding=1), (3, 4, 9)),
}


BATCH = 2


@dataclass(frozen=True)
class Case:
    """One call of the backend."""

    layer: str
    operation: str
    arithmetic: Arithmetic
    source_last: bool = False
    target_last: bool = False
    bias: bool = True
    unaligned: bool = False  # inputs that start one element past an aligned address
    batch: int = BATCH
    weight_last: bool = False  # as PyTorch's rule needs it, or more

    @property
    def name(self) -> str:
        layout = "".join("cn"[last] for last in (not self.source_last, not self.target_last))
        parts = [self.layer, self.operation, self.arithmetic.value, layout]
        if self.unaligned:
            parts.append("unaligned")
        return "-".join(parts)

    @property
    def problem(self) -> Problem:
        geometry, _ = LAYERS[self.layer]
        bias = self.bias and self.operation == "forward"
        return Problem(
            self.operation, geometry, self.arithmetic, self.source_last, self.target_last, bias
        )


def cases() -> list[Case]:
    found = []
    for name, operation in itertools.product(LAYERS, OPERATIONS):
        for arithmetic, last in itertools.product((Arithmetic.TF32, Arithmetic.F16), (False, True)):
            found.append(Case(name, operation, arithmetic, last, last))
        last = len(found) % 8 == 0  # the others, which share their code, in either layout
        found.append(Case(name, operation, Arithmetic.IEEE, last, last))
        found.append(Case(name, operation, Arithmetic.BF16, not last, not last))
    for operation, arithmetic, name in itertools.product(
        OPERATIONS, (Arithmetic.TF32, Arithmetic.F16), MIXED
    ):
        # Forward from channels_last to contiguous is no call that PyTorch's rule makes.
        found.append(Case(name, operation, arithmetic, False, True, bias=False))
        if operation != "forward":
            found.append(Case(name, operation, arithmetic, True, False))
    for operation in OPERATIONS:
        for arithmetic in (Arithmetic.TF32, Arithmetic.BF16):
            for last in (False, True):
                found.append(
                    Case("k3 p1, rows of 8", operation, arithmetic, last, last, unaligned=True)
                )
    return found


MIXED = ("k3", "k3 s2 in groups", "k2 s2, one tap", "everything odd")


def sampled(cases: Sequence[Any], every: int) -> list[Any]:
    """Every so many of these run each time, the others with the mark `more`.

    `every` shares no factor with the length of what the cases repeat in, so that each layer and
    operation, each arithmetic and each layout is among those that always run.
    """
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[pytest.mark.more] if i % every else [],
        )
        for i, case in enumerate(cases)
    ]


CASES = cases()


def _layout(tensor: torch.Tensor, last: bool, unaligned: bool) -> torch.Tensor:
    memory_format = torch.channels_last_3d if last else torch.contiguous_format
    tensor = tensor.contiguous(memory_format=memory_format)
    if not unaligned:
        return tensor
    storage = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    return storage.as_strided(tensor.shape, tensor.stride(), 1).copy_(tensor)


def check(
    case: Case,
    plan: Callable[..., Any] | None = None,
    edit: Callable[[str, str], str] | None = None,
    most: float = 1.0,
    ties: str = "",
    **options: Any,
) -> EmulatedGpu:
    """Run a case and compare it with the reference. ``most``: of its relative Frobenius error.

    ``ties``: which of x, gy and w lie in the middle between two TF32 values. The result is that of
    the even ones; the other operands are TF32 values.
    """
    geometry, size = LAYERS[case.layer]
    dtype = DTYPES[case.arithmetic]
    generator = torch.Generator().manual_seed(20)

    def values(shape: Any, name: str) -> torch.Tensor:
        drawn = torch.randn(tuple(shape), generator=generator).to(dtype)
        if not ties:
            return drawn
        return tf32.ties(drawn) if name in ties.split() else tf32.exact(drawn)

    x = values((case.batch, geometry.in_channels, *size), "x")
    gy = values((case.batch, geometry.out_channels, *geometry.output_size(size)), "gy")
    w, b = values(geometry.weight_size, "w"), values((geometry.out_channels,), "b")
    if case.operation == "grad_input":
        gy = _layout(gy, case.source_last, case.unaligned)
    else:
        x = _layout(x, case.source_last, case.unaligned)
        gy = _layout(gy, case.target_last, case.unaligned)
    forward_last = case.operation == "forward" and case.target_last
    if case.weight_last or (forward_last and not case.source_last):
        w = w.contiguous(memory_format=torch.channels_last_3d)
    bias = b if case.problem.bias else None

    with EmulatedGpu([x, gy, w, b], plan, case.arithmetic, edit, options) as gpu:
        if case.operation == "forward":
            got = backend.forward(x, w, bias, geometry, case.target_last)
        elif case.operation == "grad_input":
            got = backend.grad_input(gy, w, geometry, size, case.target_last)
        else:
            got = backend.grad_weight(x, gy, geometry, case.target_last)

    def define(x: torch.Tensor, gy: torch.Tensor, w: torch.Tensor, bias: Any) -> torch.Tensor:
        if case.operation == "forward":
            return reference.forward(x, w, bias, geometry)
        if case.operation == "grad_input":
            return reference.grad_input(gy, w, geometry, size)
        return reference.grad_weight(x, gy, geometry)

    if ties:
        x, gy, w = (tf32.rounded(operand) for operand in (x, gy, w))
    wanted = define(x, gy, w, bias)
    magnitude = define(x.abs(), gy.abs(), w.abs(), bias if bias is None else bias.abs())
    assert got.dtype == dtype and got.shape == wanted.shape
    if case.operation != "grad_weight":
        assert got.is_contiguous(
            memory_format=torch.channels_last_3d if case.target_last else torch.contiguous_format
        )
    assert not torch.isnan(got).any(), "not everything was written"
    error = (got.double() - wanted).abs()
    loss = LOSS[Arithmetic.IEEE if ties else case.arithmetic]
    worst = float((error / (loss * magnitude).clamp_min(1e-30)).max())
    assert worst <= 1, f"an element is {worst:.3g} times further off than rounding explains"
    relative = float((got.double() - wanted).norm() / wanted.norm().clamp_min(1e-30))
    assert relative <= most
    return gpu


@pytest.mark.sample(every=5)
@pytest.mark.parametrize("case", sampled(CASES, 13), ids=lambda case: case.name)
def test_default_plan(case: Case) -> None:
    check(case)


SWEPT = ("k3", "k3 p1, rows of 8", "k5x3x2, many channels")
TIES = [
    Case(name, operation, Arithmetic.TF32, last, last)
    for name in (*SWEPT, "k3 s2, rows of 69")
    for operation in ("forward", "grad_input")
    for last in (False, True)
]


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("case", TIES, ids=lambda case: case.name)
def test_ties_of_weights_round_to_even(case: Case) -> None:
    check(case, ties="w")


# ---------------------------------------------------------------- the strided kernels


def strided(where: float, capability: tuple[int, int] = (9, 0)) -> Callable[..., Any]:
    """Picks a plan of the strided family, as `plan_at` does of all."""

    def pick(problem: Problem, batch: int, size: Triple, gpu: Gpu) -> Any:
        # Two multiprocessors: CTAs go on from tile to tile.
        small = replace(gpu, multiprocessors=2, capability=capability)
        plans = ampere_strided.ranked(problem, batch, size, small)
        return plans[int(where * (len(plans) - 1))][1]

    return pick


STRIDED = [
    (Case("k3 s2, rows of 69", "forward", Arithmetic.TF32), 0.0),
    (Case("k3 s2, rows of 69", "forward", Arithmetic.BF16), 0.4),
    (Case("k3 s2, rows of 69", "grad_input", Arithmetic.IEEE), 0.0),
    (Case("k3 s2 in groups", "forward", Arithmetic.IEEE), 0.0),
    (Case("k3 s2 in groups", "forward", Arithmetic.BF16), 0.2),
    (Case("k3 s2 in groups", "grad_input", Arithmetic.F16, True, True), 0.3),
    (Case("k3 s2 in groups", "forward", Arithmetic.TF32, True, True), 0.0),
    (Case("phases without taps", "forward", Arithmetic.TF32), 0.0),
    (Case("phases without taps", "forward", Arithmetic.F16, True, True), 0.5),
    (Case("phases without taps", "grad_input", Arithmetic.TF32), 0.0),
    (Case("everything odd", "forward", Arithmetic.TF32, unaligned=True), 0.7),
    (Case("everything odd", "grad_input", Arithmetic.BF16), 0.2),
]


@pytest.mark.sample
@pytest.mark.parametrize(
    "case, where", sampled(STRIDED, 5), ids=lambda v: getattr(v, "name", None) or v
)
def test_strided(case: Case, where: float) -> None:
    check(case, strided(where))


def test_strided_before_bulk_copies() -> None:
    check(Case("k3 s2, rows of 69", "forward", Arithmetic.BF16), strided(0.0, (8, 0)))


# ---------------------------------------------------------------- plans beside the default

VARIANTS = 2


def plan_at(where: float, file: str | None = None) -> Callable[..., Any]:
    """Picks a plan of a problem from the ranked list: 0 is the preferred one, 1 the last.

    ``file``: only plans that run this kernel file.
    """

    def runs(plan: Any, batch: int, size: Triple) -> bool:
        return any(item.kernel.file == file for item in plan.schedule(batch, size).launches)

    def pick(problem: Problem, batch: int, size: Triple, gpu: Gpu) -> Any:
        plans = ranked_plans(problem, batch, size, gpu)
        if file is not None:
            plans = [plan for plan in plans if runs(plan, batch, size)]
        return plans[min(int(where * len(plans)), len(plans) - 1)]

    return pick


def other_plans(case: Case) -> list[float]:
    """Where to look for a few plans other than the preferred one; the same in every run."""
    generator = random.Random(case.name)
    return sorted(round(generator.uniform(0.05, 1), 2) for _ in range(VARIANTS))


def variants() -> list[tuple[Case, float]]:
    picked = []
    for name in LAYERS:
        if name == "one channel k13":  # 2197 taps: its preferred plans are enough
            continue
        for operation in OPERATIONS:
            last = (len(picked) // VARIANTS) % 2 == 1
            arithmetic = list(DTYPES)[len(picked) // VARIANTS % len(DTYPES)]
            case = Case(name, operation, arithmetic, last, last)
            picked += [(case, where) for where in other_plans(case)]
    return picked


@pytest.mark.sample
@pytest.mark.parametrize(
    "case, where", sampled(variants(), 17), ids=lambda v: getattr(v, "name", None) or v
)
def test_other_plans(case: Case, where: float) -> None:
    check(case, plan_at(where))


# ---------------------------------------------------------------- kernel == stride

FLAT_LAYERS: dict[str, tuple[Geometry, Triple]] = {
    "k222": (layer((20, 12), 2, 2), (3, 4, 6)),
    "k222, odd rows": (layer((9, 5), 2, 2), (3, 5, 5)),
    "k244": (layer((24, 5), (2, 4, 4), (2, 4, 4)), (2, 3, 8)),
    "k333 in groups": (layer((16, 12), 3, 3, groups=2), (3, 3, 4)),
    "k221": (layer((16, 8), (2, 2, 1), (2, 2, 1)), (2, 3, 4)),
    "k118": (layer((8, 4), (1, 1, 8), (1, 1, 8)), (2, 3, 4)),
    "k111": (layer((16, 24), 1), (2, 3, 8)),
}
LAYERS |= FLAT_LAYERS
#: Warps, fragments, words of a chunk, stages, whether weights stay, splits.
FLAT_TILES = (
    ((1, 2), (2, 2), 16, 2, False, 3),
    ((2, 1), (4, 1), 32, 3, True, 1),
)


ONE_TAP = ("k111 odd", "k111 pairs", "k111 odd rows")
LAYERS["k111 odd"] = (layer((24, 40), 1), (3, 5, 7))
LAYERS["k111 pairs"] = (layer((40, 24), 1), (2, 7, 5))
LAYERS["k111 odd rows"] = (layer((24, 16), 1), (4, 6, 9))


def flat_tile(tile: Any) -> Callable[..., Any]:
    """A plan of ampere/patch with this tile, on a GPU so small that CTAs walk over many tiles."""
    (warps_m, warps_n), (fragments_m, groups), words, stages, keep, splits = tile
    small = dataclasses.replace(Gpu(), multiprocessors=3)

    def pick(problem: Problem, batch: int, size: Triple, gpu: Gpu) -> Any:
        assert ampere_patch.refusal(problem) is None
        fragments_n = groups * ampere_patch.interleave(problem)
        few = ampere_patch.Tile(warps_m, warps_n, fragments_m, fragments_n, 8, 2, False, 1)
        plan = ampere_patch.PatchPlan(problem, few, small)
        lines = ampere_patch.chunk_lines(plan, words)
        chunks = -(-plan.depth // plan.width // lines)
        fits = not problem.forward and (splits - 1) * -(-chunks // splits) < chunks
        few = dataclasses.replace(few, chunk_lines=lines, stages=stages, keep_weights=keep)
        return ampere_patch.PatchPlan(
            problem, dataclasses.replace(few, splits=splits if fits else 1), small
        )

    return pick


def flat_cases() -> list[tuple[Case, int]]:
    found = []
    for name, operation in itertools.product(FLAT_LAYERS, ("forward", "grad_input")):
        for last in (False, True):
            arithmetic = list(DTYPES)[(len(found) * 7 // 2 + last) % len(DTYPES)]
            found.append((Case(name, operation, arithmetic, last, last), len(found) % 2))
    # Volumes of an odd number of positions, of pairs, and whole vectors in rows that are none.
    for name, operation in itertools.product(ONE_TAP, ("forward", "grad_input")):
        for arithmetic in (Arithmetic.TF32, Arithmetic.BF16):
            found.append((Case(name, operation, arithmetic), len(found) // 2 % 2))
    for arithmetic in (Arithmetic.TF32, Arithmetic.F16):
        found.append((Case("k244", "grad_input", arithmetic, True, False), 0))
        found.append((Case("k222", "forward", arithmetic, unaligned=True), 1))
        found.append((Case("k222", "grad_input", arithmetic, unaligned=True), 0))
    return found


@pytest.mark.sample
@pytest.mark.parametrize(
    "case, tile", sampled(flat_cases(), 7), ids=lambda v: getattr(v, "name", None) or v
)
def test_kernel_equal_to_stride(case: Case, tile: int) -> None:
    gpu = check(case, flat_tile(FLAT_TILES[tile]))
    assert {spec.file for spec in gpu.launches} == {"ampere/patch/kernel.cu"}


LAYERS["k2 s2, output padding"] = (layer((16, 8), 2, 2, 0, 1), (3, 4, 5))


@pytest.mark.parametrize("arithmetic", [Arithmetic.TF32, Arithmetic.F16], ids=lambda a: a.value)
def test_kernel_equal_to_stride_with_output_padding(arithmetic: Arithmetic) -> None:
    gpu = check(Case("k2 s2, output padding", "forward", arithmetic))
    assert {spec.file for spec in gpu.launches} == {
        "ampere/gather/pack.cu",
        "ampere/gather/kernel.cu",
    }


# ---------------------------------------------------------------- one family among several


def wgmma_at(
    where: float, multiprocessors: int = 3, kept: bool = False, ping_pong: bool = False
) -> Callable[..., Any]:
    """Picks a plan of the sweep, for so few CTAs that each walks several columns, and cuts them."""

    def pick(problem: Problem, batch: int, size: Triple, gpu: Gpu) -> Any:
        few = replace(Gpu(), multiprocessors=multiprocessors)
        plans = [plan for _, plan in sweep.ranked(problem, batch, size, few)]
        plans = [p for p in plans if (p.tile.keep_weights, p.tile.ping_pong) == (kept, ping_pong)]
        plan: Any = pin(plans[min(int(where * len(plans)), len(plans) - 1)], batch, size)
        return replace(plan, ctas_there=multiprocessors)

    return pick


LAYERS["k3 s2 in large groups"] = (layer((64, 64), 3, 2, 1, 1, groups=2), (2, 3, 4))
WGMMA = [
    (Case("k3", "forward", Arithmetic.TF32), 0.0),
    (Case("k3", "grad_input", Arithmetic.BF16, True, False), 0.3),
    (Case("k3 p1, rows of 8", "forward", Arithmetic.F16), 0.6),
    (Case("k3 p1, rows of 8", "forward", Arithmetic.BF16, unaligned=True), 0.1),
    (Case("k5x3x2, many channels", "forward", Arithmetic.TF32), 0.9),
    (Case("k5x3x2, many channels", "grad_input", Arithmetic.F16), 0.5),
    (Case("k3 s2 in large groups", "forward", Arithmetic.TF32), 0.2),
    (Case("k3 s2 in large groups", "grad_input", Arithmetic.TF32), 0.4),
    (Case("k3 s2 in large groups", "forward", Arithmetic.F16, True, True), 0.8),
    (Case("everything odd", "forward", Arithmetic.TF32), 0.7),
    (Case("everything odd", "grad_input", Arithmetic.BF16), 0.3),
    (Case("k2 s2, one tap", "grad_input", Arithmetic.F16), 0.0),
    (Case("k3", "forward", Arithmetic.IEEE), 0.0),
    (Case("k5x3x2, many channels", "forward", Arithmetic.IEEE, True, True), 0.4),
    (Case("k5x3x2, many channels", "grad_input", Arithmetic.IEEE), 0.7),
    (Case("k3 s2 in large groups", "forward", Arithmetic.IEEE), 0.1),
    (Case("k3 s2 in large groups", "grad_input", Arithmetic.IEEE), 0.5),
    (Case("everything odd", "grad_input", Arithmetic.IEEE), 0.9),
    (Case("k(2,2,11)", "forward", Arithmetic.IEEE), 0.0),
    (Case("k(2,2,11)", "grad_input", Arithmetic.IEEE), 0.6),
]


@pytest.mark.sample
@pytest.mark.parametrize(
    "case, where", sampled(WGMMA, 7), ids=lambda v: getattr(v, "name", None) or v
)
def test_warpgroup_products(case: Case, where: float) -> None:
    gpu = check(case, wgmma_at(where))
    assert [spec.file for spec in gpu.launches] == ["sweep/pack.cu", "sweep/kernel.cu"]


@pytest.mark.parametrize(
    "case, columns",
    [
        (Case("k5x3x2, many channels", "forward", Arithmetic.TF32, True, True), 3),
        (Case("everything odd", "forward", Arithmetic.IEEE), 2),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_ctas_of_a_sweep_have_whole_columns_or_cut_them(case: Case, columns: int) -> None:
    grids = []

    def pick(problem: Problem, batch: int, size: Triple, gpu: Gpu) -> Any:
        plan: Any = sweep.ranked(problem, batch, size, replace(Gpu(), multiprocessors=4))[0][1]
        if grids:
            plan = replace(pin(plan, batch, size), ctas_there=4)
        grids.append(plan.schedule(batch, size).launches[-1].grid)
        return plan

    check(case, pick)
    check(case, pick)
    assert grids == [columns, 4]


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("operation", ["forward", "grad_input"])
@pytest.mark.parametrize("name", SWEPT)
def test_ties_of_swept_boxes_round_to_even(name: str, operation: str) -> None:
    gpu = check(Case(name, operation, Arithmetic.TF32), wgmma_at(0.0), ties="w x gy")
    assert gpu.launches[-1].file == "sweep/kernel.cu"


# Sums of many products in float32, and their errors where three products of eight words each are
# added by themselves: twice PyTorch's and more. Padding leaves only outputs that all taps reach.
LAYERS["k5, 8000 products"] = (layer((64, 8), 5, 1, 4), (6, 5, 6))  # 6.3e-7
LAYERS["k(5,5,1), 128 channels"] = (
    layer((128, 8), (5, 5, 1), 1, (4, 4, 0)),
    (8, 6, 5),
)  # 3.6e-7 to 3.9e-7
LAYERS["k(2,2,11)"] = (layer((24, 8), (2, 2, 11), 1, 0, 0, (1, 1, 2)), (3, 4, 5))  # two chains


@pytest.mark.sample
@pytest.mark.parametrize(
    "name, where, most",
    [
        ("k5, 8000 products", 0.0, 3.2e-7),
        pytest.param("k5, 8000 products", 0.65, 3.2e-7, marks=pytest.mark.more),
        # A sweep along D of one plane a step.
        pytest.param("k5, 8000 products", 0.6, 3.6e-7, marks=pytest.mark.more),
        ("k(5,5,1), 128 channels", 0.0, 2.8e-7),
        pytest.param("k(5,5,1), 128 channels", 0.6, 2.8e-7, marks=pytest.mark.more),
    ],
)
def test_long_sums_of_warpgroup_products(name: str, where: float, most: float) -> None:
    gpu = check(Case(name, "forward", Arithmetic.IEEE, bias=False), wgmma_at(where), most=most)
    assert gpu.launches[1].file == "sweep/kernel.cu"


LAYERS["k(2,4,2) s2 d3, D of 1"] = (
    layer((16, 32), (2, 4, 2), 2, (1, 2, 0), (0, 1, 0), (3, 3, 1)),
    (1, 3, 8),
)  # the taps of D meet nothing but padding


@pytest.mark.sample(every=6)
@pytest.mark.parametrize("last", [False, True], ids=["ncdhw", "ndhwc"])
@pytest.mark.parametrize("arithmetic", [Arithmetic.TF32, Arithmetic.F16, Arithmetic.IEEE], ids=str)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_layers_without_a_product(operation: str, arithmetic: Arithmetic, last: bool) -> None:
    """The best plan of each family: outputs are the bias, gradients are zero."""
    case = Case("k(2,4,2) s2 d3, D of 1", operation, arithmetic, last, last)
    size = LAYERS[case.layer][1]
    plans = {type(plan): plan for plan in reversed(ranked_plans(case.problem, BATCH, size, Gpu()))}
    for plan in plans.values():
        check(case, lambda *_, plan=plan: plan)  # type: ignore[misc]


def test_long_sums_of_gather() -> None:
    case = Case("k5, 8000 products", "forward", Arithmetic.IEEE, bias=False)
    check(case, plan_at(0.0, "ampere/gather/kernel.cu"), most=3.2e-7)


# Dilated taps of the axis that is marched along: interleaved volumes, the last of fewer planes.
LAYERS["k3 d2"] = (layer((10, 12), 3, 1, 2, 0, 2), (5, 4, 7))
LAYERS["k(3,1,2) d(3,1,2)"] = (layer((9, 8), (3, 1, 2), 1, (1, 0, 1), 0, (3, 1, 2)), (4, 5, 6))
DILATED = [
    (Case("k3 d2", "forward", Arithmetic.TF32), 0.0),
    (Case("k(3,1,2) d(3,1,2)", "grad_input", Arithmetic.BF16, True, True), 0.5),
]


@pytest.mark.sample
@pytest.mark.parametrize("case, where", DILATED, ids=lambda v: getattr(v, "name", None) or v)
def test_warpgroup_products_of_dilated_taps(case: Case, where: float) -> None:
    check(case, wgmma_at(where))


KEPT = [
    (Case("k3 s2 in large groups", "forward", Arithmetic.BF16), 0.0, True),  # their weights change
    (Case("k3 s2 in large groups", "forward", Arithmetic.F16), 0.6, True),
    (Case("k3", "grad_input", Arithmetic.TF32, True, True), 0.7, False),
]


@pytest.mark.sample
@pytest.mark.parametrize(
    "case, where, ping_pong", KEPT, ids=lambda v: getattr(v, "name", None) or v
)
def test_warpgroup_products_of_kept_weights(case: Case, where: float, ping_pong: bool) -> None:
    check(case, wgmma_at(where, kept=True, ping_pong=ping_pong))


# ---------------------------------------------------------------- schedules and sanitizers

FEW = [
    Case("k3", "forward", Arithmetic.TF32),
    Case("k3 s2 in groups", "forward", Arithmetic.F16, True, True),
    Case("k2 s2, one tap", "forward", Arithmetic.IEEE),
    Case("everything odd", "grad_input", Arithmetic.BF16),
    Case("k3", "grad_weight", Arithmetic.TF32),
    Case("k3 p1, rows of 8", "grad_weight", Arithmetic.F16, True, False),
    Case("depthwise k4 s2", "forward", Arithmetic.TF32),
    Case("depthwise k4 s2", "grad_weight", Arithmetic.F16),
]


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("order", [1, 77])
@pytest.mark.parametrize("case", FEW, ids=lambda case: case.name)
def test_any_order_of_threads_and_blocks(case: Case, order: int) -> None:
    check(case, order=order)


SANITIZED = [
    *FEW,
    Case("k3 p1, rows of 8", "forward", Arithmetic.TF32),
    Case("k3 p1, rows of 8", "forward", Arithmetic.F16),
    Case("k5x3x2, many channels", "forward", Arithmetic.TF32, True, True),
    Case("k124 s124, one tap", "forward", Arithmetic.F16),
    Case("k3 s2 in groups", "grad_input", Arithmetic.TF32),
    Case("phases without taps", "forward", Arithmetic.BF16, True, True),
    Case("everything odd", "grad_weight", Arithmetic.IEEE),
    Case("one channel", "grad_input", Arithmetic.F16),
]


@pytest.mark.sample
@pytest.mark.parametrize("case", sampled(SANITIZED, 7), ids=lambda case: case.name)
def test_sanitized(case: Case) -> None:
    check(case, flavour=Flavour.SANITIZED)


@pytest.mark.more
def test_every_kernel_file_is_run() -> None:
    files = set()
    for case in CASES:
        # Groups of few channels have kernels of their own in 16 bits.
        if case.arithmetic is Arithmetic.TF32 or case.layer == "k3 s2 in groups":
            size = LAYERS[case.layer][1]
            plans = ranked_plans(case.problem, BATCH, size, Gpu())
            for plan in {type(plan): plan for plan in reversed(plans)}.values():
                files |= {item.kernel.file for item in plan.schedule(BATCH, size).launches}
    chosen = [(case, wgmma_at(where)) for case, where in WGMMA]
    chosen += [(case, strided(where)) for case, where in STRIDED]
    for case, plan in chosen:
        size = LAYERS[case.layer][1]
        schedule = plan(case.problem, BATCH, size, Gpu()).schedule(BATCH, size)
        files |= {item.kernel.file for item in schedule.launches}
    assert files == set(kernel_files())
