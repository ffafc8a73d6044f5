"""Tensor maps and overlapping launches through the driver itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

import test_launch
from convt3d.cuda import compiler, launch
from convt3d.cuda.operation import Operation
from convt3d.cuda.schedule import Launch, Schedule
from support import tf32

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0),
    reason="TMA needs compute capability 9.0",
)

HEADERS = '#include "device/barrier.cuh"\n#include "device/tma.cuh"\n'
# Each block says that others may start, waits a while, then writes; the reader doubles.
OVERLAP = """
#include "device/barrier.cuh"
#include "device/tma.cuh"
using namespace convt3d;
extern "C" __global__ void slow_write(const float* source, float* scratch, int count) {
  grid_dependency_launch();
  const long long begin = clock64();
  while (clock64() - begin < 200000) {}
  for (int i = threadIdx.x; i < count; i += 32) scratch[i] = source[i];
}
extern "C" __global__ void twice(const float* scratch, float* target, int count) {
  grid_dependency_wait();
  for (int i = threadIdx.x; i < count; i += 32) target[i] = 2.0f * scratch[i];
}
"""


@pytest.fixture(name="text")
def _text(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """What the compiler reads in place of the package's kernels, by file."""
    texts: dict[str, str] = {}
    read = compiler._read
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "_read", lambda name: texts.get(name) or read(name))
        patch.setattr(compiler, "_loaded", {})
        yield texts


def bind(plan: test_launch.CopyPlan, x: torch.Tensor) -> launch.Call:
    w = torch.empty(test_launch.GEOMETRY.weight_size)
    operation = Operation.of(plan.problem, x.shape[0], x.shape[2:], w.cuda())
    return launch.bind_plan(plan, operation)


def test_a_tensor_map_reaches_the_kernel(text: dict[str, str]) -> None:
    text["ampere/gather/kernel.cu"] = HEADERS + test_launch.KERNEL
    x = torch.randn(2, 8, 2, 2, 4, device="cuda")
    call = bind(test_launch.CopyPlan(), x)
    storage = torch.randn(x.numel() + 1, device="cuda")
    for source in (x, torch.randn_like(x), storage[1:].view_as(x), x):
        target = torch.full_like(x, torch.nan)
        call.run(source, target, target, None)
        torch.testing.assert_close(target, source, rtol=0, atol=0)


def test_a_tensor_map_rounds_ties_to_even(text: dict[str, str]) -> None:
    text["ampere/gather/kernel.cu"] = HEADERS + test_launch.KERNEL
    ties = tf32.ties(torch.randn(2, 8, 2, 2, 4))
    x, rounded = ties.cuda(), tf32.rounded(ties).cuda()
    target = torch.full_like(x, torch.nan)
    bind(test_launch.CopyPlan(element="tfloat32"), x).run(x, target, target, None)
    torch.testing.assert_close(target, rounded, rtol=0, atol=0)


class OverlapPlan(test_launch.CopyPlan):
    def schedule(self, batch: int, input_size: object) -> Schedule:
        count = np.int32(4096)
        write = Launch(
            replace(test_launch.SPEC, entry="slow_write"), 1, 32, 0, ("source", "scratch", count)
        )
        read = Launch(
            replace(test_launch.SPEC, entry="twice"), 1, 32, 0, ("scratch", "target", count), True
        )
        return Schedule((write, read), {"scratch": 4 * 4096})


def test_a_dependent_launch_sees_what_it_waits_for(text: dict[str, str]) -> None:
    text["ampere/gather/kernel.cu"] = OVERLAP
    x = torch.randn(1, 8, 8, 8, 8, device="cuda")
    call = bind(OverlapPlan(), x)
    target = torch.full_like(x, torch.nan)
    call.run(x, target, target, None)
    torch.testing.assert_close(target, 2 * x, rtol=0, atol=0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.run(x, target, target, None)
    for _ in range(3):
        x.normal_()
        target.fill_(torch.nan)
        graph.replay()
        torch.testing.assert_close(target, 2 * x, rtol=0, atol=0)
