"""Compiles kernel text with g++ into a shared object that the harness can launch.

Objects are cached by the hash of everything that went into them, in ``CONVT3D_EMULATOR_CACHE`` or
a directory of this user under the system's temporary directory; writing is atomic, so that
parallel test processes can share it.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import getpass
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from convt3d.cuda import compiler

HERE = Path(__file__).parent
DEVICE = HERE / "device"
RUNTIME = HERE / "runtime"
KERNELS = compiler.KERNEL_DIRECTORY

#: Headers of the package that hold inline assembly; ours have the same paths from here.
REPLACED = tuple(
    f"device/{name}.cuh" for name in ("ptx", "barrier", "tma", "wgmma", "wgmma_mn_major")
)

#: Compiled objects that nobody has used for so long are deleted.
_KEEP_SECONDS = 12 * 3600

#: Dynamic shared memory of one block, in bytes: the most any GPU gives (sm_90's 227 KiB + 1).
DYNAMIC_SHARED_CAPACITY = 228 * 1024

_WARNINGS = ["-Wall", "-Wno-unknown-pragmas", "-Wno-attributes", "-Wno-unused-function"]
_COMMON = ["-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off"]
_COMMON += ["-fno-gnu-unique", "-fmax-errors=10"]
# Every load and store of the kernel calls the runtime; locals start poisoned; accesses are neither
# joined nor split, so that they are the kernel's own; no two locals share memory, so that registers
# that an asynchronous product holds stay its own.
_CHECKED = [
    "-fsanitize=thread",
    "--param=tsan-instrument-func-entry-exit=0",
    "-ftrivial-auto-var-init=pattern",
    "-fno-tree-vectorize",
    "-fno-tree-slp-vectorize",
    "-fno-store-merging",
    "-fno-tree-sra",
    "-fstack-reuse=none",
]
# What costs more time to compile than it saves in the run of a small test.
_QUICK = [
    "-fno-guess-branch-probability",
    "-fno-reorder-blocks",
    "-fno-ipa-profile",
    "-fno-ipa-pure-const",
    "-fno-ipa-reference",
    "-fno-tree-fre",
    "-fno-tree-ccp",
    "-fno-tree-copy-prop",
    "-fno-forward-propagate",
    "-fira-region=one",
]
_SANITIZED = [
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
]


Macros = Mapping[str, object] | Sequence[tuple[str, object]]


class Flavour(enum.Enum):
    """How a kernel is compiled: checked in this process, or sanitized in a process of its own."""

    CHECKED = "checked"
    SANITIZED = "sanitized"


class BuildError(RuntimeError):
    """g++ refused the kernel text; the message is the compiler's."""


@functools.cache
def cache_directory() -> Path:
    """The directory of compiled objects; created, and cleared of what is old, on first use."""
    named = os.environ.get("CONVT3D_EMULATOR_CACHE")
    path = Path(named or Path(tempfile.gettempdir()) / f"convt3d-emulator-{getpass.getuser()}")
    path.mkdir(parents=True, exist_ok=True)
    for entry in path.iterdir():
        with contextlib.suppress(OSError):  # another process may be at it, too
            if entry.stat().st_mtime < time.time() - _KEEP_SECONDS:
                entry.unlink()
    return path


def _with_line_markers(name: str, path: Path) -> str:
    """A source file's text, from which the compiler's messages still name file and line."""
    lines = [f'#line 1 "{name}"']
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        lines.append("" if line == "#pragma once" else line)
        if line.startswith("#include"):
            lines.append(f'#line {number + 1} "{name}"')
    return "\n".join(lines) + "\n"


def flatten(entry: Path, replaced: Iterable[str]) -> str:
    """One self-contained text of a kernel file; the headers ``replaced`` are the emulator's."""
    name = entry.relative_to(KERNELS).as_posix() if KERNELS in entry.parents else entry.name
    return compiler.flatten(
        name, {**_headers(tuple(replaced)), name: _with_line_markers(name, entry)}
    )


@functools.cache
def _headers(replaced: tuple[str, ...]) -> dict[str, str]:
    """The texts of all headers by name; those that are ``replaced`` are the emulator's."""
    paths = {header: KERNELS / header for header in compiler.headers()}
    paths |= {header: HERE / header for header in replaced}
    return {name: _with_line_markers(name, path) for name, path in paths.items()}


def device_text() -> str:
    """The emulator's intrinsics, all headers in one text."""
    texts = {name: (HERE / name).read_text() for name in REPLACED}
    everything = "".join(f'#include "{name}"\n' for name in REPLACED)
    return compiler.flatten("all", texts | {"all": everything})


@functools.cache
def kernel_text(file: str) -> str:
    """The flattened text of one of the package's kernels, with the emulator's intrinsics."""
    return flatten(KERNELS / file, REPLACED)


