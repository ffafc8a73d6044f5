"""Every kernel compiles with NVRTC for every supported architecture, without a GPU."""

from __future__ import annotations

import itertools
import re

import pytest

from convt3d.cuda import compiler
from convt3d.cuda.plan import (
    ampere_strided,
    col2im,
    ndhwc,
    patch,
    phases,
    plan_problem,
    rows,
    strided_dgrad,
    sweep,
    transposed,
    wgrad_ndhwc,
)
from convt3d.cuda.plan.warpgroups import compiles
from convt3d.cuda.schedule import OPERATIONS, Gpu, Problem
from convt3d.geometry import Geometry
from convt3d.precision import Arithmetic

pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC's bindings are not installed")

TARGETS = ("sm_80", "sm_86", "sm_90a", "sm_100", "sm_120")
LAYERS = {
    "dense": Geometry(48, 40, (3, 3, 3)),
    "kernel == stride": Geometry(64, 32, (2, 2, 2), (2, 2, 2)),
    "strided": Geometry(24, 17, (4, 3, 5), (2, 1, 3), (1, 1, 2), (1, 0, 2), (1, 2, 1)),
    "depthwise": Geometry(8, 8, (4, 4, 4), (2, 2, 2), (1, 1, 1), groups=8),
}
ARITHMETICS = [a for a in Arithmetic if a is not Arithmetic.F64]
EACH_TIME = [
    a if a is Arithmetic.TF32 else pytest.param(a, marks=pytest.mark.more) for a in ARITHMETICS
]
SMALL = Gpu((8, 6), 84, 101376, 102400)


def specs(name: str, arithmetic: Arithmetic, last: bool) -> set[compiler.KernelSpec]:
    found = set()
    for operation in OPERATIONS:
        problem = Problem(operation, LAYERS[name], arithmetic, last, last, operation == "forward")
        plan = plan_problem(problem, 2, (16, 16, 16), SMALL)
        found |= {launch.kernel for launch in plan.schedule(2, (16, 16, 16)).launches}
    return found


@pytest.mark.sample
@pytest.mark.parametrize("arithmetic", EACH_TIME, ids=lambda a: a.value)
@pytest.mark.parametrize("name", LAYERS)
def test_every_kernel_and_dtype(name: str, arithmetic: Arithmetic) -> None:
    # Each layer meets both layouts, and each layout every dtype.
    last = (list(LAYERS).index(name) + ARITHMETICS.index(arithmetic)) % 2 == 0
    for spec in specs(name, arithmetic, last):
        assert compiler.compile_cubin(spec, "sm_90a")[:4] == b"\x7fELF"


@pytest.mark.sample
@pytest.mark.parametrize("operation", ["forward", "grad_input"])
def test_warpgroup_kernels(operation: str) -> None:
    for arithmetic, last in ((Arithmetic.TF32, False), (Arithmetic.BF16, True)):
        problem = Problem(operation, LAYERS["dense"], arithmetic, last, last)
        _, plan = sweep.ranked(problem, 2, (16, 16, 16), Gpu())[0]
        for launch in plan.schedule(2, (16, 16, 16)).launches:
            assert compiler.compile_cubin(launch.kernel, "sm_90a")[:4] == b"\x7fELF"


@pytest.mark.parametrize("operation", ["forward", "grad_input"])
def test_warpgroup_kernel_equal_to_stride(operation: str) -> None:
    problem = Problem(operation, LAYERS["kernel == stride"], Arithmetic.TF32)
    _, plan = patch.ranked(problem, 2, (16, 16, 16), Gpu())[0]
    for launch in plan.schedule(2, (16, 16, 16)).launches:
        assert compiler.compile_cubin(launch.kernel, "sm_90a")[:4] == b"\x7fELF"


def test_scatter_kernels() -> None:
    problem = Problem("forward", Geometry(40, 1, (3, 3, 3)), Arithmetic.BF16)
    _, plan = col2im.ranked(problem, 2, (16, 16, 16), Gpu())[0]
    for launch in plan.schedule(2, (16, 16, 16)).launches:
        assert compiler.compile_cubin(launch.kernel, "sm_90a")[:4] == b"\x7fELF"


@pytest.mark.more
def test_strided_warpgroup_kernels() -> None:
    geometry = Geometry(32, 32, (3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1))
    for operation, family, last in (
        ("forward", phases, False),
        ("forward", transposed, False),
        ("forward", ndhwc, True),
        ("grad_input", strided_dgrad, False),
    ):
        problem = Problem(operation, geometry, Arithmetic.TF32, last, last)
        _, plan = family.ranked(problem, 2, (16, 16, 16), Gpu())[0]
        for launch in plan.schedule(2, (16, 16, 16)).launches:
            assert compiler.compile_cubin(launch.kernel, "sm_90a")[:4] == b"\x7fELF"


