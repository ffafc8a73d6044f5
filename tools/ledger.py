"""The ledger of kernels: proof that a refactoring left the machine code as it was. Needs no GPU.

    python tools/ledger.py check                compiles every program and prints what changed
    python tools/ledger.py check --sample 40    the same for the quick ones, of every kernel file
    python tools/ledger.py write                the facts of the same programs, anew
    python tools/ledger.py write --choose       chooses the programs anew, too

``tests/support/ledger.py`` says what is frozen and why, and holds the map of renamed files, entries
and macros that a refactoring extends. ``check`` exits with 1 where anything changed.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import os
import pathlib
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "src"))
sys.path.insert(1, str(pathlib.Path(__file__).resolve().parent.parent / "tests"))
from convt3d.cuda import plan
from convt3d.cuda.epilogue import FUSING
from convt3d.cuda.schedule import OPERATIONS, Gpu, Plan, Problem
from convt3d.geometry import Geometry, Triple
from convt3d.precision import Arithmetic
from support import ledger
from support.ledger import Change, Facts, Program
from support.plans import spread

Feature = tuple[str, ...]
GPUS = {
    "sm_90a": Gpu(),
    "sm_80": Gpu((8, 0), 108, 166912, 167936),
}
ARITHMETICS = (Arithmetic.TF32, Arithmetic.BF16, Arithmetic.IEEE, Arithmetic.F16)
LAYOUTS = ((False, False), (True, True), (False, True), (True, False))  # channels_last
MOST = 200  # programs that choose() stops at, if every feature of the first kind is covered
MOST_TAPS = 200  # of a layer: kernels of more take long to compile
PLANS = 24  # of a problem and family, evenly over the ranking
LARGE = (64, 64, 64)


# --- Commands ------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("check", "write"))
    parser.add_argument("--sample", type=int, help="check only so many, those that compile quickly")
    parser.add_argument("--choose", action="store_true", help="write: choose the programs anew")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compiling processes")
    arguments = parser.parse_args()
    begin = time.perf_counter()
    if arguments.command == "write":
        programs = choose() if arguments.choose else [p for p, _ in ledger.read().lines]
        print(f"{len(programs)} programs after {time.perf_counter() - begin:.0f} s", flush=True)
        lines = list(zip(programs, measure_all(programs, arguments.jobs), strict=True))
        ledger.write(lines)
        report(lines)
        status = 0
    else:
        status = check(arguments.sample, arguments.jobs)
    print(f"{time.perf_counter() - begin:.0f} s")
    return status


def check(sample: int | None, jobs: int) -> int:
    known = ledger.read()
    lines = known.lines if sample is None else ledger.sample(known.lines, sample)
    same = known.nvrtc == ledger.nvrtc_version()
    if not same:
        print(
            f"the ledger is of NVRTC {known.nvrtc}, this is {ledger.nvrtc_version()}: only stacks, "
            "spills and warnings are compared"
        )
    found = measure_all([program for program, _ in lines], jobs)
    changes: list[Change] = []
    for (program, old), new in zip(lines, found, strict=True):
        here = ledger.compare(program, old, new, same_compiler=same)
        if any(change.field == "warnings" for change in here):
            print(*new.messages, sep="\n")
        changes += here
    table(changes)
    print(f"{len(lines)} programs, {len({c.label for c in changes})} kernels changed")
    return 1 if changes else 0


def table(changes: Sequence[Change]) -> None:
    """Prints the rows, every column as wide as its widest cell."""
    if not changes:
        return
    rows = [("kernel", "field", "old", "new")]
    rows += [(c.label, c.field, str(c.old), str(c.new)) for c in changes]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


def report(lines: Sequence[tuple[Program, Facts]]) -> None:
    """Prints what the ledger has, and everything that a reader should know of: spills, warnings."""
    entries = {(p.file, name) for p, facts in lines for name in facts.entries}
    print(
        f"{len(lines)} programs of {len({p.file for p, _ in lines})} files, {len(entries)} entries"
    )
    for program, facts in lines:
        for name, values in facts.entries.items():
            if values["stack"] or values["spills"]:
                print(
                    f"{program.label}: {name} has a stack of {values['stack']} bytes, "
                    f"{values['spills']} bytes of spills"
                )
        for message in facts.messages:
            print(f"{program.label}: {message}")


def measure_all(programs: Sequence[Program], jobs: int) -> list[Facts]:
    """The facts of all programs, in their order. NVRTC parses one text at a time: processes."""
    if jobs == 1:
        return [ledger.measure(program) for program in programs]
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        return pool.map(ledger.measure, programs, chunksize=1)


# --- Choosing ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """A program that some plan runs, and what it would bring to the ledger.

    ``first`` are features that the ledger must have, ``second`` those it has as far as they fit.
    """

    program: Program
    first: frozenset[Feature]
    second: frozenset[Feature]


def choose() -> list[Program]:
    """Programs that have every kernel file, entry, arithmetic, layout, operation and path.

    The plans of the named layers' forward passes come first; then, again and again, the candidate
    that has most of what is missing. Of equals, the one that was found first.
    """
    chosen = {c.program: c for c in named_plans()}
    pool = candidates()
    reached = extremes(pool)
    missing_first = frozenset().union(*(c.first for c in pool)) & reached
    missing_second = frozenset().union(*(c.second for c in pool))
    for candidate in chosen.values():
        missing_first -= candidate.first
        missing_second -= candidate.second
    while missing_first or (missing_second and len(chosen) < MOST):
        best = max(
            pool, key=lambda c: (len(c.first & missing_first), len(c.second & missing_second))
        )
        chosen[best.program] = best
        missing_first -= best.first
        missing_second -= best.second
    print(f"{len(pool)} candidates; {len(missing_second)} pairs of features are left out")
    programs = distinct(chosen)
    return programs + fused(programs)


STEPS = (
    "Scale<0,Float32>,Shift<1,Float32>,LeakyRelu<0>",
    "Add<0,{own}>,Silu",
    "Shift<0,{own}>,Gelu",
    "Mul<0,{own}>,Clamp<0>,AddScalar<2>,Tanh",
)
"""Fusions of the programs that :func:`fused` adds; ``{own}`` is the type of the output."""


def fused(programs: Sequence[Program]) -> list[Program]:
    """The first program of each kernel file that runs steps in its epilogue, with some of them."""
    found: dict[str, Program] = {}
    for program in sorted(programs, key=lambda p: (p.target != "sm_90a", p.label)):
        if program.file not in FUSING or program.file in found:
            continue
        steps = STEPS[len(found) % len(STEPS)].format(own=dict(program.macros)["TYPE"])
        macros = (*program.macros, ("FUSION", steps))
        found[program.file] = replace(program, case=f"{program.case}, fused", macros=macros)
    return list(found.values())


def distinct(programs: Iterable[Program]) -> list[Program]:
    """The programs by label, with a number in the cases that several have."""
    by_label = defaultdict(list)
    for program in programs:
        by_label[program.label].append(program)
    return [
        replace(program, case=f"{program.case} #{i}") if len(alike) > 1 else program
        for _, alike in sorted(by_label.items())
        for i, program in enumerate(alike, 1)
    ]


def named_plans() -> Iterator[Candidate]:
    """What runs the named layers' forward passes on contiguous tensors."""
    from convt3d.bench import shapes

    for name, shape in shapes.named().items():
        for arithmetic in (Arithmetic.TF32, Arithmetic.BF16):
            problem = Problem("forward", shape.geometry, arithmetic, bias=shape.bias)
            at = (problem, shape.batch, shape.input_size, Gpu())
            best = plan.ranked_plans(*at, first_only=True)[0]
            yield from programs_of(best, shape.batch, shape.input_size, "sm_90a", name)