def _translation_unit(text: str, kernel: str, cluster: int) -> str:
    """Kernel text between the CUDA vocabulary and the entry point that the runtime calls.

    The blocks of a cluster run together, each with dynamic shared memory of its own.
    """
    names = sorted(set(re.findall(r"extern\s+__shared__[^;]*?(\w+)\s*\[\s*\]\s*;", text)))
    symbols = ["emulated_dynamic_shared"]
    for name in names:  # at file scope, or in a namespace of ours
        symbols += [name, f"_ZN7convt3d{len(name)}{name}E"]
    storage = "".join(
        f'      ".globl {symbol}\\n.type {symbol}, @object\\n{symbol}:\\n"\n' for symbol in symbols
    )
    return (
        f'#include "{DEVICE / "cuda.cuh"}"\n{text}\n#line 1 "entry"\n'
        f"#define CONVT3D_EMULATED_KERNEL {kernel}\n"
        f'#include "{DEVICE / "entry.cuh"}"\n'
        f"int emulator::cluster_blocks() {{ return {cluster}; }}\n"
        'asm(".section .tbss, \\"awT\\", @nobits\\n.balign 1024\\n"\n'
        f"{storage}"
        f'    ".zero {cluster * DYNAMIC_SHARED_CAPACITY}\\n.text\\n");\n'
    )


@functools.cache
def missing() -> str | None:
    """Why kernels cannot be built here, or None."""
    if not sys.platform.startswith("linux"):
        return "the emulator needs Linux"
    path = shutil.which("g++")
    if path is None:
        return "the emulator needs g++"
    if int(_output(path, "-dumpversion").split(".")[0]) < 12:
        return "the emulator needs g++ 12 or later"
    return None


@functools.cache
def _compiler() -> str:
    """The compiler's path, and in a second line its version."""
    reason = missing()
    if reason is not None:
        raise BuildError(reason)
    path = shutil.which("g++")
    assert path is not None
    return f"{path}\n{_output(path, '--version').splitlines()[0]}"


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _run(arguments: Sequence[str]) -> None:
    command = [_compiler().splitlines()[0], *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise BuildError(f"{' '.join(command)}\n{result.stderr}")


def _cached(suffix: str, ingredients: Sequence[str], make: Callable[[Path], Path]) -> Path:
    digest = hashlib.sha256("\0".join([_compiler(), *ingredients]).encode()).hexdigest()[:24]
    path = cache_directory() / f"{digest}{suffix}"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=cache_directory()) as scratch:
            made = make(Path(scratch))
            os.replace(made, path)
    else:
        os.utime(path)
    return path


@functools.cache
def _linker() -> tuple[str, ...]:
    """GNU gold, where there is one: it takes a third of the time of ld."""
    return ("-fuse-ld=gold",) if shutil.which("ld.gold") else ()


@functools.cache
def _header_texts() -> list[str]:
    return [path.read_text() for path in sorted(DEVICE.glob("*.cuh"))]


@functools.cache
def runtime_object(flavour: Flavour) -> Path:
    """The emulator's runtime as an object file; all its sources as one translation unit each."""
    sources = sorted(RUNTIME.glob("*.cpp"))
    headers = sorted(RUNTIME.glob("*.hpp"))
    options = [*_COMMON, *_WARNINGS]
    if flavour is Flavour.SANITIZED:
        options += ["-O1", "-g1", "-fsanitize=address"]
    else:
        options += ["-O3", "-march=native"]
        sources = [source for source in sources if source.name != "job.cpp"]

    def make(scratch: Path) -> Path:
        unit = scratch / "runtime.cpp"
        unit.write_text("".join(f'#include "{source}"\n' for source in sources))
        _run([*options, "-c", str(unit), "-o", str(scratch / "runtime.o")])
        return scratch / "runtime.o"

    texts = [path.read_text() for path in [*sources, *headers]] + _header_texts()
    return _cached(".o", [*options, *texts], make)


def build(
    text: str,
    kernel: str,
    macros: Macros,
    *,
    flavour: Flavour = Flavour.CHECKED,
) -> Path:
    """Compile kernel ``text`` for its entry point ``kernel``.

    ``macros`` are name and value, as given to NVRTC with ``-D``. Returns the path of a shared
    object (checked) or of an executable (sanitized). Raises BuildError with g++'s messages.
    """
    pairs = macros.items() if isinstance(macros, Mapping) else macros
    defines = [f"-D{name}={value}" for name, value in pairs]
    # -Og takes three quarters of the time of -O1 to compile, and kernels run as fast.
    options = ["-Og", "-g1", *_QUICK, *_COMMON, *_WARNINGS, "-fno-extern-tls-init"]
    options += _CHECKED if flavour is Flavour.CHECKED else _SANITIZED
    runtime = runtime_object(flavour)
    clustered = re.search(rf"__cluster_dims__\([^{{}};]*\b{kernel}\b", text)
    cluster = int(str(dict(pairs).get("CONVT3D_CLUSTER", 1))) if clustered else 1
    unit_text = _translation_unit(text, kernel, cluster)

    def make(scratch: Path) -> Path:
        unit = scratch / "kernel.cpp"
        unit.write_text(unit_text)
        _run([*options, *defines, "-c", str(unit), "-o", str(scratch / "kernel.o")])
        made = scratch / "kernel"
        checked = flavour is Flavour.CHECKED
        link = [*_linker(), "-shared", "-Wl,-Bsymbolic"] if checked else _SANITIZED
        _run([*link, str(scratch / "kernel.o"), str(runtime), "-o", str(made)])
        return made

    suffix = ".so" if flavour is Flavour.CHECKED else ".exe"
    return _cached(suffix, [unit_text, *defines, *options, runtime.name, *_header_texts()], make)