def test_gradient_by_weight_of_channels_last_tensors() -> None:
    geometry = Geometry(32, 64, (3, 2, 5), (2, 1, 3), (1, 0, 2), groups=2)
    for arithmetic in (Arithmetic.BF16, Arithmetic.F16, Arithmetic.TF32):
        problem = Problem("grad_weight", geometry, arithmetic, True, True)
        _, plan = wgrad_ndhwc.ranked(problem, 2, (16, 16, 16), Gpu())[0]
        for launch in plan.schedule(2, (16, 16, 16)).launches:
            assert compiler.compile_cubin(launch.kernel, "sm_90a")[:4] == b"\x7fELF"


def test_rows_on_warpgroup_products() -> None:
    geometry = Geometry(32, 32, (3, 5, 7), (2, 2, 2), (1, 2, 3), (0, 0, 1), groups=4)
    for arithmetic in (Arithmetic.IEEE, Arithmetic.F16):
        problem = Problem("forward", geometry, arithmetic)
        _, plan = rows.ranked(problem, 2, (8, 8, 8), Gpu())[0]
        for launch in plan.schedule(2, (8, 8, 8)).launches:
            assert compiler.compile_cubin(launch.kernel, "sm_90a")[:4] == b"\x7fELF"


WIDE = [
    (32, 80, (3, 3, 3)),
    (256, 256, (3, 1, 1)),
    (32, 208, (1, 3, 3)),
    (128, 256, (1, 1, 3)),
]


@pytest.mark.parametrize("source, target, kernel", WIDE)
def test_products_of_many_columns(source: int, target: int, kernel: tuple[int, int, int]) -> None:
    """ptxas refuses wide products in CTAs of many threads."""
    size = (16, 64, 64)
    d, h, w = (k // 2 for k in kernel)
    geometry = Geometry(source, target, kernel, padding=(d, h, w))
    widest: dict[tuple[int, int], sweep.WgmmaSweepPlan] = {}
    for arithmetic, last in itertools.product((Arithmetic.BF16, Arithmetic.TF32), (False, True)):
        problem = Problem("forward", geometry, arithmetic, last, last)
        for _, plan in sweep.ranked(problem, 2, size, Gpu()):
            assert compiles(plan.product_columns, plan.tile.threads)
            widest[plan.tile.threads, plan.product_columns] = plan
    for threads in {threads for threads, _ in widest}:
        plan = widest[max(key for key in widest if key[0] == threads)]
        for launch in plan.schedule(2, size).launches:
            assert compiler.compile_cubin(launch.kernel, "sm_90a")[:4] == b"\x7fELF"


@pytest.mark.more
@pytest.mark.parametrize("target", TARGETS)
def test_every_architecture(target: str) -> None:
    found = specs("dense", Arithmetic.BF16, False) | specs("depthwise", Arithmetic.IEEE, True)
    for spec in found | specs("kernel == stride", Arithmetic.TF32, False):
        assert compiler.compile_cubin(spec, target)[:4] == b"\x7fELF"


@pytest.mark.more
@pytest.mark.parametrize("operation", ["forward", "grad_input"])
def test_the_strided_kernels(operation: str) -> None:
    # Grouped and dense; with and without tensor-core rounding of its own.
    for arithmetic, groups in ((Arithmetic.IEEE, 4), (Arithmetic.F16, 1)):
        geometry = Geometry(32, 32, (3, 3, 3), (2, 2, 2), (1, 1, 1), groups=groups)
        problem = Problem(operation, geometry, arithmetic)
        _, plan = ampere_strided.ranked(problem, 2, (16, 16, 16), SMALL)[0]
        for launch in plan.schedule(2, (16, 16, 16)).launches:
            for target in ("sm_80", "sm_90a", "sm_120"):
                assert compiler.compile_cubin(launch.kernel, target)[:4] == b"\x7fELF"


def test_a_broken_source_names_the_kernel_and_the_error() -> None:
    spec = next(iter(specs("dense", Arithmetic.TF32, False)))
    broken = compiler.KernelSpec(spec.file, spec.entry, spec.macros[1:])
    with pytest.raises(RuntimeError, match=rf"compiling {spec.file} for sm_80 failed(.|\n)*error"):
        compiler.compile_cubin(broken, "sm_80")


def test_flattened_text_has_every_header_once() -> None:
    text = compiler.flatten("ampere/gather/kernel.cu")
    assert "#include" not in text
    assert text.count("struct StaticAxis") == 1
    assert text.count("round_tf32(float value) {") == 1


ASSEMBLY = tuple(
    f"device/{name}.cuh" for name in ("ptx", "barrier", "tma", "wgmma", "wgmma_mn_major")
)


def test_inline_assembly_stays_in_intrinsics() -> None:
    for file in [*compiler.headers(), *compiler.kernel_files()]:
        if file not in ASSEMBLY:
            text = (compiler.KERNEL_DIRECTORY / file).read_text()
            assert not re.search(r"\basm\b", text), file


@pytest.mark.parametrize(
    ("capability", "target"), [((8, 0), "sm_80"), ((9, 0), "sm_90a"), ((12, 0), "sm_120")]
)
def test_architecture(capability: tuple[int, int], target: str) -> None:
    assert compiler.architecture(capability) == target
