"""The ledger: what the compiler makes of some 200 frozen kernels, one line of JSON a program.

A refactoring that moves, renames or rewords kernels must leave the machine code as it is; one that
changes code must not bring spills or serialised warpgroup products. The ledger tells both without a
GPU.

What is frozen is the compiler's input: a file of ``kernels/`` and its macros, with a label for
people. To freeze problems and ranks of plans would not do, because a new planner ranks others. The
price is that a refactoring which renames a file, an entry or a macro says so in :data:`RENAMES`,
and in :data:`ADDED` which macros a file has gained; then the code of the frozen programs is
compared. Whoever writes the ledger anew writes the new names, and empties both.

A program may have several entries, such as a product and its reduction. The hash of an entry's code
does not depend on names, comments or files (see :mod:`support.cubin`).
"""

from __future__ import annotations

import io
import json
import pathlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from convt3d.cuda import compiler
from support import cubin

PATH = pathlib.Path(__file__).resolve().parent.parent / "ledger.jsonl"
PREFIX = "CONVT3D_"  # of every macro; the ledger leaves it out

RENAMES: dict[str, dict[str, str]] = {
    "files": {},  # path in kernels/
    "entries": {},
    "macros": {},  # without PREFIX
    "values": {},  # of macros, where they name something in C++
}
"""Old names to new ones, since the ledger was written."""
ADDED: dict[str, dict[str, str]] = {}
"""Macros that a file (by its new name) has gained, with the value that gives its old code."""

FIELDS = ("code", "registers", "stack", "spills", "shared", "instructions", *cubin.OPCODES)
_KEPT = ("stack", "spills")  # what must not rise, whatever the compiler's version
# The compiler puts a warpgroup.arrive in, and the products stay asynchronous: NVRTC 13.0 does where
# 13.5 needs none.
_HARMLESS = {"C7519"}
_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_WARNING = re.compile(r"^(?!Remark).*(?:\bwarning\b|\(C\d{4}\)).*$", re.MULTILINE)
_CODE = re.compile(r"\(C\d+\)|#\d+(?:-D)?")


@dataclass(frozen=True)
class Program:
    """What is compiled. ``case`` tells people why; ``macros`` are without :data:`PREFIX`."""

    case: str
    file: str
    target: str
    macros: tuple[tuple[str, str], ...]

    @property
    def label(self) -> str:
        """What the program is called in tables: its kernel of today, case and architecture."""
        return f"{compiler.name_of(self.today.file)} {self.case}, {self.target}"

    @property
    def today(self) -> compiler.KernelSpec:
        """What the compiler is given, in the names of today; the entry does not matter to it."""
        macros, values = RENAMES["macros"], RENAMES["values"]
        file = RENAMES["files"].get(self.file, self.file)
        named = {macros.get(name, name): values.get(v, v) for name, v in self.macros}
        named |= ADDED.get(file, {})
        return compiler.KernelSpec(file, "", tuple((PREFIX + n, v) for n, v in named.items()))


@dataclass(frozen=True)
class Facts:
    """What the compiler made of a program.

    ``entries`` has a dictionary of :data:`FIELDS` for every entry. ``warnings`` are codes of the
    compiler, ``messages`` its sentences, which the ledger leaves out: they have names and lines.
    """

    entries: dict[str, dict[str, Any]]
    warnings: tuple[str, ...]
    messages: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Change:
    """A row of the table that ``check`` prints."""

    label: str
    field: str
    old: Any
    new: Any


@dataclass(frozen=True)
class Ledger:
    """The programs with their facts, and the compiler that these are of."""

    nvrtc: str
    lines: tuple[tuple[Program, Facts], ...]


def nvrtc_version() -> str:
    """The version of the NVRTC that compiles: of its package, else what the library says."""
    for package in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    return f"{major}.{minor}"


def measure(program: Program) -> Facts:
    """Compiles a program in this thread, without the cache on disk.

    Raises:
        RuntimeError: the compiler refused it.
    """
    spec = program.today
    try:
        return facts_of(*compiled(compiler.flatten(spec.file), spec, program.target))
    except Exception as error:
        raise RuntimeError(f"{program.label}: {error}") from error


def compiled(text: str, spec: compiler.KernelSpec, target: str) -> tuple[bytes, str]:
    """The cubin of a text with the macros of ``spec``, and what the compiler said."""
    from cuda.core import Program as Source
    from cuda.core import ProgramOptions

    macros, log = [tuple(macro) for macro in spec.macros], io.StringIO()
    options = ProgramOptions(
        name=spec.file, arch=target, std="c++17", define_macro=macros, ptxas_options=["-v"]
    )
    source = Source(text, "c++", options)
    try:
        return bytes(source.compile("cubin", logs=log).code), log.getvalue()
    finally:
        source.close()