def candidates() -> list[Candidate]:
    """Programs of all plans that bring a feature which those before them do not have."""
    found: dict[Program, Candidate] = {}
    seen: set[Feature] = set()
    for target, name, problem, batch, size in problems():
        for one in spread(plan.ranked_plans(problem, batch, size, GPUS[target]), PLANS):
            for candidate in programs_of(one, batch, size, target, name):
                features = candidate.first | candidate.second
                if not features <= seen:
                    seen |= features
                    found[candidate.program] = candidate
    return list(found.values())


def problems() -> Iterator[tuple[str, str, Problem, int, Triple]]:
    """Target, name of the layer, problem, batch and input size: named layers, then the tests'."""
    from convt3d.bench import shapes

    for shape in shapes.named().values():
        for operation, arithmetic in itertools.product(OPERATIONS, ARITHMETICS):
            for source, target in LAYOUTS[:2]:
                problem = Problem(operation, shape.geometry, arithmetic, source, target)
                yield "sm_90a", shape.name, problem, shape.batch, shape.input_size
    for i, (name, (geometry, size)) in enumerate(layers().items()):
        for j, (operation, arithmetic) in enumerate(itertools.product(OPERATIONS, ARITHMETICS)):
            # Arithmetics, layouts and sizes take turns, so that each operation meets them all.
            if (i + j) % 2:
                continue
            source, target = LAYOUTS[(i // 2 + j // 2) % len(LAYOUTS)]
            batch, extents = ((2, size), (4, LARGE))[(i // 8 + j // 2) % 2]
            bias = operation == "forward" and (i + j) % 3 > 0
            problem = Problem(operation, geometry, arithmetic, source, target, bias)
            yield "sm_90a", name, problem, batch, extents
    for i, (name, (geometry, size)) in enumerate(list(layers().items())[:16]):
        for j, operation in enumerate(OPERATIONS):
            last = (i + j) % 2 == 1
            arithmetic = ARITHMETICS[(i + j) % len(ARITHMETICS)]
            yield "sm_80", name, Problem(operation, geometry, arithmetic, last, last), 2, size


def layers() -> dict[str, tuple[Geometry, Triple]]:
    """The layers of the tests, each with a small input size (D, H, W)."""
    import test_compile_kernels
    import test_emulator_branches
    import test_emulator_canonical
    import test_emulator_mutations
    import test_emulator_ndhwc

    found = {name: (g, (16, 16, 16)) for name, g in test_compile_kernels.LAYERS.items()}
    for module in (
        test_emulator_ndhwc,
        test_emulator_branches,
        test_emulator_mutations,
        test_emulator_canonical,
    ):
        found |= module.LAYERS
    return {
        name: (geometry, size)
        for name, (geometry, size) in found.items()
        if math.prod(geometry.kernel_size) <= MOST_TAPS
    }


def programs_of(one: Plan, batch: int, size: Triple, target: str, name: str) -> Iterator[Candidate]:
    """The programs that a plan launches, with what each would bring."""
    problem = one.problem
    schedule = one.schedule(batch, size)
    for either in (schedule, *schedule.on_weights.values()):
        for spec in {launch.kernel.file: launch.kernel for launch in either.launches}.values():
            macros = tuple((n.removeprefix(ledger.PREFIX), v) for n, v in spec.macros)
            program = Program(f"{describe(problem)}, {name}", spec.file, target, macros)
            yield Candidate(program, *features(program, problem))


def describe(problem: Problem) -> str:
    """What is computed, in which arithmetic and layout."""
    return f"{problem.operation} {problem.arithmetic.value} {layout_of(problem)}"


def layout_of(problem: Problem) -> str:
    """The layout of the activations, or of the source, then the target."""
    last = (problem.source_channels_last, problem.target_channels_last)
    source, target = ("ndhwc" if each else "ncdhw" for each in last)
    return source if source == target else f"{source}-{target}"


#: Macros whose numbers are of the layer or of resources: they choose no path of the code.
_SIZES = ("KERNEL", "STRIDE", "PADDING", "DILATION", "SOURCE_CHANNELS", "TARGET_CHANNELS", "GROUPS")


def features(program: Program, problem: Problem) -> tuple[frozenset[Feature], frozenset[Feature]]:
    """Single features of a program, and pairs of them."""
    file, target = program.file, program.target
    arithmetic = problem.arithmetic.value
    layout = layout_of(problem)
    paths = {
        (name, value)
        for name, value in program.macros
        if name not in ("TYPE", "MATH") and not name.rstrip("012").startswith(_SIZES)
    }
    sides = {("geometry", side) for side in describe_geometry(problem.geometry)}
    if target != "sm_90a":
        return frozenset({(target, file)}), frozenset()
    first: set[Feature] = {
        (target, file, "arithmetic", arithmetic),
        (target, file, "layout", layout),
        (target, file, "operation", problem.operation),
    }
    second: set[Feature] = {
        (target, file, arithmetic, layout),
        (target, file, arithmetic, problem.operation),
        (target, file, problem.operation, layout),
    }
    first |= {(file, *side) for side in sides}
    if "pack" not in file:  # kernels that pack weights read few of the macros that they are given
        first |= {(file, *path) for path in paths}
        flags = {(name, value) for name, value in paths if value in ("0", "1")}
        second |= {(file, arithmetic, *pair) for pair in flags | sides}
    return frozenset(first), frozenset(second)


def describe_geometry(g: Geometry) -> Iterator[str]:
    """What layers are told apart by."""
    yield "kernel == stride" if g.kernel_size == g.stride else "overlapping"
    yield "strided" if max(g.stride) > 1 else "stride 1"
    if len(set(g.kernel_size)) > 1 or len(set(g.stride)) > 1:
        yield "anisotropic"
    if max(g.dilation) > 1:
        yield "dilated"
    if g.groups > 1:
        yield "depthwise" if g.groups == g.in_channels else "grouped"
    if g.in_channels_per_group % 8 or g.out_channels_per_group % 8:
        yield "odd channels"


def extremes(pool: Sequence[Candidate]) -> frozenset[Feature]:
    """The features to cover: of macros with more than two numbers, the least and the largest."""
    values = defaultdict(set)
    for feature in frozenset().union(*(c.first for c in pool)):
        values[feature[:-1]].add(feature[-1])
    kept: set[Feature] = set()
    for key, found in values.items():
        if len(found) > 2 and all(value.lstrip("-").isdigit() for value in found):
            found = {min(found, key=int), max(found, key=int)}
        kept |= {(*key, value) for value in found}
    return frozenset(kept)


if __name__ == "__main__":
    sys.exit(main())
