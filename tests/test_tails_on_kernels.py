"""Random tails, folded by the graph pass, on the emulated kernels whose epilogues run them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.fx import Node

from convt3d import backends, fused_ops
from convt3d.arguments import normalise
from convt3d.compile import kernels
from convt3d.compile.base import FUSED
from convt3d.cuda.schedule import Gpu
from convt3d.precision import Arithmetic
from emulator import build
from emulator.gpu import EmulatedGpu, backend
from support.tails import Maker, traced
from test_compile_tails import check
from test_compile_tails import fused as folded

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))

KERNELS = SimpleNamespace(
    forward=backend.forward,
    grad_input=backend.grad_input,
    fused=backend.fused,
    prepare_fused=backend.prepare_fused,
)
TRANSPOSED = torch.ops.convt3d.conv_transpose3d_fused.default


class OnKernels(torch.fx.Interpreter):
    """Runs fused operators on the emulated GPU, and everything else as it is.

    Every other one runs as a later call of its kind does, with all decided, where kernels run the
    whole tail.
    """

    fused = prepared = seen = 0

    def run_node(self, n: Node) -> Any:
        if n.target not in FUSED.values():
            return super().run_node(n)
        arguments, _ = self.fetch_args_kwargs_from_env(n)
        tensors = fused_ops._tensors(arguments)
        # Under the dispatcher the emulator would not see what is allocated.
        wide = arguments[0].dtype == torch.float32
        arithmetic = Arithmetic.IEEE if wide else Arithmetic.BF16
        gpu = EmulatedGpu(tensors, arithmetic=arithmetic)
        with gpu, mock.patch.object(backends, "portable", KERNELS):
            call = fused_ops.Call(normalise, n.target is TRANSPOSED, arguments)
            run = call.prepared() if OnKernels.seen % 2 else None
            OnKernels.seen += 1
            if run is None:
                result = call.run()
            else:
                layer = (call.source, call.weight, call.bias)
                result = run(layer, call.operands, call.before, call.after)
                OnKernels.prepared += 1
        expected = kernels.operation_of(n)
        assert expected is not None
        launches = expected._replace(arithmetic=arithmetic).launches(Gpu())
        assert [launch.kernel for launch in launches] == gpu.launches
        OnKernels.fused += 1
        return result


def check_on_kernels(seed: int) -> int:
    """Check one seed; how many operators ran on kernels."""
    case = Maker(seed).case()
    if case.dtype == torch.float64:  # kernels have no float64
        return 0
    graph, sites = folded(case)
    if not any(site.fused for site in sites):
        return 0
    OnKernels.fused = 0
    with mock.patch("test_compile_tails.Interpreter", OnKernels):
        check(case, graph, traced(case))
    assert OnKernels.fused == sum(bool(site.fused) for site in sites)
    return OnKernels.fused


@pytest.mark.sample
@pytest.mark.usefixtures("epilogues", "saved_passes")
@pytest.mark.parametrize("start", range(0, 24, 4))
def test_random_tails_on_emulated_kernels(start: int) -> None:
    OnKernels.prepared = OnKernels.seen = 0
    assert sum(map(check_on_kernels, range(start, start + 4))) > OnKernels.prepared
    assert OnKernels.prepared or OnKernels.seen < 2


@pytest.mark.full
@pytest.mark.usefixtures("epilogues", "saved_passes")
@pytest.mark.parametrize("start", range(24, 2024, 20))
def test_many_random_tails_on_emulated_kernels(start: int) -> None:
    assert sum(map(check_on_kernels, range(start, start + 20))) > 0
