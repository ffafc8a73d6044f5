"""From the package's kernel files to the text of an exported file."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from convt3d.cuda.compiler import KERNEL_DIRECTORY, flatten, headers
from convt3d.export.tidy.chunks import (
    NAMESPACE,
    Chunk,
    introduce_once,
    join,
    marked,
    ordered,
    split,
)
from convt3d.export.tidy.oracle import Macros, Oracle, compile_ptx, entries
from convt3d.export.tidy.preprocess import preprocess, qualifiers
from convt3d.export.tidy.shaker import Shaker
from convt3d.export.tidy.syntax import words
from convt3d.log import logger

_PACKAGES = ("tree_sitter", "tree_sitter_cuda", "pcpp", "clang_format")
_STYLE = "{BasedOnStyle: Google, ColumnLimit: 100, DerivePointerAlignment: false}"


@dataclass(frozen=True)
class Program:
    """Kernel files with the numbers that they are compiled with, once or several times.

    Attributes:
        files: in the order of their launches.
        macros: those that all builds have alike.
        builds: of each build, the macros that the text leaves open; the names are the same in all.
        target: an architecture such as ``"sm_90a"``.
    """

    files: tuple[str, ...]
    macros: Macros
    builds: tuple[Macros, ...]
    target: str


@dataclass(frozen=True)
class Tidied:
    """The text of several programs: what they share, and the rest of each."""

    common: str
    texts: tuple[str, ...]


def missing_packages() -> list[str]:
    """What this needs and Python does not find."""
    return [name for name in _PACKAGES if importlib.util.find_spec(name) is None]


def package_entries(program: Program) -> dict[Macros, dict[str, str]]:
    """The PTX of the package's own kernels, for each build of a program."""
    found = {}
    for build in program.builds:
        macros = dict(program.macros) | dict(build)
        entry: dict[str, str] = {}
        for file in program.files:
            ptx, _ = compile_ptx(flatten(file), program.target, tuple(macros.items()))
            entry |= entries(ptx)
        found[build] = entry
    return found


def tidied(
    programs: Sequence[Program], always: Sequence[str] = (), jobs: int | None = None
) -> Tidied:
    """The reduced text of programs; takes a minute or two for each.

    Args:
        programs: in the order of the file.
        always: names whose declarations stand in the common text, if any program has them.
        jobs: programs reduced at a time; default as many as there are cores.

    Raises:
        ImportError: packages of the extra ``tidy`` are missing.
        RuntimeError: the text does not give the PTX of the package's kernels.
    """
    missing = missing_packages()
    if missing:
        raise ImportError(
            f"tidying needs {', '.join(missing)}: pip install convt3d[tidy] adds what is missing"
        )
    jobs = min(len(programs), jobs or os.cpu_count() or 1)
    if jobs == 1:
        texts = [reduced(program) for program in programs]
    else:
        with multiprocessing.get_context("spawn").Pool(jobs) as pool:
            texts = pool.map(reduced, programs, chunksize=1)
    made = _shared(texts, set(always))
    for program, text in zip(programs, made.texts, strict=True):
        # In a file, each program has a namespace of its own within that of the common text.
        own = text.replace(f"namespace {NAMESPACE} {{", f"namespace {NAMESPACE}::own {{")
        _verify(program, made.common + own)
    return made


def reduced(program: Program) -> str:
    """The text of one program, as short as the passes make it."""
    sources = {name: marked(name, (KERNEL_DIRECTORY / name).read_text()) for name in headers()}
    sources["all"] = "".join(f'#include "{file}"\n' for file in program.files)
    text = flatten("all", sources)
    kept = {name: name for name, _ in program.builds[0]}
    architecture = int(program.target.removeprefix("sm_").rstrip("a")) * 10
    head = "".join(f"#define {name} {value}\n" for name, value in qualifiers(text).items())
    oracle = Oracle(program.target, package_entries(program))
    for choose in (True, False):
        macros = dict(program.macros) | kept
        try:
            start = head + preprocess(text, macros, architecture, choose)
        except ValueError:
            continue  # what the last file chooses depends on a macro that is left open
        if oracle.accepts(start):
            break
    else:
        raise RuntimeError(f"{program.files}: the preprocessed text gives other PTX")
    shaker = Shaker(start, oracle, lambda line: logger.info("%s: %s", program.files[-1], line))
    return shaker.run()


def _verify(program: Program, text: str) -> None:
    if not Oracle(program.target, package_entries(program)).accepts(text):
        raise RuntimeError(f"{program.files}: the tidied text gives other PTX than the package's")


def _shared(texts: Sequence[str], always: set[str]) -> Tidied:
    """Declarations that several programs have alike stand once, before all."""
    parts = [split(text) for text in texts]
    head = "\n".join(dict.fromkeys(line for h, _ in parts for line in h.splitlines()))
    lists = [chunks for _, chunks in parts]
    for name in always:
        # A program that does not use it may have lost a part of it.
        found = [c for chunks in lists for c in chunks if name in c.names]
        for chunk in found:
            chunk.text = max((c.text for c in found), key=len)
    where: dict[str, set[int]] = {}
    for i, chunks in enumerate(lists):
        for chunk in chunks:
            where.setdefault(_code(chunk), set()).add(i)
    alike = {code for code, found in where.items() if len(found) > 1}
    alike |= {_code(c) for chunks in lists for c in _closed(chunks, always)}
    alike -= {_code(c) for chunks in lists for c in chunks if "__global__" in c.text or not c.names}
    changed = True
    while changed:
        # What a shared declaration names must be shared as well, with all its overloads.
        left = [{n for c in chunks if _code(c) not in alike for n in c.names} for chunks in lists]
        named = {code: set(words(code.encode())) for code in alike}
        kept = {code for code in alike if not any(left[i] & named[code] for i in where[code])}
        changed = kept != alike
        alike = kept
    common: dict[str, Chunk] = {}
    for chunks in lists:
        for chunk in chunks:
            code = _code(chunk)
            if code in alike and len(chunk.text) > len(common.get(code, Chunk("", ())).text):
                common[code] = chunk
    own = [[c for c in chunks if _code(c) not in alike] for chunks in lists]
    first = ordered(list(common.values()))
    introduce_once([*first, *(chunk for chunks in own for chunk in chunks)])
    rest = tuple(_formatted(join("", chunks)) for chunks in own)
    return Tidied(_formatted(join(head, first)), rest)


def _closed(chunks: Sequence[Chunk], names: set[str]) -> list[Chunk]:
    """The declarations of these names, and of all that these declarations name."""
    found: list[Chunk] = []
    while more := [c for c in chunks if c not in found and names & set(c.names)]:
        found += more
        names = names | {word for chunk in more for word in words(chunk.text.encode())}
    return found


def _code(chunk: Chunk) -> str:
    """A declaration without the comments above it."""
    return re.sub(r"^(?:\s*//[^\n]*\n)+", "", chunk.text)


def _formatted(text: str) -> str:
    import clang_format

    command = [clang_format.get_executable("clang-format"), f"--style={_STYLE}"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    return done.stdout.strip("\n") + "\n"
