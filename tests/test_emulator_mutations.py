"""Planted bugs: each change to a kernel's text must turn the emulator's tests red."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from convt3d.cuda.compiler import kernel_files
from convt3d.cuda.plan.wgrad import WgmmaWgradPlan
from convt3d.cuda.schedule import Gpu
from convt3d.precision import Arithmetic
from emulator import build
from emulator.harness import EmulatorError, Flavour, kernel_text
from test_emulator_col2im import col2im_of
from test_emulator_kernels import (
    LAYERS,
    Case,
    check,
    layer,
    other_plans,
    plan_at,
    sampled,
    strided,
    wgmma_at,
)
from test_emulator_ndhwc import ndhwc_with
from test_emulator_phases import phases_with
from test_emulator_rows import rows, slices, sweeps
from test_emulator_wgrad_ndhwc import clustered, split_in_three

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))

# More taps than are packed at once, no whole vectors of them; groups whose products are a warp's.
LAYERS["k5x5x3 s2"] = (layer((16, 8), (5, 5, 3), 2, 1), (2, 3, 8))
LAYERS["k4 s2, many samples"] = (layer((40, 32), 4, 2, 1), (3, 4, 4))
# No box of 32 positions, or of 64, fits it: some positions of steps are outside.
LAYERS["k3 p1, planes of 33"] = (layer((16, 24), 3, 1, 1), (5, 11, 7))
# Lines of 8, of which taps along H share boxes.
LAYERS["k3 p1, lines of 13"] = (layer((64, 64), 3, 1, 1), (3, 8, 13))
LAYERS["k3 s2 in groups of 8"] = (layer((32, 32), 3, 2, 1, groups=4), (3, 5, 9))

STRIDED, STRIDED_DGRAD = "ampere/strided/forward.cu", "ampere/strided/dgrad.cu"
STRIDED_ROWS, STRIDED_SLICES = "ampere/strided/rows.cu", "ampere/strided/slices.cu"
GATHER, PATCH = "ampere/gather/kernel.cu", "ampere/patch/kernel.cu"

#: Per kernel file, calls that together reach all of it.
REACH = {
    GATHER: [
        Case("k3", "forward", Arithmetic.TF32),
        Case("k3 p1, rows of 8", "forward", Arithmetic.F16),
        Case("k3 p1, rows of 8", "grad_input", Arithmetic.TF32),
        Case("k3 s2 in groups", "forward", Arithmetic.TF32, True, True),
    ],
    PATCH: [
        Case("k2 s2, one tap", "forward", Arithmetic.TF32),
        Case("k124 s124, one tap", "grad_input", Arithmetic.TF32),
    ],
    "ampere/wgrad/kernel.cu": [
        Case("k3", "grad_weight", Arithmetic.TF32),
        Case("k3", "grad_weight", Arithmetic.F16),
        Case("everything odd", "grad_weight", Arithmetic.TF32, True, True),
    ],
    "direct/conv.cu": [Case("one channel k13", "forward", Arithmetic.TF32)],
    "direct/wgrad.cu": [Case("one channel k13", "grad_weight", Arithmetic.TF32)],
    "depthwise/conv.cu": [
        Case("depthwise k4 s2", "forward", Arithmetic.TF32),
        Case("one channel", "forward", Arithmetic.TF32),
    ],
    "depthwise/wgrad.cu": [Case("depthwise k4 s2", "grad_weight", Arithmetic.TF32)],
    "wgrad/kernel.cu": [
        Case("k3 s2 in groups", "grad_weight", Arithmetic.IEEE),
        Case("k3 p1, rows of 8", "grad_weight", Arithmetic.TF32),
        Case("k222", "grad_weight", Arithmetic.IEEE),
    ],
    "wgrad_ndhwc/kernel.cu": [
        Case("k3 p1, planes of 33", "grad_weight", Arithmetic.BF16, True, True),
        Case("k3 p1, planes of 33", "grad_weight", Arithmetic.TF32, True, True),
        Case("k3 p1, lines of 13", "grad_weight", Arithmetic.BF16, True, True),
        Case("k3 p1, lines of 13", "grad_weight", Arithmetic.TF32, True, True),
        Case("k3 p1, 32 channels", "grad_weight", Arithmetic.BF16),
    ],
    "layout/channels_last.cu": [
        Case("k3 p1, 32 channels", "forward", Arithmetic.BF16),
        Case("k3 p1, 32 channels", "grad_weight", Arithmetic.TF32),
    ],
    "sweep/kernel.cu": [
        Case("k3 p1, rows of 8", "forward", Arithmetic.TF32),
        Case("k3", "forward", Arithmetic.F16),
    ],
    "phases/kernel.cu": [Case("k3 s2 in groups", "forward", Arithmetic.TF32)],
    "phases/pack.cu": [
        Case("k3 s2 in groups", "forward", Arithmetic.TF32),
        Case("k5x5x3 s2", "forward", Arithmetic.TF32),
    ],
    "ndhwc/kernel.cu": [
        Case("k3 s2 in large groups", "forward", Arithmetic.BF16, True, True),
        Case("k3 s2 in groups of 8", "forward", Arithmetic.BF16, True, True),
        Case("k4 s2, many samples", "forward", Arithmetic.BF16, True, True, batch=18),
        Case("k3 p1, 32 channels", "forward", Arithmetic.BF16),
    ],
    "ndhwc/pack.cu": [
        Case("k4 s2, many samples", "forward", Arithmetic.BF16, True, True, batch=18)
    ],
    "patch/kernel.cu": [
        Case("k2 s2, one tap", "forward", Arithmetic.TF32),
        Case("k2 s2, one tap", "forward", Arithmetic.BF16),
    ],
    "sweep/pack.cu": [Case("k3 p1, rows of 8", "forward", Arithmetic.TF32)],
    "ampere/gather/pack.cu": [Case("k3", "forward", Arithmetic.TF32)],
    "col2im/kernel.cu": [
        Case("k4 s2, one channel", "forward", Arithmetic.TF32),
        Case("k(3,2,5) s(1,3,1), groups", "forward", Arithmetic.BF16),
    ],
    STRIDED: [Case("k3 s2, rows of 69", "forward", Arithmetic.TF32)],
    STRIDED_DGRAD: [Case("k3 s2, rows of 69", "grad_input", Arithmetic.TF32)],
    STRIDED_ROWS: [Case("k3 s2, rows of 20", "forward", Arithmetic.IEEE)],
    STRIDED_SLICES: [Case("k3 s2, lines of 23", "grad_input", Arithmetic.IEEE)],
    "ampere/strided/pack.cu": [Case("k3 s2, rows of 69", "forward", Arithmetic.TF32)],
    "rows/kernel.cu": [
        Case("k(3,5,7) s2, rows of 12", "forward", Arithmetic.IEEE),
        Case("k3 s2, rows of 71", "forward", Arithmetic.BF16),
    ],
    "rows/pack.cu": [Case("k(3,5,7) s2, rows of 12", "forward", Arithmetic.IEEE)],
}


FEW = replace(Gpu(), multiprocessors=2)


@dataclass(frozen=True)
class Mutation:
    """Occurrence ``index`` of a pattern in a kernel file's flattened text, replaced."""

    file: str
    pattern: str
    replacement: str
    index: int | None = None  # None: all of them

    def __call__(self, file: str, text: str) -> str:
        if file != self.file:
            return text
        places = list(re.finditer(self.pattern, text))
        assert places, f"{self.file} no longer contains {self.pattern}"
        for place in reversed(places if self.index is None else [places[self.index]]):
            text = text[: place.start()] + place.expand(self.replacement) + text[place.end() :]
        return text


