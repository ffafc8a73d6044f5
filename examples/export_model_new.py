"""Exports a layer as one self-contained file that needs PyTorch and nvcc, but not convt3d.

    python examples/export_model_new.py

Checks itself: the file holds the kernels, imports nothing of convt3d, and its ModelNew makes the
parameters of nn.ConvTranspose3d from the same seed. With a GPU and nvcc, it also runs the file.
"""

from __future__ import annotations

import runpy
import shutil
import tempfile
from pathlib import Path

import torch

from convt3d import export

PROBLEM = '''
import torch
import torch.nn as nn


class Model(nn.Module):
    """Upsamples a volume by two."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.up = nn.ConvTranspose3d(in_channels, out_channels, kernel_size=2, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x)


def get_inputs():
    return [torch.rand(2, 32, 16, 16, 16)]


def get_init_inputs():
    return [32, 16]
'''


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        problem, path = Path(folder) / "problem.py", Path(folder) / "model_new.py"
        problem.write_text(PROBLEM)
        made = export.export(export.from_problem(problem))
        path.write_text(made.text)
        print(f"{len(made.text) // 1024} KiB, kernels {made.digest}")
        assert "__global__" in made.text and "load_inline" in made.text
        assert "import convt3d" not in made.text

        given, new = runpy.run_path(str(problem)), runpy.run_path(str(path))
        models = []
        for kind in (given["Model"], new["ModelNew"]):
            torch.manual_seed(42)
            models.append(kind(*given["get_init_inputs"]()))
        pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
        if torch.cuda.is_available() and shutil.which("nvcc"):
            (x,) = (x.cuda() for x in given["get_inputs"]())
            y, wanted = models[1].cuda()(x), models[0].cuda()(x)
            torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4)
            print("its output equals PyTorch's")
        else:
            print("no GPU with nvcc here, so the file was not built")


if __name__ == "__main__":
    main()