def facts_of(code: bytes, log: str) -> Facts:
    """The facts in a cubin and in what the compiler said (with ptxas's option ``-v``)."""
    spills: dict[str, int] = {}
    entry = ""
    for line in log.splitlines():
        if found := _ENTRY.search(line):
            entry = found[1]
        if found := _SPILLS.search(line):
            spills[entry] = spills.get(entry, 0) + int(found[1]) + int(found[2])
    entries = {}
    for name, kernel in cubin.kernels(code).items():
        values = {**vars(kernel), **kernel.counts, "spills": spills[name]}
        entries[name] = {field: values[field] for field in FIELDS}
    messages = tuple(found[0].strip() for found in _WARNING.finditer(log))
    return Facts(entries, tuple(sorted({_warning_code(m) for m in messages})), messages)


def _warning_code(message: str) -> str:
    found = _CODE.search(message)
    return found[0].strip("()") if found else message


def compare(program: Program, old: Facts, new: Facts, *, same_compiler: bool) -> list[Change]:
    """What changed. Of another compiler's code, only rising stacks and spills, and new warnings."""
    changes = []
    names = RENAMES["entries"]
    before = {names.get(name, name): values for name, values in old.entries.items()}
    for name in sorted(before.keys() | new.entries.keys()):
        label = program.label if len(before) == 1 else f"{program.label}: {name}"
        if name not in before or name not in new.entries:
            changes.append(Change(label, "entry", name in before, name in new.entries))
            continue
        for key in FIELDS:
            was, now = before[name][key], new.entries[name][key]
            if now != was if same_compiler else key in _KEPT and now > was:
                changes.append(Change(label, key, was, now))
    added, gone = set(new.warnings) - set(old.warnings), set(old.warnings) - set(new.warnings)
    if not same_compiler:
        added -= _HARMLESS
    if added or (gone and same_compiler):
        changes.append(
            Change(program.label, "warnings", " ".join(old.warnings), " ".join(new.warnings))
        )
    return changes


def sample(lines: Sequence[tuple[Program, Facts]], n: int) -> list[tuple[Program, Facts]]:
    """``n`` programs that compile quickly, the same ones each time: every file is among the first.

    Files take turns; each gives its programs of least code first.
    """
    turns: dict[str, int] = {}
    order = []
    for program, facts in sorted(lines, key=lambda line: (_size(line[1]), line[0].label)):
        turns[program.file] = turns.get(program.file, 0) + 1
        order.append((turns[program.file], _size(facts), program.label, (program, facts)))
    return [line for *_, line in sorted(order, key=lambda item: item[:3])[:n]]


def _size(facts: Facts) -> int:
    return sum(values["instructions"] for values in facts.entries.values())


def read(path: pathlib.Path = PATH) -> Ledger:
    """The ledger in a file."""
    head, *rows = map(json.loads, path.read_text().splitlines())
    lines = []
    for row in rows:
        macros = tuple(_pair(item) for item in row["macros"].split())
        program = Program(row["case"], row["file"], row["target"], macros)
        entries = {
            name: dict(zip(head["fields"], values, strict=True))
            for name, values in row["entries"].items()
        }
        lines.append((program, Facts(entries, tuple(row["warnings"]))))
    return Ledger(head["nvrtc"], tuple(lines))


def _pair(item: str) -> tuple[str, str]:
    name, _, value = item.partition("=")
    return name, value


def write(lines: Iterable[tuple[Program, Facts]], path: pathlib.Path = PATH) -> None:
    """Writes a ledger of the installed compiler, in the names of today, sorted by label."""
    rows: list[dict[str, Any]] = []
    for program, facts in lines:
        spec = program.today
        rows.append(
            {
                "case": program.case,
                "file": spec.file,
                "target": program.target,
                "macros": " ".join(f"{n.removeprefix(PREFIX)}={v}" for n, v in spec.macros),
                "entries": {n: [v[key] for key in FIELDS] for n, v in facts.entries.items()},
                "warnings": facts.warnings,
            }
        )
    rows.sort(key=lambda row: (row["file"], row["target"], row["case"], row["macros"]))
    head = {"nvrtc": nvrtc_version(), "fields": FIELDS}
    path.write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in [head, *rows]))
