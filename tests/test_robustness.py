"""Kernel cache, loading, forks: whatever goes wrong, a right result or a clear error.

NVRTC compiles for real; the driver is a stand-in, for this needs no GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC's bindings are not installed")

import cuda.core
from cuda.bindings import driver, nvrtc

from convt3d.cuda import compiler, workers
from support.process import environment, run_python

SPEC = compiler.KernelSpec("probe.cu", "convt3d_probe", (("VALUE", "1"),))
OTHER = compiler.KernelSpec("probe.cu", "convt3d_probe", (("VALUE", "2"),))
SOURCE = 'extern "C" __global__ void convt3d_probe(int* x) { x[threadIdx.x] = VALUE; }\n'
TARGET = "sm_80"

_missing = compiler.missing_library()
pytestmark = pytest.mark.skipif(_missing is not None, reason=str(_missing))


@pytest.fixture(autouse=True)
def _probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that compiles in no time."""
    read = compiler._read
    monkeypatch.setattr(compiler, "_read", lambda name: SOURCE if name == SPEC.file else read(name))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CONVT3D_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiler, "_requests", {})
    return tmp_path


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is logged."""
    lines: list[str] = []
    monkeypatch.setattr(compiler, "log_once", lines.append)
    return lines


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The file of every compilation that really happens."""
    files: list[str] = []
    function = compiler._compile

    def spy(spec: compiler.KernelSpec, *rest: Any) -> bytes:
        files.append(spec.file)
        return function(spec, *rest)

    monkeypatch.setattr(compiler, "_compile", spy)
    return files


def entries(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*") if path.is_file()]


# --- Cache folder --------------------------------------------------------------------------------


def test_an_entry_is_used_again(cache: Path, compiled: list[str], said: list[str]) -> None:
    first = compiler.compile_cubin(SPEC, TARGET)
    assert first[:4] == b"\x7fELF"
    assert compiler.compile_cubin(SPEC, TARGET) == first
    assert len(compiled) == len(entries(cache)) == 1
    compiler.compile_cubin(SPEC, "sm_86")
    compiler.compile_cubin(OTHER, TARGET)
    assert len(compiled) == len(entries(cache)) == 3
    assert not said


def test_no_usable_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[str], said: list[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    for folder in (tmp_path / "file", Path("/proc/none/convt3d")):
        monkeypatch.setenv("CONVT3D_CACHE_DIR", str(folder))
        assert compiler.compile_cubin(SPEC, TARGET)[:4] == b"\x7fELF"
        assert f"{folder} is unusable" in said[-1]
    assert len(compiled) == 2


def test_users_without_a_home(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    for name in ("CONVT3D_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with mock.patch.object(Path, "home", side_effect=RuntimeError("no home directory")):
        assert compiler.compile_cubin(SPEC, TARGET)[:4] == b"\x7fELF"
    assert "is unusable" in said[-1]


@pytest.mark.parametrize("call", ["os.replace", "tempfile.mkstemp", "pathlib.Path.read_bytes"])
def test_a_folder_that_turns_read_only_or_unreadable(
    call: str, cache: Path, compiled: list[str], said: list[str]
) -> None:
    first = compiler.compile_cubin(SPEC, TARGET)
    with mock.patch(call, side_effect=OSError(30, "Read-only file system")):
        assert compiler.compile_cubin(SPEC, TARGET) == first
        assert compiler.compile_cubin(OTHER, TARGET)[:4] == b"\x7fELF"
    assert "Read-only file system" in said[-1]
    assert compiler.compile_cubin(SPEC, TARGET) == first
    assert not any("entry-" in path.name for path in entries(cache))


@pytest.mark.skipif(sys.platform == "win32", reason="no limit on the size of files")
def test_a_full_disk(cache: Path, compiled: list[str], said: list[str]) -> None:
    """No file may pass 100 bytes: writing an entry fails half-way, and leaves nothing behind."""
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        first = compiler.compile_cubin(SPEC, TARGET)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert first[:4] == b"\x7fELF"
    assert "could not be written" in said[-1]
    assert not entries(cache)
    assert compiler.compile_cubin(SPEC, TARGET) == first  # with room again it is kept
    assert len(entries(cache)) == 1
    assert compiler.compile_cubin(SPEC, TARGET) == first
    assert len(compiled) == 2


def _flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@pytest.mark.parametrize(
    "damage",
    [_flipped, lambda data: data[:-1], lambda data: data[:100], lambda data: b"", lambda d: b"\0"],
    ids=["a flipped bit", "a byte missing", "cut short", "empty", "not a kernel"],
)
def test_a_damaged_entry(
    damage: Callable[[bytes], bytes], cache: Path, compiled: list[str], said: list[str]
) -> None:
    first = compiler.compile_cubin(SPEC, TARGET)
    (entry,) = entries(cache)
    whole = entry.read_bytes()
    entry.write_bytes(damage(whole))
    assert compiler.compile_cubin(SPEC, TARGET) == first
    assert "damaged" in said[-1]
    assert entry.read_bytes() == whole  # repaired
    assert compiler.compile_cubin(SPEC, TARGET) == first
    assert len(compiled) == 2


def test_an_entry_in_the_place_of_another(cache: Path, compiled: list[str]) -> None:
    ours = compiler.compile_cubin(SPEC, TARGET)
    (entry,) = entries(cache)
    compiler.compile_cubin(OTHER, TARGET)
    (other,) = set(entries(cache)) - {entry}
    other.write_bytes(entry.read_bytes())
    assert compiler.compile_cubin(OTHER, TARGET) != ours
    assert len(compiled) == 3


def test_two_processes_compile_at_once(cache: Path) -> None:
    code = f"""
import hashlib, pathlib, sys, time
from convt3d.cuda import compiler
compiler._read = lambda name: {SOURCE!r}
spec = compiler.KernelSpec("probe.cu", "convt3d_probe", (("VALUE", "1"),))
pathlib.Path(sys.argv[1]).touch()
while not pathlib.Path(sys.argv[2]).exists():
    time.sleep(0.001)
for i in range(5):
    print(hashlib.sha256(compiler.compile_cubin(spec, "sm_80", read_cache=False)).hexdigest())
"""
    marks = [str(cache / name) for name in "ab"]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code, mine, other],
            stdout=subprocess.PIPE,
            text=True,
            env=environment(CONVT3D_CACHE_DIR=str(cache / "kernels")),
        )
        for mine, other in (marks, marks[::-1])
    ]
    printed = [process.communicate(timeout=120)[0].split() for process in running]
    assert all(process.returncode == 0 for process in running)
    assert len(printed[0]) == 5
    assert len({*printed[0], *printed[1]}) == 1
    assert len(entries(cache / "kernels")) == 1


# --- Loading -------------------------------------------------------------------------------------


class FakeDriver:
    """Loads cubins except those of ``refused``, by their count."""

    def __init__(self, refused: int) -> None:
        self.refused = refused
        self.loaded: list[bytes] = []

    def from_cubin(self, cubin: bytes, name: str = "") -> Any:
        self.loaded.append(cubin)
        if len(self.loaded) <= self.refused:
            raise RuntimeError("CUDA_ERROR_NO_BINARY_FOR_GPU: no kernel image for this device")
        return mock.Mock()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], FakeDriver]:
    def make(refused: int) -> FakeDriver:
        fake = FakeDriver(refused)
        monkeypatch.setattr(cuda.core, "ObjectCode", fake)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
        monkeypatch.setattr(compiler, "_function", lambda kernel: kernel)
        monkeypatch.setattr(compiler, "_loaded", {})
        return fake

    return make