def on_few(pick: Callable[..., Any]) -> Callable[..., Any]:
    """Picks the same plan for few multiprocessors, whose CTAs fill their buffers more than once."""

    def picked(*call: Any) -> Any:
        plan = pick(*call)
        return replace(plan, gpu=FEW) if isinstance(plan, WgmmaWgradPlan) else plan

    return picked


def assert_red(mutation: Mutation) -> str:
    """The first failure that the mutation causes; fails if all calls pass, in several plans."""
    cases = REACH[mutation.file]
    if mutation.file in ("sweep/kernel.cu", "sweep/pack.cu"):
        pick = wgmma_at
    elif mutation.file == "wgrad_ndhwc/kernel.cu":
        pick = split_in_three
    elif mutation.file.startswith("rows/"):

        def pick(where: float) -> Callable[..., Any]:
            return sweeps

    elif mutation.file == "col2im/kernel.cu":

        def pick(where: float) -> Callable[..., Any]:
            return col2im_of(3, 4, keep_planes=where > 0.5)

    elif mutation.file.startswith("ampere/strided/"):
        pick = {STRIDED_ROWS: rows, STRIDED_SLICES: slices}.get(mutation.file, strided)
    else:
        pick = functools.partial(plan_at, file=mutation.file)
    attempts = [(case, pick(0.0)) for case in cases]
    if mutation.file == "sweep/kernel.cu":
        kept = Case("k3 s2 in large groups", "forward", Arithmetic.BF16)
        attempts.append((kept, wgmma_at(0.0, 1, kept=True)))
    if mutation.file == "phases/kernel.cu":
        odd = Case("k3 s2, rows of 71", "forward", Arithmetic.TF32, bias=False)
        attempts.append((odd, phases_with(phased=0, store_warps=2, round_columns=8)))
        attempts.append((odd, phases_with(phased=0)))
    if mutation.file == "wgrad_ndhwc/kernel.cu":
        attempts += [(cases[0], clustered(3)), (cases[0], clustered(1))]
    if mutation.file == "ndhwc/kernel.cu":
        dilated = Case("k3 s2 d2, 40 columns", "forward", Arithmetic.BF16, True, True)
        attempts.append((dilated, ndhwc_with(phased=2, split=2, fills=True)))
        as_it_is = Case("k213 s1, three chunks", "grad_input", Arithmetic.F16, True, True)
        as_it_is = replace(as_it_is, weight_last=True)
        attempts.append((as_it_is, ndhwc_with(flipped=True, direct=True, phased=1)))
    attempts += [(case, pick(where)) for case in cases for where in other_plans(case)]
    for case, plan in attempts:
        try:
            check(case, on_few(plan), edit=mutation)
        except EmulatorError as error:
            return str(error)
        except AssertionError as error:
            return f"wrong result: {error}"
    pytest.fail(f"{mutation} goes unnoticed")


