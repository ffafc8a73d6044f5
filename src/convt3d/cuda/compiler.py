"""Kernel sources to loaded kernels: NVRTC and a persistent cubin cache, through ``cuda.core``.

Compiling needs NVRTC but no GPU and no driver, so every kernel can be compiled for every supported
architecture on a plain CI machine. Nothing here touches the driver until :func:`load`.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pathlib
import re
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import torch

from convt3d.cuda.workers import Job, Workers
from convt3d.log import log_once, logger

KERNEL_DIRECTORY = pathlib.Path(__file__).parent / "kernels"
_INCLUDE = re.compile(r'^#include "([^"]+)"\n', re.MULTILINE)
_PRAGMA_ONCE = re.compile(r"^#pragma once\n", re.MULTILINE)


@dataclass(frozen=True)
class KernelSpec:
    """One kernel: a file of ``kernels/``, its ``extern "C"`` entry point and its macros."""

    file: str
    entry: str
    macros: tuple[tuple[str, str], ...]


def kernel_files() -> list[str]:
    """Every kernel file, as a path in ``kernels/``."""
    return _files(".cu")


def headers() -> list[str]:
    """Every header, as a path in ``kernels/``, which is how files include it."""
    return _files(".cuh")


def _files(suffix: str) -> list[str]:
    paths = KERNEL_DIRECTORY.rglob(f"*{suffix}")
    return sorted(path.relative_to(KERNEL_DIRECTORY).as_posix() for path in paths)


def name_of(file: str) -> str:
    """A kernel file's name as one word: ``phases`` and ``phases_pack`` are those of
    ``phases/kernel.cu`` and ``phases/pack.cu``.
    """
    return file.removesuffix(".cu").removesuffix("/kernel").replace("/", "_")


@functools.cache
def _read(name: str) -> str:
    return (KERNEL_DIRECTORY / name).read_text()


def flatten(file: str, overrides: Mapping[str, str] | None = None) -> str:
    """The text of a kernel file with our own headers inlined, each once.

    Files name headers by their paths in ``kernels/``.

    One self-contained string keeps include paths out of the compiler's options, so the program
    cache sees every byte that matters. ``overrides`` replaces headers by name.
    """
    if overrides:
        return _flatten(file, lambda name: overrides[name] if name in overrides else _read(name))
    return _flatten_once(file, _read)


def _flatten(file: str, read: Callable[[str], str]) -> str:
    seen: set[str] = set()

    def expand(name: str) -> str:
        text = read(name)
        text = _PRAGMA_ONCE.sub("", text)

        def include(match: re.Match[str]) -> str:
            header = match.group(1)
            if header in seen:
                return ""
            seen.add(header)
            return expand(header)

        return _INCLUDE.sub(include, text)

    return expand(file)


_flatten_once = functools.lru_cache(maxsize=256)(_flatten)


@functools.cache
def missing_library() -> str | None:
    """What keeps this machine from compiling or loading our kernels, in one sentence, or None."""
    if torch.version.hip is not None:  # its devices are called cuda, too
        return "this PyTorch is built for ROCm, and the kernels are for CUDA"
    try:
        import cuda.bindings.driver
        import cuda.bindings.nvrtc
        import cuda.core

        _, nvrtc, _ = cuda.bindings.nvrtc.nvrtcVersion()
    except Exception as error:
        return (
            f"NVRTC or its Python bindings are missing ({error}); PyTorch's operator runs instead: "
            "pip install convt3d[cu12] or convt3d[cu13] adds them"
        )
    if torch.cuda.is_available():  # else this asks what a GPU would do
        _, driver = cuda.bindings.driver.cuDriverGetVersion()
        if driver // 1000 < nvrtc:
            return (
                f"NVRTC is of CUDA {nvrtc}, and the driver of CUDA {driver // 1000} cannot load "
                "what it compiles: update the driver, or install the NVRTC of that CUDA"
            )
    return None


def architecture(capability: tuple[int, int]) -> str:
    """The compilation target of a GPU: ``sm_90a`` on Hopper (its own instructions), else plain."""
    major, minor = capability
    return f"sm_{major}{minor}" + ("a" if major == 9 else "")


def unwritable() -> str | None:
    """Why compiled kernels cannot be kept on disk, in one sentence; None if they can."""
    where = cache_directory()
    try:
        where.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=where):
            return None
    except OSError as error:
        return f"the kernel cache {where} cannot be written: {error.strerror or error}"


def cache_directory() -> pathlib.Path:
    """Where compiled kernels are kept: ``CONVT3D_CACHE_DIR``, else the user's cache folder.

    Users without a home (containers with any user id) get a path that can hold nothing.
    """
    chosen = os.environ.get("CONVT3D_CACHE_DIR")
    if chosen:
        return pathlib.Path(os.path.expanduser(chosen))  # a Dockerfile's ENV leaves ~ as it is
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (pathlib.Path(base) if base else pathlib.Path.home() / ".cache") / "convt3d"
    except RuntimeError:
        return pathlib.Path(os.devnull, "convt3d")


@functools.cache
def _program_cache(directory: pathlib.Path) -> Any:
    """The cubin cache on disk, or None where the folder cannot be used."""
    from cuda.core.utils import FileStreamProgramCache

    try:
        return FileStreamProgramCache(directory / "cubin")
    except OSError as error:
        log_once(f"kernels are compiled anew in every process: {directory} is unusable ({error})")
        return None


def _options(spec: KernelSpec, target: str) -> Any:
    from cuda.core import ProgramOptions

    return ProgramOptions(
        name=spec.file, arch=target, std="c++17", define_macro=[tuple(m) for m in spec.macros]
    )


@dataclass(frozen=True)
class Cubin:
    """The machine code of a program, and whether it was compiled now or found on disk."""

    code: bytes
    compiled: bool


class CompilationError(RuntimeError):
    """NVRTC refused a kernel; the message has its log."""


def compile_cubin(spec: KernelSpec, target: str, *, read_cache: bool = True) -> bytes:
    """The cubin of a kernel for one architecture, such as ``"sm_90a"``, made in this thread.

    It comes from the cache on disk where that has it, whole; else it is compiled and put there. A
    cache that cannot be read or written costs time, and is no error. ``read_cache=False`` compiles
    in any case, and replaces the entry.

    Raises:
        CompilationError: the compiler refused the source.
        ImportError, or cuda.core's own error: NVRTC is not installed.
    """
    return _obtain(spec, target, read_cache).code


_import_lock = threading.Lock()


def _obtain(spec: KernelSpec, target: str, read_cache: bool = True) -> Cubin:
    with _import_lock:  # cuda.core 1.2 fails where two threads are the first to import it
        import cuda.core  # noqa: F401
        from cuda.core.utils import make_program_cache_key

    text, options = flatten(spec.file), _options(spec, target)
    cache = _program_cache(cache_directory())
    key = make_program_cache_key(
        code=text, code_type="c++", options=options, target_type="cubin", extra_digest=_FORMAT
    )
    if read_cache and cache is not None:
        cubin = _cached(cache, key, spec)
        if cubin is not None:
            return Cubin(cubin, compiled=False)
    cubin = _compile(spec, target, text, options)
    if cache is not None:
        try:
            cache[key] = cubin + _digest(key, cubin)
        except OSError as error:
            log_once(f"the kernel cache could not be written: {error}")
    return Cubin(cubin, compiled=True)


def _compile(spec: KernelSpec, target: str, text: str, options: Any) -> bytes:
    from cuda.core import Program

    begin = time.perf_counter()
    program = Program(text, "c++", options)
    try:
        return bytes(program.compile("cubin").code)
    except Exception as error:
        raise CompilationError(f"compiling {spec.file} for {target} failed: {error}") from error
    finally:
        program.close()
        logger.debug("%s for %s: %.2f s of NVRTC", spec.file, target, time.perf_counter() - begin)


_FORMAT = b"cubin, then SHA-256 of key and cubin"
_DIGEST_SIZE = 32


def _digest(key: bytes, cubin: bytes) -> bytes:
    """What an entry ends with: a flipped bit in it must not become a wrong number."""
    return hashlib.sha256(key + cubin, usedforsecurity=False).digest()


def _cached(cache: Any, key: bytes, spec: KernelSpec) -> bytes | None:
    """The cubin of an entry, or None where there is none or it is damaged."""
    try:
        entry = cache.get(key)
    except OSError as error:
        log_once(f"the kernel cache could not be read: {error}")
        return None
    if entry is None:
        return None
    cubin, digest = bytes(entry[:-_DIGEST_SIZE]), bytes(entry[-_DIGEST_SIZE:])
    if digest == _digest(key, cubin):
        return cubin
    log_once(f"a damaged entry of {spec.file} in the kernel cache is compiled again")
    return None


# --- In the background ---------------------------------------------------------------------------

_compilers = Workers(max(2, os.cpu_count() or 1), "convt3d-compile")  # NVRTC releases the GIL
_requests: dict[tuple[Any, ...], Job[Cubin]] = {}  # until their kernels are loaded
_requests_lock = threading.Lock()


def request(spec: KernelSpec, target: str, *, urgent: bool = False) -> Future[Cubin]:
    """The cubin of a kernel, from the cache or from NVRTC, in a background thread.

    Whoever asks for a program that was asked for before gets the same future, until :func:`load`
    has taken the cubin to a device; kernels of one text, such as a product and its reduction, are
    one program. A program that failed is compiled again for who asks next.

    Args:
        spec: the kernel.
        target: the architecture, such as ``"sm_90a"``.
        urgent: go before all requests that are not; a launch waits.
    """
    key = _program(spec, target)
    with _requests_lock:
        job = _requests.get(key)
        if job is None or _failed(job.future):
            work = functools.partial(_obtain, spec, target)
            job = _requests[key] = _compilers.submit(work, urgent=urgent)
        elif urgent and not job.future.done():
            _compilers.urge(job)
    return job.future


def _program(spec: KernelSpec, target: str) -> tuple[Any, ...]:
    return (spec.file, flatten(spec.file), spec.macros, target, cache_directory())


def _failed(future: Future[Cubin]) -> bool:
    return future.done() and (future.cancelled() or future.exception() is not None)


def _forget_requests() -> None:
    """In a forked child, which has no threads that could finish them."""
    global _requests_lock, _load_lock
    _requests.clear()
    _requests_lock, _load_lock = threading.Lock(), threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_requests)


# --- On a device ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoadedKernel:
    """A kernel ready to launch on one device."""

    function: Any  # of the device's context
    object_code: Any  # keeps the module loaded


_loaded: dict[tuple[KernelSpec, int, int], LoadedKernel] = {}
_load_lock = threading.Lock()


def load(kernels: Sequence[tuple[KernelSpec, int]], device: int) -> list[LoadedKernel]:
    """Compile (or fetch) kernels, all at once, and load them on a device, once per process.

    Args:
        kernels: each with the dynamic shared memory, in bytes, that launches of it will ask for.
        device: CUDA device index; its context is current.
    """
    keys = [(spec, device, shared_bytes) for spec, shared_bytes in kernels]
    missing = [key for key in dict.fromkeys(keys) if key not in _loaded]
    if missing:
        _load_missing(missing, device)
    return [_loaded[key] for key in keys]


def _load_missing(keys: Sequence[tuple[KernelSpec, int, int]], device: int) -> None:
    target = architecture(torch.cuda.get_device_capability(device))
    cubins: dict[tuple[Any, ...], Future[Cubin]] = {}
    # The last one has most to compile: it begins first, for NVRTC parses one text at a time.
    for spec, _, _ in reversed(keys):
        program = _program(spec, target)
        if program not in cubins:
            cubins[program] = request(spec, target, urgent=True)
    wait(cubins.values())
    try:
        with _load_lock:
            for key in keys:
                spec, _, shared_bytes = key
                if key not in _loaded:  # else another thread was first
                    cubin = cubins[_program(spec, target)]
                    _loaded[key] = _load(spec, device, shared_bytes, target, cubin)
    finally:
        with _requests_lock:
            for program in cubins:
                _requests.pop(program, None)


def _load(
    spec: KernelSpec, device: int, shared_bytes: int, target: str, cubin: Future[Cubin]
) -> LoadedKernel:
    from cuda.core import ObjectCode

    try:
        object_code = ObjectCode.from_cubin(cubin.result().code, name=spec.file)
        kernel = object_code.get_kernel(spec.entry)
    except Exception as error:
        # Whatever the reason, the entry must not outlive its first failure.
        log_once(f"{spec.file} could not be loaded and is compiled again ({error})")
        again = compile_cubin(spec, target, read_cache=False)
        object_code = ObjectCode.from_cubin(again, name=spec.file)
        kernel = object_code.get_kernel(spec.entry)
    if shared_bytes > 48 * 1024:
        _allow_shared_memory(kernel, device, shared_bytes)
    return LoadedKernel(_function(kernel), object_code)


def _function(kernel: Any) -> Any:
    """The kernel in the current context, which is cheaper to launch than one of any context."""
    from cuda.bindings import driver

    status, function = driver.cuKernelGetFunction(kernel.handle)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"the kernel has no function in this context: {status.name}")
    return function


def _allow_shared_memory(kernel: Any, device: int, shared_bytes: int) -> None:
    from cuda.bindings import driver

    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    (status,) = driver.cuKernelSetAttribute(attribute, shared_bytes, kernel.handle, device)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(
            f"asking for {shared_bytes} bytes of shared memory failed: {status.name}"
        )
