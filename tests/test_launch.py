"""From plans to launches: parameter blocks, tensor maps, alignment, threads."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

pytest.importorskip("cuda.bindings.driver")

from cuda.bindings.driver import CUresult

from convt3d import reference
from convt3d.cuda import backend, driver, launch
from convt3d.cuda.compiler import KernelSpec
from convt3d.cuda.schedule import Gpu, Launch, Problem, Schedule, TensorMap
from convt3d.geometry import Geometry
from convt3d.layout import beyond_32_bits
from convt3d.precision import Arithmetic
from emulator import build
from emulator.gpu import EmulatedGpu
from emulator.harness import EmulatorError
from support import tf32

emulated = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))

GEOMETRY = Geometry(8, 8, (1, 1, 1))
PROBLEM = Problem("forward", GEOMETRY, Arithmetic.TF32)
SPEC = KernelSpec("ampere/gather/kernel.cu", "copy_by_tma", (("CONVT3D_NOTHING", "1"),))

HEADERS = build.device_text()
# Copies the source to the target through a workspace: one box in, one box out.
KERNEL = """
namespace convt3d {
extern "C" __global__ void copy_by_tma(float* target, float* scratch,
                                       const __grid_constant__ TensorMap map, int count) {
  extern __shared__ __align__(128) unsigned char bytes[];
  const uint32_t base = shared_address(bytes), barrier = base + 4 * count;
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, 1);
    mbarrier_init_fence();
    mbarrier_expect(barrier, 4 * count);
    tma_load_2d(base, map, 0, 0, barrier);
  }
  __syncthreads();
  mbarrier_wait(barrier, 0);
  for (int i = threadIdx.x; i < count; i += 32) {
    scratch[i] = float_of(load_shared(base + 4 * i));
    target[i] = scratch[i];
  }
}
}
"""


@dataclass
class CopyPlan:
    """Not a convolution: the output is the input."""

    problem: Problem = PROBLEM
    box: int = 16
    element: str = "float32"

    def schedule(self, batch: int, input_size: Sequence[int]) -> Schedule:
        rows = batch * self.problem.geometry.in_channels
        voxels = int(np.prod(input_size))
        sizes, strides = (voxels, rows), (4 * voxels,)
        described = TensorMap("source", self.element, sizes, strides, (self.box, rows))
        arguments = ("target", "scratch", described, np.int32(rows * voxels))
        shared = 4 * rows * voxels + 16
        return Schedule((Launch(SPEC, 1, 32, shared, arguments),), {"scratch": 4 * rows * voxels})

    def describe(self) -> dict[str, str]:
        return {"kernel": "copy"}


def copy(x: torch.Tensor, plan: CopyPlan | None = None) -> torch.Tensor:
    text = HEADERS + KERNEL
    w = torch.randn(GEOMETRY.weight_size)
    with EmulatedGpu([x, w], lambda *_: plan or CopyPlan(), edit=lambda *_: text):
        return backend.forward(x, w, None, GEOMETRY, False)


@emulated
def test_a_tensor_map_reaches_the_kernel() -> None:
    x = torch.randn(1, 8, 2, 2, 4)
    torch.testing.assert_close(copy(x), x, rtol=0, atol=0)


@emulated
def test_a_tensor_map_rounds_ties_to_even() -> None:
    x = tf32.ties(torch.randn(2, 8, 2, 2, 4))
    got = copy(x, CopyPlan(element="tfloat32"))
    torch.testing.assert_close(got, tf32.rounded(x), rtol=0, atol=0)


@emulated
def test_a_misaligned_tensor_is_copied_first() -> None:
    x = torch.randn(257)[1:].view(2, 8, 2, 2, 4)
    assert x.data_ptr() % 16
    torch.testing.assert_close(copy(x), x, rtol=0, atol=0)


@emulated
def test_the_box_counts_bytes() -> None:
    with pytest.raises(EmulatorError, match="mbarrier"):
        copy(torch.randn(1, 8, 2, 2, 4), CopyPlan(box=8))


@emulated
def test_weights_of_other_strides_are_launched_anew() -> None:
    geometry = Geometry(2, 2, (2, 1, 1))
    x, w, wide = torch.randn(1, 2, 2, 1, 2), torch.randn(2, 2, 2, 1, 1), torch.randn(2, 4, 2, 1, 1)
    other = wide[:, ::2]
    with EmulatedGpu([x, w, wide], arithmetic=Arithmetic.IEEE) as gpu:
        for weight in (w, other, w):
            got = backend.forward(x, weight, None, geometry, False)
            want = reference.forward(x, weight, None, geometry)
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    files = [spec.file for spec in gpu.launches]
    assert len(files) % 3 == 0 and files[: len(files) // 3] * 3 == files


def test_positions_of_a_channel_are_counted_in_32_bits() -> None:
    assert not beyond_32_bits((1, 1, 2**31 - 1), (2**10, 2**10, 2**11 - 1))
    assert beyond_32_bits((1, 1, 1), (2**10, 2**10, 2**11))
    assert beyond_32_bits((2**31, 1, 1), (1, 1, 1))


# ---------------------------------------------------------------- parameter blocks


class Recorder:
    """In place of the driver: decodes what each launch would read."""

    def __init__(self, *kinds: Any, status: Sequence[CUresult] = ()) -> None:
        self.kinds, self.seen = kinds, []
        self.status, self.lock = list(status), threading.Lock()

    def __call__(self, configuration: Any, function: Any, parameters: int, _: Any) -> Any:
        pointers = (ctypes.c_uint64 * len(self.kinds)).from_address(parameters)
        read = [k.from_address(p).value for k, p in zip(self.kinds, pointers, strict=True)]
        with self.lock:
            self.seen.append((function, int(configuration.hStream), *read))
            return (self.status.pop(0) if self.status else CUresult.CUDA_SUCCESS,)


@dataclass
class At:
    """A tensor at an address."""

    address: int

    def data_ptr(self) -> int:
        return self.address


def call_of(launches: Sequence[Launch], workspaces: dict[str, int] | None = None) -> launch.Call:
    bound = [(one, f"function {i}") for i, one in enumerate(launches)]
    return launch.Call(bound, workspaces or {}, (), 0, "a test", PROBLEM)


def run(call: launch.Call, recorder: Recorder, *addresses: int, stream: int = 7) -> list[int]:
    """Returns the addresses that were released, of workspaces, which come from 10**6 on."""
    released: list[int] = []
    with (
        mock.patch.object(driver, "launch_kernel", recorder),
        mock.patch.object(launch, "_current_stream", lambda _: stream),
        mock.patch.object(launch, "_acquire", lambda size, on: 10**6 + size + on),
        mock.patch.object(launch, "_release", released.append),
    ):
        call.run(*map(At, addresses))
    return released


def test_launches_share_addresses_and_keep_their_numbers() -> None:
    pack = Launch(SPEC, 3, 64, 0, ("weight", "packed", np.int32(-5), np.int64(2**40)))
    product = Launch(SPEC, 4, 32, 16, ("bias", "target", np.int32(6), np.float64(0.5)))
    call = call_of([pack, product], {"packed": 1000, "more": 10})
    seen = Recorder(ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int32, ctypes.c_int64)
    assert run(call, seen, 1000, 2000, 3000, 4000) == [10**6 + 1280 + 7]
    assert run(call, seen, 10, 20, 30, 40, stream=8) == [10**6 + 1280 + 8]
    (pack1, product1, pack2, product2) = seen.seen
    assert pack1 == ("function 0", 7, 2000, 10**6 + 1280 + 7, -5, 2**40)
    assert product1[:5] == ("function 1", 7, 4000, 3000, 6)
    assert product1[5] == np.float64(0.5).view(np.int64)
    assert pack2[:3] == ("function 0", 8, 20) and product2[2:4] == (40, 30)


def test_threads_never_share_a_parameter_block() -> None:
    """Each launch must read the addresses of its own call, whatever other threads do meanwhile."""
    one = Launch(SPEC, 1, 32, 0, ("source", "target"))
    call, threads, repeats = call_of([one, one]), 4, 50
    meet = threading.Barrier(threads)

    class Slow(Recorder):
        def __call__(self, *arguments: Any) -> Any:
            meet.wait()  # all have written their addresses
            return super().__call__(*arguments)

    seen = Slow(ctypes.c_uint64, ctypes.c_uint64)

    def work(number: int) -> None:
        for i in range(repeats):
            source, nothing = At(number * 1000 + i), At(0)
            call.run(source, nothing, source, nothing)

    with (
        mock.patch.object(driver, "launch_kernel", seen),
        mock.patch.object(launch, "_current_stream", lambda _: 0),
        ThreadPoolExecutor(threads) as pool,
    ):
        list(pool.map(work, range(threads)))
    wanted = sorted(n * 1000 + i for n in range(threads) for i in range(repeats) for _ in "ab")
    assert sorted(s[2] for s in seen.seen) == wanted
    assert all(s[2] == s[3] for s in seen.seen)


def test_a_thread_without_a_context_gets_one() -> None:
    call = call_of([Launch(SPEC, 1, 32, 0, ("source",))])
    seen = Recorder(ctypes.c_uint64, status=[CUresult.CUDA_ERROR_INVALID_CONTEXT])
    with mock.patch.object(driver, "bind_context") as bind:
        run(call, seen, 5, 0, 0, 0)
    bind.assert_called_once_with(0)
    assert len(seen.seen) == 2


def test_a_refused_launch_says_what_it_was() -> None:
    call = call_of([Launch(SPEC, 1, 32, 0, ("source",))])
    seen = Recorder(ctypes.c_uint64, status=[CUresult.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES])
    with pytest.raises(RuntimeError, match="a test failed: CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"):
        run(call, seen, 5, 0, 0, 0)
    run(call, seen, 6, 0, 0, 0)
    assert seen.seen[-1][2] == 6


def test_no_memory_for_workspaces() -> None:
    """PyTorch's own error and no launch; a launch that fails gives its workspaces back."""
    call = call_of([Launch(SPEC, 1, 32, 0, ("source", "packed"))], {"packed": 1000})
    seen = Recorder(ctypes.c_uint64, ctypes.c_uint64)
    full = torch.cuda.OutOfMemoryError("no memory, for a test")
    with (
        mock.patch.object(driver, "launch_kernel", seen),
        mock.patch.object(launch, "_current_stream", lambda _: 7),
        mock.patch.object(launch, "_acquire", mock.Mock(side_effect=full)),
        pytest.raises(torch.cuda.OutOfMemoryError, match="for a test"),
    ):
        call.run(*map(At, (5, 0, 0, 0)))
    assert not seen.seen
    assert run(call, seen, 6, 0, 0, 0) == [10**6 + 1024 + 7]
    assert seen.seen[-1][2] == 6
    released: list[int] = []
    seen.status = [CUresult.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES]
    with (
        mock.patch.object(driver, "launch_kernel", seen),
        mock.patch.object(launch, "_current_stream", lambda _: 7),
        mock.patch.object(launch, "_acquire", lambda size, on: 99),
        mock.patch.object(launch, "_release", released.append),
        pytest.raises(RuntimeError, match="OUT_OF_RESOURCES"),
    ):
        call.run(*map(At, (5, 0, 0, 0)))
    assert released == [99]