#: Barriers that nothing depends on: the products of a warp before it have gathered its lanes.
REDUNDANT = {("ndhwc/kernel.cu", "__syncwarp", 8)}
#: Those of a way to store that other kernels use (ampere/strided/store.cuh).
REDUNDANT |= {(file, "__syncthreads", i) for file in (STRIDED_ROWS, STRIDED_SLICES) for i in (0, 1)}
#: Those that keep loads from moving, and lanes together before a cluster's barrier.
REDUNDANT |= {("wgrad/kernel.cu", "__syncwarp", i) for i in (0, 1)}
REDUNDANT |= {("ndhwc/kernel.cu", "__syncwarp", 0)}
REDUNDANT |= {("wgrad_ndhwc/kernel.cu", "__syncwarp", 0)}
#: That before other weights: some volume that is marched through last may finish no plane.
REDUNDANT |= {("col2im/kernel.cu", "__syncthreads", 1)}
#: Those that bring lanes together again, before a named barrier and before loads.
REDUNDANT |= {("rows/kernel.cu", "__syncwarp", i) for i in (0, 1, 2)}
#: That of a header that packing includes for its layout (load/octet_box.cuh).
REDUNDANT |= {("ampere/gather/pack.cu", "__syncwarp", 0)}


def barriers() -> list[Any]:
    """Every barrier of every kernel, dropped."""
    found = []
    for file in kernel_files():
        for name in ("__syncthreads", "__syncwarp"):
            count = len(re.findall(rf"\b{name}\(\);", kernel_text(file)))
            for i in range(count):
                if (file, name, i) in REDUNDANT:
                    continue
                mutation = Mutation(file, rf"\b{name}\(\);", ";", i)
                found.append(mutation)
    return found


