"""The tool that times KernelBench's problems: which it finds, what it measures, and its table."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch._inductor import config

ROOT = Path(__file__).parents[1]

PROBLEM = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, channels, slope):
        super().__init__()
        self.layer = nn.{layer}(2, channels, 3, padding=1)
        self.norm = nn.{norm}(channels)
        self.slope = slope

    def forward(self, x):
        x = nn.functional.leaky_relu(self.layer(x), self.slope)
        return self.norm(x * 0.5)


batch_size, D, H, W = 64, 512, 512, 6


def get_inputs():
    return [torch.rand(batch_size, 2, D, H, W)]


def get_init_inputs():
    return [4, 0.2]
"""


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    """Two problems, and files that are none of this tool's."""
    for name, layer, norm in (
        ("10_up", "ConvTranspose3d", "Identity"),
        ("9_down", "Conv3d", "BatchNorm3d"),
        ("1_flat", "Conv2d", "Identity"),
    ):
        text = PROBLEM.replace("{layer}", layer).replace("{norm}", norm)
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


@pytest.fixture(name="tool")
def _tool(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(sys, "path", [str(ROOT / "tools"), *sys.path])
    tool = importlib.import_module("level2_bench")
    monkeypatch.setattr(tool.run, "run_isolated", _here)
    monkeypatch.setattr(_worker(), "leave_untuned", lambda: None)
    torch._dynamo.reset()
    with config.patch(force_disable_caches=True):
        yield tool


def _worker() -> Any:
    return importlib.import_module("level2_worker")


def _here(jobs: Any, record: Any, progress: Any, module: str, variables: Any) -> None:
    """Measures in this process, where the kernels of tests are; for ``run_isolated``."""
    assert module == "level2_worker" and variables["TORCHINDUCTOR_CACHE_DIR"]
    for job in jobs:
        job = type(job).from_json(job.to_json())
        for row in _worker().rows(job):
            record.add(row)
            progress(row)


def test_problems_are_those_with_three_dimensions(tool: Any, folder: Path) -> None:
    def names(*layers: str, only: str = "") -> list[str]:
        return [path.stem for path in tool.problems(folder, layers, only)]

    both = ("Conv3d", "ConvTranspose3d")
    assert names(*both) == ["9_down", "10_up"]
    assert names("Conv3d") == ["9_down"]
    assert names("ConvTranspose3d") == ["10_up"]
    assert names(*both, only="9, 1") == ["9_down"]


@pytest.mark.slow
def test_from_the_problem_to_the_table(
    tool: Any, folder: Path, epilogues: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = folder / "record.json"
    settings = "eager,convert,backend"
    command = [str(folder), "--small", "--only", "10", "--dtype", "fp32", "--settings", settings]
    command += ["--budget", "0", "--commit", "abc", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["level2_bench.py", *command])
    tool.main()
    record = tool.Level2Record.load(out)
    assert record.environment["commit"] == "abc"
    rows = {row["setting"]: row for row in record.rows.values()}
    assert list(rows) == settings.split(",")
    for row in rows.values():
        assert row["ms"] > 0 and row["first_s"] > 0 and row["runs"] >= 3
        assert row["error"] < 1e-6 and row["reference"] == "fp64"
    [site] = rows["backend"]["sites"]
    assert site["fused"] == ["leaky_relu", "mul_scalar"] and site["stopped"]
    assert "sites" not in rows["eager"]


def test_what_is_compiled_ahead_tells_what_was_fused(
    tool: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sites are kept where the measuring process finds its graph in a cache and lists none."""
    job = tool.Job(str(folder / "10_up.py"), "fp32", ("eager", "backend"), small=True)
    said = []

    def rows(job: Any) -> Iterator[dict[str, Any]]:
        said.append((job.ahead, job.settings))
        for setting in job.settings:
            row = {**job.base, "setting": setting, "first_s": 1.0}
            sites = [{"name": "layer", "layer": "", "fused": ["relu"], "stopped": "a mean"}]
            yield {**row, "sites": sites} if job.ahead else {**row, "ms": 2.0, "error": 0.0}

    monkeypatch.setattr(_worker(), "rows", rows)
    record = tool.Level2Record.create(None, [], None)
    assert tool.measure([job], record, 2) == []
    assert said == [(True, ("backend",)), (False, ("eager", "backend"))]
    eager, backend = record.rows.values()
    assert "sites" not in eager and tool.fused(backend) == "relu | a mean"


def test_the_model_is_kernelbenchs_unless_told(tool: Any, folder: Path) -> None:
    """In training mode batch norm mixes samples, so that all are compared."""
    worker = _worker()
    settings = ("eager", "convert")
    for evaluation in (False, True):
        job = worker.Job(
            str(folder / "9_down.py"), "bf16", settings, evaluation=evaluation, small=True
        )
        problem = worker.Problem(job, torch.device("cpu"))
        model = problem.build()
        assert problem.inputs[0].shape == (2, 2, 8, 8, 6)
        assert problem.inputs[0].dtype == next(model.parameters()).dtype == torch.bfloat16
        assert worker._mixes_samples(model) is not evaluation
        samples, wanted, _ = worker._reference(problem)
        assert samples == ([0, -1] if evaluation else slice(None))
        assert wanted.dtype == torch.float64
        error = torch.linalg.norm(problem.callable("convert")().double()[samples] - wanted)
        assert error < 0.02 * wanted.norm()


def test_what_fails_is_told(tool: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = _worker()
    monkeypatch.setitem(worker.SETTINGS, "convert", (True, "no such backend"))
    job = worker.Job(
        str(folder / "10_up.py"), "fp32", ("eager", "convert"), small=True, budget_s=0.0
    )
    eager, convert = worker.rows(job)
    assert eager["ms"] > 0 and "no such backend" in convert["failed"]
    environment = {"gpu": None, "cpu": "a processor", "cpu_threads": 1, "torch": "2", "commit": ""}
    console = Console(width=200)
    with console.capture() as captured:
        console.print(tool.table([eager, convert], "fp32", environment))
    assert "failed" in captured.get() and "10_up" in captured.get()


def test_errors_of_a_result_that_is_zero_are_absolute(tool: Any) -> None:
    assert tool._error({"error": 3e-6, "largest_error": 1e-3}) == "3e-06"
    assert tool._error({"error": 7e8, "largest_error": 1e-8}) == "1e-08 (absolute)"
    assert tool._error({"error": 3.0, "largest_error": 0.5}) == "3e+00"


def test_speedups_are_by_the_settings_of_one_problem(tool: Any) -> None:
    line = {"eager": {"ms": 6.0}, "compile": {"failed": "no memory"}, "backend": {"ms": 2.0}}
    assert tool.speedup(line, "eager", "backend") == 3.0
    assert tool.speedup(line, "compile", "backend") is None
