"""DTensor, DDP and FSDP2 over two processes (gloo, CPU)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.process import run_python


@pytest.mark.skipif(
    not torch.distributed.is_available() or torch.__version__ < "2.5",
    reason="needs torch.distributed.tensor (torch 2.5)",
)
def test_two_processes(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    code = f"from support.distributed_checks import CHECKS, run; run([*CHECKS], {store!r})"
    run_python(code)
