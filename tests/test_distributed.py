"""DTensor, DDP and FSDP2 over two processes (gloo, CPU)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.process import run_python

_needs = pytest.mark.skipif(
    not torch.distributed.is_available() or torch.__version__ < "2.5",
    reason="needs torch.distributed.tensor (torch 2.5)",
)


@_needs
@pytest.mark.parametrize("check", ["shardings", "tensor_parallel", "data_parallel"])
def test_two_processes(check: str, tmp_path: Path) -> None:
    code = f"from support.distributed_checks import run; run({check!r}, {str(tmp_path / 's')!r})"
    run_python(code)