def test_tensor_maps_are_encoded_once_an_address() -> None:
    described = TensorMap("source", "bfloat16", (64, 8), (128,), (64, 8), 128)
    call = call_of([Launch(SPEC, 1, 32, 0, ("target", described, np.int32(1)))])
    encoded = []

    def encode(one: TensorMap, address: int) -> bytes:
        encoded.append(address)
        return address.to_bytes(8, "little") * 16

    seen = Recorder(ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int32)
    with mock.patch.object(driver, "encode", encode):
        for address in (16, 32, 32, 16, 48, 16):
            run(call, seen, address, 0, 0, 0)
    assert [s[3] for s in seen.seen] == [16, 32, 32, 16, 48, 16]
    assert encoded == [16, 32, 48]


def test_a_dependent_launch_may_overlap() -> None:
    plain, dependent = (Launch(SPEC, 5, 96, 1024, (), dependent=d) for d in (False, True))
    assert driver._configuration(plain, 0).numAttrs == 0
    configuration = driver._configuration(dependent, 0)
    assert configuration.numAttrs == 1
    (attribute,) = configuration.attrs
    assert attribute.id.name.endswith("PROGRAMMATIC_STREAM_SERIALIZATION")
    assert attribute.value.programmaticStreamSerializationAllowed == 1
    shape = (configuration.gridDimX, configuration.blockDimX, configuration.sharedMemBytes)
    assert shape == (5, 96, 1024)


