"""Whole networks: what is measured in which process, the record, its lines and its tables."""

from __future__ import annotations

import itertools
import json
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import convt3d
from convt3d.bench import network_report, network_run, network_worker, networks
from convt3d.bench.network_profile import convolution_share
from convt3d.bench.network_run import Request
from convt3d.bench.network_worker import Job
from convt3d.bench.record import NetworkRecord as Record

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
JOB = Job("unet", "fp32", "ncdhw", False, True, "convt3d", 1, small=True, budget_s=0.0)


@pytest.fixture(autouse=True)
def tuning_stays(monkeypatch: pytest.MonkeyPatch, switches: None) -> list[str]:
    """What a measuring process does to itself may not reach other tests; what was asked for."""
    asked: list[str] = []
    monkeypatch.setattr(network_worker, "leave_untuned", lambda: asked.append("untuned"))
    return asked


@pytest.mark.parametrize("tuned", [False, True])
def test_layers_are_tuned_on_demand(tuned: bool, tuning_stays: list[str]) -> None:
    list(network_worker.rows(replace(JOB, tuned=tuned, kinds=("inference",))))
    assert tuning_stays == ([] if tuned else ["untuned"])


@pytest.mark.parametrize("name", networks.NETWORKS)
def test_networks_have_the_sizes_of_their_descriptions(name: str) -> None:
    network = networks.NETWORKS[name]
    with torch.device("meta"):
        full = network.build(False)
        y = full(torch.empty(network.size))
    small = network.build(True)
    assert small(network.input(True)).shape[0] == network.small[0]
    assert {type(m) for m in full.modules()} == {type(m) for m in small.modules()}
    wanted = {"unet": (2, 3, 128, 128, 128), "gan": (32, 1, 64, 64, 64)}
    assert tuple(y.shape) == wanted.get(name, tuple(y.shape))


def test_the_residual_encoder_has_the_blocks_of_nnunet() -> None:
    with torch.device("meta"):
        model = networks.ResidualUNet3d()
    blocks = [len(stage) for stage in model.encoder]
    assert blocks == [1, 3, 4, 6, 6, 6]
    convolutions = [m for m in model.decoder.modules() if isinstance(m, nn.Conv3d)]
    assert len(convolutions) == 5


# --- One process ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", ["ncdhw", "ndhwc"])
@pytest.mark.parametrize("side", network_worker.SIDES)
def test_rows_have_what_reports_need(mode: str, layout: str, side: str) -> None:
    # PyTorch's own gradients by weight in bf16 and channels_last vary from run to run on CPU, and
    # may be NaN: no steps with them.
    optimiser = (mode, layout) != ("bf16", "ndhwc")
    job = replace(JOB, mode=mode, layout=layout, side=side, optimiser=optimiser)
    rows = list(network_worker.rows(job))
    assert [row["kind"] for row in rows] == ["training", "inference"]
    assert [Record.key(row) for row in rows] == job.keys()
    for row in rows:
        assert "failed" not in row
        assert row["ms"] > 0 and row["first_s"] > 0 and row["runs"] >= 3
        assert row["input"] == [2, 1, 8, 8, 8]
        assert (row["conv_share"] is None) == (side == "convt3d")
        assert json.loads(json.dumps(row)) == row
    assert rows[0]["ms"] > rows[1]["ms"]  # a training step does more
    assert ("difference" in rows[1]) == (side == "convt3d")
    if side == "convt3d":
        assert rows[1]["difference"] < (1e-5 if mode == "fp32" else 1e-1)
        assert (rows[0]["warm_s"] is not None) == hasattr(convt3d, "warm")


def test_the_network_is_laid_out_converted_and_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[nn.Module] = []

    def compiled(model: nn.Module, **options: Any) -> nn.Module:
        fused = len(built) == 2
        assert options == {"dynamic": False, "backend": "convt3d" if fused else "inductor"}
        built.append(model)
        return model

    monkeypatch.setattr(torch, "compile", compiled)
    for side in (*network_worker.SIDES, network_worker.FUSED):
        job = replace(JOB, side=side, compiled=True, layout="ndhwc", kinds=("inference",))
        (row,) = network_worker.rows(job)
        assert row["compiled"] is True
    theirs, ours, fused = built
    kinds = (convt3d.Conv3d, convt3d.ConvTranspose3d)
    count = sum(isinstance(m, (nn.Conv3d, nn.ConvTranspose3d)) for m in theirs.modules())
    for converted in (ours, fused):
        assert sum(type(m) in kinds for m in converted.modules()) == count > 0
    assert not any(type(m) in kinds for m in theirs.modules())
    weight = next(p for p in ours.parameters() if p.dim() == 5 and p.shape[1] > 1)
    assert weight.is_contiguous(memory_format=torch.channels_last_3d)