def test_a_cubin_that_the_driver_refuses_is_compiled_again(
    cache: Path, gpu: Callable[[int], FakeDriver], compiled: list[str], said: list[str]
) -> None:
    good = compiler.compile_cubin(SPEC, TARGET)
    fake = gpu(1)
    compiler.load([(SPEC, 0)], 0)
    assert fake.loaded == [good, good]
    assert len(compiled) == 2
    assert "no kernel image" in said[-1]
    compiler.load([(SPEC, 0)], 0)  # once per process
    assert len(fake.loaded) == 2


def test_a_driver_that_refuses_every_cubin_is_a_clear_error(
    cache: Path, gpu: Callable[[int], FakeDriver]
) -> None:
    gpu(99)
    for _ in range(2):  # and not remembered as loaded
        with pytest.raises(RuntimeError, match="no kernel image for this device"):
            compiler.load([(SPEC, 0)], 0)


def test_kernels_of_a_call_are_compiled_at_once(
    cache: Path, gpu: Callable[[int], FakeDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs wait for each other here: one after the other, the first would wait for ever."""
    fake, meet, compiled = gpu(0), threading.Barrier(2), []

    def compile_program(spec: compiler.KernelSpec, *_: object) -> bytes:
        compiled.append(spec.macros)
        meet.wait(timeout=60)
        return str(spec.macros).encode()

    monkeypatch.setattr(compiler, "_compile", compile_program)
    reduction = replace(SPEC, entry="convt3d_reduce")  # of the same text: the same program
    loaded = compiler.load([(SPEC, 0), (reduction, 0), (OTHER, 0), (SPEC, 0)], 0)
    assert sorted(compiled) == [SPEC.macros, OTHER.macros]
    assert fake.loaded == [str(spec.macros).encode() for spec in (SPEC, SPEC, OTHER)]
    assert loaded[0] is loaded[3] and len({id(kernel) for kernel in loaded}) == 3
    assert compiler.load([(OTHER, 0), (SPEC, 0)], 0) == [loaded[2], loaded[0]]
    assert len(compiled) == 2


# --- In the background ---------------------------------------------------------------------------


def test_who_asks_at_once_shares_one_compilation(cache: Path, compiled: list[str]) -> None:
    meet, found = threading.Barrier(8), []

    def ask(_: int) -> None:
        meet.wait(timeout=60)
        found.append(compiler.request(SPEC, TARGET).result(timeout=60))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(8)))
    assert len(compiled) == 1 and len({id(cubin) for cubin in found}) == 1
    assert found[0].compiled and found[0].code == compiler.compile_cubin(SPEC, TARGET)
    assert compiler.request(OTHER, TARGET).result().code != found[0].code


def test_a_launch_takes_what_the_background_compiled(
    cache: Path, gpu: Callable[[int], FakeDriver], compiled: list[str]
) -> None:
    fake = gpu(0)
    (cache / "cubin").write_text("in the way")  # only memory can have it
    future = compiler.request(SPEC, TARGET)
    compiler.load([(SPEC, 0)], 0)
    assert fake.loaded == [future.result().code] and len(compiled) == 1
    assert not compiler._requests  # the device has it


def test_what_failed_in_the_background_is_compiled_for_the_launch(
    cache: Path, gpu: Callable[[int], FakeDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, compile_program, failures = gpu(0), compiler._compile, [OSError("out of memory")]

    def fail_first(*arguments: Any) -> bytes:
        if failures:
            raise failures.pop()
        return compile_program(*arguments)

    monkeypatch.setattr(compiler, "_compile", fail_first)
    assert "out of memory" in str(compiler.request(SPEC, TARGET).exception(timeout=60))
    compiler.load([(SPEC, 0)], 0)
    assert len(fake.loaded) == 1


def test_an_error_in_the_source_is_told_by_the_launch(
    cache: Path, gpu: Callable[[int], FakeDriver]
) -> None:
    gpu(0)
    broken = replace(SPEC, macros=(("VALUE", "nothing"),))
    assert compiler.request(broken, TARGET).exception(timeout=60) is not None
    with pytest.raises(RuntimeError, match=r"compiling probe.cu for sm_80 failed"):
        compiler.load([(broken, 0)], 0)


def test_a_program_ends_while_kernels_wait() -> None:
    """Those that compile are awaited, for NVRTC would crash; those that wait are dropped."""
    code = """
import threading, time
from convt3d.cuda import compiler
begun = threading.Event()

def slow(spec, *_):
    begun.set()
    time.sleep(0.5)
    print("end", spec.macros)
    return b""

compiler._read = lambda name: ""
compiler._compile = slow
for i in range(100):
    compiler.request(compiler.KernelSpec("probe.cu", "p", (("A", str(i)),)), "sm_80")
begun.wait()
"""
    ended = run_python(code, CONVT3D_CACHE_DIR=os.devnull).count("end")
    assert 1 <= ended <= 2 * max(2, os.cpu_count() or 1)


def test_first_requests_of_a_process_come_at_once() -> None:
    code = """
from convt3d.cuda import compiler
compiler._read = lambda name: 'extern "C" __global__ void p() {}'
specs = [compiler.KernelSpec("probe.cu", "p", (("A", str(i)),)) for i in range(4)]
futures = [compiler.request(spec, "sm_80") for spec in specs]
print(sum(future.result().compiled for future in futures))
"""
    assert run_python(code, CONVT3D_CACHE_DIR=os.devnull).split() == ["4"]


def test_urgent_work_comes_first() -> None:
    pool, gate, order = workers.Workers(1, "test"), threading.Event(), []
    pool.submit(gate.wait)
    slow = [pool.submit(lambda i=i: order.append(i)) for i in range(3)]
    pool.submit(lambda: order.append("urgent"), urgent=True)
    pool.urge(slow[2])
    gate.set()
    for job in slow:
        job.future.result(timeout=60)
    assert order == ["urgent", 2, 0, 1]


@pytest.mark.parametrize(("of_driver", "runs"), [(12080, False), (13000, True), (14010, True)])
def test_a_driver_older_than_nvrtc(
    of_driver: int, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cubin of a newer CUDA would not load: PyTorch's operator runs, and the reason is told."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(driver, "cuDriverGetVersion", lambda: (0, of_driver))
    monkeypatch.setattr(nvrtc, "nvrtcVersion", lambda: (0, 13, 4))
    missing = compiler.missing_library.__wrapped__()
    assert (missing is None) is runs
    if missing:
        assert "the driver of CUDA 12 cannot load" in missing


def test_rocm_runs_pytorchs_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tensors say is_cuda, its devices a capability, and it has no driver of CUDA to ask."""
    monkeypatch.setattr(torch.version, "hip", "6.4.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    missing = compiler.missing_library.__wrapped__()
    assert missing == "this PyTorch is built for ROCm, and the kernels are for CUDA"


# --- Processes -----------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_fork_after_use() -> None:
    """A child that was forked after layers ran and kernels were compiled does both again."""
    code = """
import os, torch, convt3d
from convt3d.cuda import compiler
torch.set_num_threads(1)
compiler._read = lambda name: 'extern "C" __global__ void p() {}'
x, layer = torch.randn(2, 3, 4, 4, 4), convt3d.ConvTranspose3d(3, 2, 2, 2)

def use():
    y = layer(x)
    spec = compiler.KernelSpec("probe.cu", "p", (("A", "1"),))
    return y, compiler.request(spec, "sm_80").result().code

want = use()
child = os.fork()
got = use()
assert torch.equal(got[0], want[0]) and got[1] == want[1]
got[0].sum().backward()
if child == 0:
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print("same")
"""
    assert run_python(code).split()[-1] == "same"