@pytest.mark.more
@pytest.mark.parametrize(
    "mutation", barriers(), ids=lambda m: f"{m.file}-{m.pattern[2:-5]}-{m.index}"
)
def test_dropped_barrier(mutation: Mutation) -> None:
    report = assert_red(mutation)
    # Copies that others began are seen behind a barrier alone.
    expected = (
        "missing (__sync(threads|warp)|async_wait)|no barrier between|no initialised mbarrier"
    )
    assert re.search(expected, report), report


#: Waits that calls of REACH do not come to: of split products, of the gradients by bias and by
#: input, which test_emulator_branches.py has; and of blocks without a product, for the order of
#: launches alone.
WAITS_ELSEWHERE = {(PATCH, 0), ("patch/kernel.cu", 0), ("wgrad/kernel.cu", 1)}
WAITS_ELSEWHERE |= {("phases/kernel.cu", 0), (GATHER, 1)}


def waits() -> list[Mutation]:
    """Every wait for the launch before, dropped."""
    found = []
    for file in kernel_files():
        pattern = r"(?:convt3d::)?\bgrid_dependency_wait\(\);"
        count = len(re.findall(pattern, kernel_text(file)))
        found += [
            Mutation(file, pattern, ";", i)
            for i in range(count)
            if (file, i) not in WAITS_ELSEWHERE
        ]
    return found


@pytest.mark.more
@pytest.mark.parametrize("mutation", waits(), ids=lambda m: f"{m.file}-{m.index}")
def test_dropped_wait_for_the_launch_before(mutation: Mutation) -> None:
    assert "missing grid_dependency_wait" in assert_red(mutation)


def inside(axis: int) -> str:
    """Pattern of the test that an index lies within an axis."""
    return rf"unsigned\(i{axis}\) < unsigned\(extent\[{axis}\]\)"