@pytest.mark.parametrize(
    ("grid", "shared", "most"),
    [
        (72, 70_000, 1),  # fewer blocks than multiprocessors: two have no room on one
        (133, 50_000, 2),
        (264, 50_000, 2),
        (500, 30_000, 4),
        (72, 120_000, 1),  # has the room of one already
        (5000, 70_000, 3),  # several waves: as many as fit
    ],
)
def test_blocks_of_a_dependent_launch_spread_evenly(grid: int, shared: int, most: int) -> None:
    gpu = Gpu()
    launched = Launch(SPEC, grid, 96, shared, (), dependent=True).on(gpu)
    assert gpu.shared_per_multiprocessor // (launched.shared_bytes + 1024) == most
    assert shared <= launched.shared_bytes <= gpu.shared_per_block
    assert launched == Launch(SPEC, grid, 96, launched.shared_bytes, (), dependent=True)


@pytest.mark.parametrize("change", [{"dependent": False}, {"shared_bytes": 0}, {"grid": 100_000}])
def test_other_launches_ask_for_what_they_need(change: dict[str, Any]) -> None:
    launched = replace(Launch(SPEC, 72, 96, 70_000, (), dependent=True), **change)
    assert launched.on(Gpu()) == launched


def test_no_launch_is_dependent_before_hopper() -> None:
    launched = Launch(SPEC, 72, 96, 70_000, (), dependent=True)
    assert launched.on(Gpu((8, 0))) == replace(launched, dependent=False)


def test_blocks_that_cannot_be_kept_apart_ask_for_what_they_need() -> None:
    small = Gpu((12, 0), 84, shared_per_block=40_000, shared_per_multiprocessor=102_400)
    launched = Launch(SPEC, 72, 96, 30_000, (), dependent=True)
    assert launched.on(small) == launched
