"""No kernel touches registers of warpgroup products in flight; and the check that says so."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from convt3d.bench import shapes
from convt3d.cuda import compiler
from convt3d.cuda.plan import ranked_plans
from convt3d.cuda.schedule import OPERATIONS, Gpu, Plan, Problem
from convt3d.geometry import Geometry, Triple
from convt3d.precision import Arithmetic
from support.ptx import Hazard, compile_ptx, hazards, hazards_of

pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC's bindings are not installed")

# ---------------------------------------------------------------- the check

_PRODUCT = (
    "wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32 "
    "{%f1, %f2, %f3, %f4}, {%r1, %r2, %r3, %r4}, %rd1, 1, 1, 1;"
)
_OTHER = _PRODUCT.replace("%r1, %r2, %r3, %r4", "%r5, %r6, %r7, %r8")
_COMMIT = "wgmma.commit_group.sync.aligned;"


def _wait(pending: int) -> str:
    return f"wgmma.wait_group.sync.aligned {pending};"


def _found(*lines: str) -> list[Hazard]:
    body = "\n\t".join(lines)
    return hazards(
        ".visible .entry kernel(\n\t.param .u64 kernel_param_0\n)\n.maxntid 128, 1, 1\n{\n"
        "\t.reg .pred %p<3>;\n\t.reg .f32 %f<9>;\n\t.reg .b32 %r<20>;\n\t.reg .b64 %rd<3>;\n"
        f"\t{body}\n\tret;\n}}\n"
    )


def test_operand_in_flight() -> None:
    load = "ld.shared.v2.u32 {%r9, %r2}, [%r10];"
    (found,) = _found(_PRODUCT, _COMMIT, load, _wait(0))
    assert (found.kind, found.registers) == ("operand", ("%r2",))
    assert str(found) == f"operand: %r2 in {load[:-1]}"
    assert _found(_PRODUCT, load, _COMMIT, _wait(0))  # before it is committed, too
    assert not _found(_PRODUCT, _COMMIT, _wait(0), load)
    # Reading an operand, or writing what merely has its number, is none.
    assert not _found(_PRODUCT, _COMMIT, "mov.u32 %r9, %r2;", "mov.f32 %f5, 0f00000000;")


def test_groups_retire_in_order() -> None:
    write = "mov.u32 %r1, %r9;"
    assert not _found(_PRODUCT, _COMMIT, _OTHER, _COMMIT, _wait(1), write)
    assert _found(_PRODUCT, _COMMIT, _OTHER, _COMMIT, _wait(2), write)
    assert _found(_OTHER, _COMMIT, _PRODUCT, _COMMIT, _wait(1), write)
    # One group of two products; an empty group; products that nobody committed.
    assert _found(_PRODUCT, _OTHER, _COMMIT, _wait(1), write)
    assert not _found(_PRODUCT, _COMMIT, _COMMIT, _wait(1), write)
    assert _found(_PRODUCT, _wait(0), write)


def test_loops_and_branches() -> None:
    load, again = "ld.shared.u32 %r3, [%r10];", "@%p1 bra $L1;"
    body = [_PRODUCT, _COMMIT, again]
    assert _found("$L1:", load, *body, _wait(0))  # the next iteration's load
    assert not _found("$L1:", load, *body[:2], _wait(0), again)
    assert _found("$L1:", load, *body[:2], _OTHER, _COMMIT, again)
    assert not _found("$L1:", _wait(1), load, *body[:2], _OTHER, _COMMIT, again)
    # A path around the wait; a wait that may not happen; what cannot be reached.
    assert _found(_PRODUCT, _COMMIT, "@%p1 bra $L1;", _wait(0), "$L1:", load)
    assert _found(_PRODUCT, _COMMIT, "@%p1 " + _wait(0), load)
    assert not _found(_PRODUCT, _COMMIT, _wait(0), "bra.uni $L1;", _PRODUCT, "$L1:", load)
    assert _found(_PRODUCT, _COMMIT, "@!%p1 mov.u32 %r4, 0;")


def test_scopes_of_inline_assembly() -> None:
    # Names of a scope are its own: registers, and a label that two scopes have.
    own = ["{", ".reg .b32 %r3;", "again:", "mov.u32 %r3, 0;", "@%p1 bra again;", "}"]
    assert not _found(_PRODUCT, _COMMIT, *own, *own, _wait(0))
    outer = [line for line in own if not line.startswith(".reg")]
    assert _found(_PRODUCT, _COMMIT, *outer, _wait(0))


def test_accumulator_in_flight() -> None:
    reads = "st.global.f32 [%rd2], %f3;"
    (found,) = _found(_PRODUCT, _COMMIT, reads, _wait(0))
    assert (found.kind, found.registers) == ("accumulator", ("%f3",))
    assert _found(_PRODUCT, _COMMIT, "mov.f32 %f1, 0f00000000;")
    assert not _found(_PRODUCT, _COMMIT, _wait(0), reads)
    # A sum goes on with the same shape and registers, and with no others.
    assert not _found(_PRODUCT, _COMMIT, _PRODUCT, _COMMIT, _wait(0))
    exchanged = _PRODUCT.replace("%f1, %f2", "%f2, %f1")
    assert _found(_PRODUCT, _COMMIT, exchanged, _COMMIT, _wait(0))
    # Sums kept in local memory may be stored early, if they are stored once more.
    early = "st.local.f32 [%rd2], %f3;"
    assert _found(_PRODUCT, _COMMIT, early, _wait(0))
    assert not _found(_PRODUCT, _COMMIT, early, _wait(0), early)


# ---------------------------------------------------------------- the kernels

#: Layers beside the named ones: first convolutions, patches, taps of H in loops and written out.
LAYERS: dict[str, tuple[Geometry, Triple, int]] = {
    "stem k377": (Geometry(64, 3, (3, 7, 7), (1, 2, 2), (1, 3, 3), (0, 1, 1)), (16, 56, 56), 8),
    "stem k317": (Geometry(64, 3, (3, 1, 7), (1, 2, 2), (1, 0, 3), (0, 1, 1)), (16, 56, 56), 8),
    "stem k357": (Geometry(64, 3, (3, 5, 7), (1, 2, 2), (1, 2, 3), (0, 1, 1)), (16, 56, 56), 8),
    "k3 s2": (Geometry(64, 32, (3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1)), (64, 64, 64), 2),
    "k153 s2, odd": (Geometry(32, 16, (1, 5, 3), (2, 2, 2), (0, 2, 1)), (8, 16, 32), 2),
    "k513": (Geometry(32, 24, (5, 1, 3), (1, 1, 1), (2, 0, 1)), (16, 28, 28), 2),
    "k5": (Geometry(32, 16, (5, 5, 5), (1, 1, 1), (2, 2, 2)), (32, 32, 32), 2),
    "k7 s3": (Geometry(48, 20, (7, 3, 7), (3, 1, 3), (2, 1, 2)), (9, 20, 24), 2),
    "k3": (Geometry(320, 320, (3, 3, 3), (1, 1, 1), (1, 1, 1)), (8, 8, 8), 2),
    "k2 s2": (Geometry(64, 32, (2, 2, 2), (2, 2, 2)), (32, 32, 32), 2),
    "k16 s16": (Geometry(768, 1, (16, 16, 16), (16, 16, 16)), (6, 6, 6), 4),
    "groups": (Geometry(64, 64, (3, 3, 3), (2, 2, 2), (1, 1, 1), groups=4), (16, 16, 20), 2),
}
FILES = {
    f"{name}/kernel.cu"
    for name in ("patch", "sweep", "wgrad", "wgrad_ndhwc", "ndhwc", "phases", "rows")
}
ARITHMETICS = (Arithmetic.TF32, Arithmetic.IEEE, Arithmetic.BF16)


def specs(
    problem: Problem, size: Triple, batch: int, first: int, others: int = 0
) -> Iterator[compiler.KernelSpec]:
    """Kernels of warpgroup products, of the first plans of each family and some of the others."""
    families: dict[type, list[Plan]] = {}
    for plan in ranked_plans(problem, batch, size, Gpu()):
        families.setdefault(type(plan), []).append(plan)
    chosen = random.Random(str(problem))
    for family, plans in families.items():
        if family.__name__.startswith("Wgmma"):
            rest = plans[first:]
            for plan in [*plans[:first], *chosen.sample(rest, min(others, len(rest)))]:
                for launch in plan.schedule(batch, size).launches:
                    if launch.kernel.file in FILES:
                        yield launch.kernel


def assert_none(problem: Problem, size: Triple, batch: int, first: int, others: int = 0) -> None:
    for spec in dict.fromkeys(specs(problem, size, batch, first, others)):
        found = hazards_of(spec)
        assert not found, f"{spec}: {len(found)} hazards, first {found[0]}"


@pytest.mark.sample
@pytest.mark.parametrize("name", LAYERS)
def test_kernels(name: str) -> None:
    geometry, size, batch = LAYERS[name]
    # Every operation and arithmetic of some layer; all of them in the full test.
    n = list(LAYERS).index(name)
    operation, arithmetic, last = OPERATIONS[n % 3], ARITHMETICS[n % 4 % 3], n % 5 == 0
    assert_none(Problem(operation, geometry, arithmetic, last, last), size, batch, 1)
    assert_none(Problem("grad_input", geometry, Arithmetic.TF32), size, batch, 1)


@pytest.mark.full
@pytest.mark.parametrize("last", [False, True], ids=["ncdhw", "channels_last"])
@pytest.mark.parametrize("arithmetic", ARITHMETICS, ids=lambda a: a.value)
@pytest.mark.parametrize("name", [*LAYERS, *shapes.named()])
def test_more_kernels(name: str, arithmetic: Arithmetic, last: bool) -> None:
    if name in LAYERS:
        geometry, size, batch = LAYERS[name]
    else:
        shape = shapes.named()[name]
        geometry, size, batch = shape.geometry, shape.input_size, shape.batch
    for operation in OPERATIONS:
        assert_none(Problem(operation, geometry, arithmetic, last, last), size, batch, 2, 1)


def drawn(seed: int) -> tuple[Geometry, Triple, int]:
    """A layer with kernels of 1 to 7, strides of 1 to 3, few and many channels."""
    chosen = random.Random(seed)

    def three(values: list[int]) -> Triple:
        return (chosen.choice(values), chosen.choice(values), chosen.choice(values))

    kernel, stride = three([1, 1, 2, 3, 3, 4, 5, 7]), three([1, 2, 2, 3])
    k0, k1, k2 = (chosen.randint(0, (k - 1) // 2) for k in kernel)
    o0, o1, o2 = (chosen.randint(0, s - 1) for s in stride)
    channels = chosen.choice([3, 8, 16, 32, 64, 256]), chosen.choice([1, 3, 8, 20, 32, 64, 128])
    geometry = Geometry(*channels, kernel, stride, (k0, k1, k2), (o0, o1, o2))
    return geometry, three([4, 8, 13, 16, 28, 32, 56, 64]), chosen.choice([1, 2, 8])


@pytest.mark.full
@pytest.mark.parametrize("seed", range(30))
def test_drawn_layers(seed: int) -> None:
    geometry, size, batch = drawn(seed)
    arithmetic, last = [*ARITHMETICS, Arithmetic.F16][seed % 4], seed % 3 == 0
    for operation in OPERATIONS:
        assert_none(Problem(operation, geometry, arithmetic, last, last), size, batch, 1, 1)


# ---------------------------------------------------------------- planted bugs


def planted(spec: compiler.KernelSpec, old: str, new: str) -> list[Hazard]:
    text = compiler.flatten(spec.file)
    assert text.count(old) == 1, f"{spec.file} no longer contains {old}"
    return hazards(compile_ptx(spec, text.replace(old, new)))


def test_a_fetch_that_does_not_wait() -> None:
    geometry, size, batch = LAYERS["stem k377"]
    problem = Problem("grad_input", geometry, Arithmetic.TF32)
    spec = next(specs(problem, size, batch, 1))
    wait = "if constexpr (Reader::ahead && lines_together<Config> == 1) wgmma_wait<0>();"
    found = planted(spec, wait, "")
    assert {hazard.kind for hazard in found} == {"operand"}
    assert all("ld.shared" in hazard.instruction for hazard in found)
    # One group too many in flight.
    assert planted(spec, wait, wait.replace("<0>", "<1>"))


def test_a_copy_that_is_none() -> None:
    shape = shapes.named()["kb58"]
    problem = Problem("grad_weight", shape.geometry, Arithmetic.TF32)
    # Words are operands as they lie. With three fragments and more, fetches wait for products.
    wanted = {("CONVT3D_FRAGMENTS", "2"), ("CONVT3D_TARGET_FILL", "3")}
    found_specs = specs(problem, shape.input_size, shape.batch, 200)
    spec = next(spec for spec in found_specs if wanted <= {*spec.macros})
    assert not hazards_of(spec)
    found = planted(spec, "a[r] = wgmma_operand(raw[r]);", "a[r] = raw[r];")
    assert {hazard.kind for hazard in found} == {"operand"}