PLANTED = {
    "strided: staged rows too close": (
        Mutation(
            STRIDED,
            r"round_up\(rows \* row_pitch, boundary\) \+ boundary",
            "row_pitch",
        ),
        "wrong result|race|without a barrier",
    ),
    "strided rows: a stage left before it is read": (
        Mutation(STRIDED_ROWS, r"stages\.skip\(first\);", "stages.skip(first + taken);"),
        "missing __syncthreads|no barrier between",
    ),
    "strided slices: lines beyond a slice are read": (
        Mutation(STRIDED_SLICES, r"exists \? ([^:]*) : zeros;", r"\1;"),
        "wrong result|nan|never wrote|uninitiali",
    ),
    "strided gradient: sums of two slices exchanged": (
        Mutation(STRIDED_DGRAD, r"sums\.lag\[lag\]\.value\[0\]", "sums.lag[0].value[0]"),
        "wrong result",
    ),
    "gather: dropped wait": (
        Mutation(GATHER, r"async_wait<[^0][^>]*>\(\);", ";"),
        "missing async_wait",
    ),
    "gather: wait for one group too few": (
        Mutation(
            GATHER,
            r"async_wait<Config::stages - 2>",
            "async_wait<Config::stages - 1>",
        ),
        "missing async_wait",
    ),
    "gradient by weight: dropped wait": (
        Mutation("ampere/wgrad/kernel.cu", r"async_wait<0>\(\);", ";", 0),
        "missing async_wait",
    ),
    "halo one position too wide": (
        Mutation(GATHER, inside(2), "i2 <= extent[2]"),
        "out of bounds|wrong result",
    ),
    "halo one position too narrow": (
        Mutation(
            GATHER,
            r"unsigned\(i2\) < unsigned\(extent\[2\]\)",
            r"unsigned(i2) < unsigned(extent[2] - 1)",
        ),
        "wrong result",
    ),
    "gradient by weight: halo one line too many": (
        Mutation(
            "ampere/wgrad/kernel.cu",
            r"unsigned\(i0\) < unsigned\(extent\[0\]\)",
            r"unsigned(i0) <= unsigned(extent[0])",
        ),
        "out of bounds|wrong result",
    ),
    "fragment rows of the wrong half": (
        Mutation(GATHER, r"lane / 4 \+ 8 \* \(i / 2\)", "lane / 4 + 8 * (i % 2)"),
        "wrong result|missing __sync",
    ),
    "fragment columns of the wrong lane": (
        Mutation("ampere/wgrad/kernel.cu", r"lane % 4 \* 2 \+ i % 2", "lane % 4 * 2 + i / 2"),
        "wrong result|race|without a barrier",
    ),
    "warpgroups: proxy fence dropped": (
        Mutation("sweep/kernel.cu", r"\n *fence_async_proxy\(\);", ";"),
        "fence",
    ),
    "warpgroups: A stages are not waited for": (
        Mutation("sweep/kernel.cu", r"a_stages\.wait_full\(\);", ";"),
        "without|missing|race|wrong result",
    ),
    "warpgroups: kept weights are not waited for": (
        Mutation("sweep/kernel.cu", r"\bstages\.wait_full\(\);", ";", 1),
        "without|missing|race|wrong result",
    ),
    "warpgroups: kept weights overwritten too early": (
        Mutation("sweep/kernel.cu", r"ring\.wait_empty\(\);", ";", 0),
        "one arrival too many|without|missing|race",
    ),
    "scatter: positions outside are not zero": (
        Mutation("col2im/kernel.cu", r"there \? ([^;]*) : 0;", r"\1;"),
        "wrong result",
    ),
    "kernel == stride: wait for one group too few": (
        Mutation(
            PATCH,
            r"async_wait<Config::stages - 2>",
            "async_wait<Config::stages - 1>",
        ),
        "missing async_wait",
    ),
    "kernel == stride: cells past the end": (
        Mutation(PATCH, r"inside\[r\] = cell < [^;]*;", "inside[r] = true;"),
        "out of bounds|race between blocks",
    ),
    "kernel == stride: accumulators of the wrong cell": (
        Mutation(
            PATCH,
            r"2 \* \(row % 2\) \+ in_lane / Config::interleave",
            "row % 2 + 2 * (in_lane / Config::interleave)",
        ),
        "wrong result",
    ),
    "kernel == stride, warpgroups: proxy fence dropped": (
        Mutation("patch/kernel.cu", r"\n *fence_async_proxy\(\);", ";"),
        "fence",
    ),
    "kernel == stride, warpgroups: cells are not waited for": (
        Mutation("patch/kernel.cu", r"at\.wait_full\(\);", ";"),
        "without|missing|race|wrong result",
    ),
    "channels_last layers: a flipped weight as it is, its taps in the order of memory": (
        Mutation("ndhwc/kernel.cu", r"Config::forward \? last - number : number", "number"),
        "wrong result",
    ),
    "gradient by weight, channels_last: a step's boxes are not waited for": (
        Mutation("wgrad_ndhwc/kernel.cu", r"ring\.wait_full\(\);", ";"),
        "without|missing|race|wrong result",
    ),
    "gradient by weight, channels_last: a stage is filled too early": (
        Mutation("wgrad_ndhwc/kernel.cu", r"ring\.wait_empty\(\);", ";"),
        "one arrival too many|without|missing|race",
    ),
    "gradient by weight, channels_last: a stage is left too early": (
        Mutation(
            "wgrad_ndhwc/kernel.cu",
            r"held = ring\.stage;",
            "mbarrier_arrive_if(ring.empty(ring.stage), first_lane);",
            1,
        ),
        "without|missing|race|wrong result",
    ),
    "gradient by weight, channels_last: tails are not cleared": (
        Mutation("wgrad_ndhwc/kernel.cu", r"clear_tails<Config>\(a, shared\);", ";"),
        "wrong result|not everything",
    ),
    "gradient by weight, channels_last: taps along H begin a line off": (
        Mutation(
            "wgrad_ndhwc/kernel.cu", r"a\.tap_rows\(\) \* n_pitch", "(a.tap_rows() + 8) * n_pitch"
        ),
        "wrong result|missing mbarrier_wait",
    ),
    "gradient by weight, channels_last: x is transposed before it has come": (
        Mutation("wgrad_ndhwc/kernel.cu", r"mbarrier_wait\(ring\.landed\(\), ring\.parity\);", ";"),
        "without|missing|race|one arrival too many",
    ),
    "gradient by weight, channels_last: fragments are read too late": (
        Mutation("wgrad_ndhwc/kernel.cu", r"if \(product == 1\)", "if (product == 0)"),
        "without|missing|race|wrong result",
    ),
    "gradient by weight, channels_last: fragments are fetched too early": (
        Mutation("wgrad_ndhwc/kernel.cu", r"wgmma_wait<1>\(\);\s*if \(product", "if (product"),
        "missing wgmma_wait",
    ),
    "gradient by weight, channels_last: positions of x in another order": (
        Mutation("wgrad_ndhwc/kernel.cu", r"k % 4 \* 2 \+ k / 4", "k"),
        "wrong result",
    ),
    "gradient by weight, channels_last: proxy fence dropped": (
        Mutation("wgrad_ndhwc/kernel.cu", r"\n *fence_async_proxy\(\);", ";"),
        "fence",
    ),
    "gradient by weight, channels_last: runs are stored before all taps are there": (
        Mutation(
            "wgrad_ndhwc/kernel.cu",
            r"__syncthreads\(\);(\s*const int in = run)",
            r"\1",
        ),
        "missing __sync",
    ),
    "gradient by weight, channels_last: whole sums lie where products still read": (
        Mutation(
            "wgrad_ndhwc/kernel.cu", r"named_barrier_sync\(1, sums\.threads\);(\s*sums\.put)", r"\1"
        ),
        "without|missing|race|wrong result|deadlock",
    ),
    "gradient by weight, channels_last: sums of a cluster are read before they are there": (
        Mutation("wgrad_ndhwc/kernel.cu", r"cluster_sync\(\);(\s*else)", r";\1"),
        "without|missing|race|wrong result|deadlock|cluster",
    ),
    "packed weights: word of the wrong lane": (
        Mutation("ampere/gather/pack.cu", r"word_of\(lane % 4, half\)", "word_of(lane / 8, half)"),
        "wrong result",
    ),
}


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("name", sampled(list(PLANTED), 5))
def test_planted_bug(name: str) -> None:
    mutation, message = PLANTED[name]
    report = assert_red(mutation)
    assert re.search(message, report), report


@pytest.mark.sample
@pytest.mark.parametrize("arithmetic", [Arithmetic.TF32, Arithmetic.F16])
def test_sanitizers_see_a_halo_that_is_too_wide(arithmetic: Arithmetic) -> None:
    mutation = PLANTED["halo one position too wide"][0]
    with pytest.raises(EmulatorError, match=r"heap-buffer-overflow|out of bounds"):
        check(Case("k3", "forward", arithmetic), edit=mutation, flavour=Flavour.SANITIZED)