def test_cuda_graphs_know_where_a_step_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def compiled(model: nn.Module, **options: Any) -> nn.Module:
        assert options.pop("mode", None) == "reduce-overhead"
        model.register_forward_pre_hook(lambda *_: told.append("call"))
        return model

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: told.append("step"))
    for kind in network_worker.KINDS:
        job = replace(JOB, side="pytorch", compiled=True, graphs=True, kinds=(kind,))
        (row,) = network_worker.rows(job)
        assert row["graphs"] is True and "failed" not in row
        assert row["conv_share"] is None and row["peak_mbytes"] is None
        assert len(told) >= 4 and told == ["step", "call"] * (len(told) // 2)
        told.clear()


def test_a_step_of_the_optimiser_changes_the_weights_and_training_alone_does_not() -> None:
    for mode, optimiser in (("fp32", False), ("fp32", True), ("fp16", True)):
        model = networks.NETWORKS["unet"].build(True)
        before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        x = networks.NETWORKS["unet"].input(True)
        network_worker.training_step(model, x, mode, optimiser)()
        after = nn.utils.parameters_to_vector(model.parameters())
        assert torch.equal(before, after) != optimiser
        assert all(p.grad is not None for p in model.parameters())


def test_what_fails_is_a_row_and_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_worker, "inference", lambda *_: _broken)
    done, failed = network_worker.rows(JOB)
    assert done["kind"] == "training" and "failed" not in done
    assert failed["kind"] == "inference"
    assert failed["failed"] == "KeyError: 'first line'"
    assert "ms" not in failed


def _broken() -> None:
    raise KeyError("first line")


def test_the_share_of_convolutions() -> None:
    x, w = torch.randn(2, 8, 12, 12, 12), torch.randn(8, 8, 3, 3, 3, requires_grad=True)

    def step() -> None:
        torch.conv3d(x, w).square().mean().backward()

    most = convolution_share(step, CPU, False)
    assert 0.5 < most["conv_share"] <= 1
    assert most["conv_ms"] > 0
    assert convolution_share(lambda: x @ x, CPU, False)["conv_share"] == 0
    assert convolution_share(step, CPU, True) == {"conv_ms": None, "conv_share": None}


# --- Processes, records, lines -------------------------------------------------------------------


def test_every_setting_has_processes_of_its_own() -> None:
    request = Request(["unet", "gan"], ["tf32", "bf16"], ["ncdhw", "ndhwc"])
    jobs = request.jobs()
    assert len(jobs) == 2 * 2 * 2 * 2 * 3
    assert [(job.side, job.part) for job in jobs[:3]] == [
        ("pytorch", 0), ("convt3d", 1), ("pytorch", 2)
    ]  # fmt: skip
    assert len(set(itertools.chain(*(job.keys() for job in jobs)))) == 2 * len(jobs)
    assert Job.from_json(jobs[5].to_json()) == jobs[5]
    once = replace(request, once=True, compiled=(True,), kinds=("training",)).jobs()
    assert len(once) == 2 * 2 * 2 * 2
    assert all(job.compiled and job.kinds == ("training",) for job in once)
    fused = replace(request, once=True, fused=True).jobs()
    assert [job.side for job in fused if job.compiled][:3] == [
        "pytorch",
        "convt3d",
        "convt3d fused",
    ]
    assert all(job.compiled for job in fused if job.side == network_worker.FUSED)
    assert [job.graphs for job in replace(request, graphs=True).jobs()] == [
        job.compiled for job in jobs
    ]


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """Measured in processes of their own, as on CUDA."""
    path = tmp_path_factory.mktemp("networks") / "networks.json"
    found = Record.create(path, ["bench", "--model", "unet"], "0123456789abcdef")
    request = Request(
        ["unet"], ["fp32"], compiled=(False,), kinds=("inference",), small=True, budget_s=0.0
    )
    network_run.measure(request, found)
    network_run.measure(request, found, lambda row: pytest.fail("measured again"))
    return found


def test_a_record_is_kept_on_disk(record: Record) -> None:
    assert record.path is not None
    again = Record.load(record.path)
    assert again.to_dict() == json.loads(json.dumps(record.to_dict()))
    assert again.environment["commit"]
    assert [row["side"] for row in again.rows.values()] == ["pytorch", "convt3d", "pytorch"]


def test_load_refuses_other_files(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"rows": [{"shape": "kb61"}]}')
    with pytest.raises(ValueError, match="not a record of networks"):
        Record.load(path)


