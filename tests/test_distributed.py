"""DTensor inputs, sharded by batch over two processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.process import run_python

_SCRIPT = """
import sys, torch, torch.distributed as dist, torch.multiprocessing as mp
import torch.nn.functional as F
import convt3d
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

def main(rank):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    plain = [torch.randn(s, dtype=torch.float64) for s in ((4, 4, 3, 4, 5), (4, 3, 3, 3, 3), (6,))]
    for placement in (Shard(0), Replicate()):
        results = []
        for function in (convt3d.conv_transpose3d, F.conv_transpose3d):
            x, w, b = (
                distribute_tensor(t, mesh, [p]).requires_grad_()
                for t, p in zip(plain, (placement, Replicate(), Replicate()))
            )
            y = function(x, w, b, 2, 1, 1, 2)
            assert y.placements == (placement,), y.placements
            gradients = torch.autograd.grad(y.square().sum(), (x, w, b))
            results.append([t.full_tensor() for t in (y, *gradients)])
        for ours, theirs in zip(*results):
            torch.testing.assert_close(ours, theirs)
    dist.destroy_process_group()

mp.start_processes(main, nprocs=2, start_method="fork")
print("done")
"""


@pytest.mark.skipif(
    not torch.distributed.is_available() or torch.__version__ < "2.5",
    reason="needs torch.distributed.tensor (torch 2.5)",
)
def test_sharded_by_batch(tmp_path: Path) -> None:
    script = f"import sys; sys.argv.append({str(tmp_path / 'store')!r})\n{_SCRIPT}"
    assert run_python(script).strip().endswith("done")