def test_a_line_compares_ours_with_pytorchs_median(record: Record) -> None:
    first, ours, second = (dict(row) for row in record.rows.values())
    first |= {"ms": 20.0, "first_s": 9.0, "peak_mbytes": 8000.0, "conv_share": 0.75}
    second |= {"ms": 22.0, "first_s": 1.0}
    ours |= {"ms": 10.0, "first_s": 2.0, "warm_s": 3.0, "peak_mbytes": 6000.0, "conv_share": 0.5}
    fused = {**ours, "side": network_worker.FUSED, "part": 3, "ms": 9.0}
    (line,) = network_run.lines([second, fused, ours, first])
    assert (line.after, line.fused) == (10.0, 9.0)
    assert line.before == (20.0, 22.0)
    assert (line.pytorch, line.speedup) == (21.0, 2.1)
    assert line.first_s == (9.0, 5.0)  # the first process, and what warm took
    assert line.drift == pytest.approx(0.1)
    (graphs,) = network_run.lines(
        [{**row, "compiled": True, "graphs": True} for row in (first, ours)]
    )
    assert network_report.cells(graphs)[3] == "compiled, CUDA graphs"
    assert graphs.speedup == 2.0
    without = {name: value for name, value in first.items() if name != "graphs"}
    assert network_run.lines([without, ours]) == network_run.lines([first, ours])
    assert Record.key(without) == Record.key(first)
    assert " | ".join(network_report.cells(line)) == (
        "unet | inference | fp32 | eager | 21.0 ms | 10.0 ms | 2.10x | 75% | 50% | 8.00 GB | "
        "6.00 GB | 9.0 s | 5.0 s"
    )


def test_what_failed_is_in_the_table_of_the_terminal(record: Record) -> None:
    rows = [dict(row) for row in record.rows.values()]
    rows[1] = {k: v for k, v in rows[1].items() if k != "ms"} | {"failed": "no kernel"}
    (line,) = network_run.lines(rows)
    assert line.speedup is None
    assert "failed: no kernel" in _text(network_report.table(rows, record.environment))


def _text(table: object) -> str:
    from rich.console import Console

    console = Console(width=250)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


# --- Command line and documents ------------------------------------------------------------------


def call(*arguments: str) -> Any:
    from convt3d.cli import app

    return CliRunner().invoke(app, ["bench", "--device", "cpu", *arguments])


def test_bench_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def isolated(jobs: Any, record: Record, progress: Any, module: str, variables: Any) -> None:
        assert module == network_run.MODULE
        assert sorted(variables) == ["CONVT3D_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"]
        for job in jobs:
            for row in network_worker.rows(job):
                record.add(row)
                progress(row)

    monkeypatch.setattr(network_run.run, "run_isolated", isolated)
    out = tmp_path / "new" / "networks.json"
    result = call(
        "--model", "gan", "--small", "--no-compile", "--once", "--cold", "--dtype", "bf16",
        "--layout", "ndhwc", "--kinds", "training", "--optimiser", "--budget", "0",
        "--out", str(out), "--commit", "abc",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "training with optimiser" in result.output
    assert "bf16 ndhwc" in result.output
    assert "gan bf16 ndhwc training convt3d eager: " in result.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [row["side"] for row in rows] == ["pytorch", "convt3d"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "resnet"], "--model: unknown 'resnet'; known are unet, residual-unet"),
        (["--model", "unet", "--dtype", "fp64"], "--dtype: unknown 'fp64'"),
        (["--model", "unet", "--kinds", "sideways"], "--kinds: unknown 'sideways'"),
        (["--model", "unet", "--shape", "kb61"], "--shape has no say"),
    ],
)
def test_bench_model_refuses_in_one_sentence(arguments: list[str], message: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 1
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_loss_curves_are_compared_with_pytorchs_own_noise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "training_check.py"))
    curves = {
        "pytorch": 1.0, "other": 1.25, "deterministic": 1.5, "noise": 1.01, "convt3d": 1.25
    }  # fmt: skip

    def run(command: list[str], **_: object) -> Any:
        value = curves[command[-1]]
        share = {"conv_share": 0.5, "conv_ms": 1.0}
        found = {"input": [1], "losses": [[value]] * 3, "step_ms": value, **share}
        return type("Done", (), {"stdout": f"noise\n{json.dumps(found)}\n"})

    monkeypatch.setattr("subprocess.run", run)
    row = tool["_compare"]("unet", "tf32")
    assert row["distance"] == pytest.approx({"convt3d": 0.25, "noise": 0.01, "plans": 0.5})
    assert row["same_curve"] and row["within_plans"]
    curves["convt3d"] = 2.0
    row = tool["_compare"]("unet", "tf32")
    assert row["same_curve"] and not row["within_plans"]
    curves["convt3d"] = 3.0
    assert not tool["_compare"]("unet", "tf32")["same_curve"]
