"""The command line, ``explain`` and ``doctor``."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import convt3d
from convt3d import doctor, portable
from convt3d.bench import shapes
from convt3d.explanation import explain, geometry_of
from convt3d.geometry import Geometry
from support import records

SMALL = "n=1,in=4,out=6,size=3x4x5,k=3,s=2,p=1"


def call(*arguments: str) -> Result:
    from convt3d.cli import app

    return CliRunner().invoke(app, list(arguments))


def test_bench_prints_a_table_and_writes_a_record(tmp_path: Path) -> None:
    out = tmp_path / "results" / "record.json"
    result = call(
        "bench", "--shape", SMALL, "--device", "cpu", "--budget", "0.01", "--out", str(out)
    )
    assert result.exit_code == 0, result.output
    for word in ("forward", "grad_input", "grad_weight", "speed-up", "of limit"):
        assert word in result.output
    rows = json.loads(out.read_text())["rows"]
    assert {row["contender"] for row in rows} == {"convt3d", "default", "polyphase"}


def test_bench_json(tmp_path: Path) -> None:
    result = call(
        "bench", "--shape", SMALL, "--device", "cpu", "--budget", "0.01", "--json", "--no-peers",
        "--passes", "forward", "--dtype", "fp64", "--commit", "abc",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert [row["pass"] for row in record["rows"]] == ["forward"]
    assert record["rows"][0]["mode"] == "fp64"


def test_bench_keeps_the_record_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from convt3d.bench import run

    out = tmp_path / "record.json"
    arguments = (
        "bench", "--shape", SMALL, "--device", "cpu", "--budget", "0", "--passes", "forward",
        "--no-peers", "--out", str(out),
    )  # fmt: skip
    assert call(*arguments).exit_code == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert row["runs"] == 3  # of a budget of 0
    before = out.read_bytes()
    measure = run.run
    monkeypatch.setattr(run, "run", lambda *_: pytest.fail("measured"))
    result = call(*arguments)
    assert result.exit_code == 1
    assert f"{out} exists; --resume keeps its rows, --force replaces them" in result.stderr
    assert out.read_bytes() == before
    monkeypatch.setattr(run, "run", measure)
    assert call(*arguments, "--resume", "--dtype", "fp64").exit_code == 0
    rows = json.loads(out.read_text())["rows"]
    assert [r["mode"] for r in rows] == ["fp32", "fp64"]
    assert rows[0] == row
    assert call(*arguments, "--force", "--dtype", "fp64").exit_code == 0
    assert [r["mode"] for r in json.loads(out.read_text())["rows"]] == ["fp64"]


@pytest.mark.more
@records.needed
def test_plot_draws_a_record_without_measuring(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    record = records.RESULTS / "h200-forward-tf32.json"
    out = tmp_path / "new" / "plot.svg"
    result = call("plot", str(record), "--out", str(out))
    assert result.exit_code == 0, result.output
    assert "NVIDIA H200" in out.read_text()
    no_facts = {"environment": {}, "command": [], "started": "", "rows": []}
    strange = json.loads(record.read_text())
    for row in strange["rows"]:
        del row["geometry"]
    for values in ({}, [], no_facts, strange):
        (tmp_path / "none.json").write_text(json.dumps(values))
        result = call("plot", str(tmp_path / "none.json"), "--out", str(out))
        assert result.exit_code == 1
        assert "none.json is not a benchmark record" in result.stderr
        assert isinstance(result.exception, SystemExit)
    result = call("plot", str(record), "--out", str(tmp_path / "plot.gif"))
    assert result.exit_code == 1
    assert "plot.gif: plots are written as .png, .svg, .pdf" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "kb99"], "unknown shape 'kb99'"),
        (["--dtype", "int8"], "--dtype: unknown 'int8'"),
        (["--peers", "nobody"], "--peers: unknown 'nobody'"),
        (["--passes", "sideways"], "--passes: unknown 'sideways'"),
        (["--passes", ","], "--passes names nothing"),
        (
            ["--shape", "in=2,out=2,size=2,k=1,n=0"],
            "the batch of 'in=2,out=2,size=2,k=1,n=0' is empty",
        ),
        (["--out", "/proc", "--resume"], "--out: /proc is a folder"),
        (["--out", "/proc", "--force"], "--out: /proc is a folder"),
        (["--no-ours", "--no-peers"], "nothing to measure"),
        (["--no-ours"], "--no-ours has no table, which compares with ours: give --json or --out"),
        (["--shape", "in=2,out=2,size=4,k=2,conv=2"], "'conv=2' in shape"),
        (["--shape", "in=2,out=2,size=4,k=2,in=3"], "has in twice"),
        (["--device", "cuda:99"], "this machine has no usable GPU 'cuda:99'"),
        (["--device", "meta"], "'meta' is neither cpu nor cuda"),
        (["--out", "/proc/none/record.json"], "--out: "),
        (["--resume"], "--resume needs --out"),
        (["--out", "new.json", "--resume", "--force"], "give one of them"),
        (["--budget", "inf"], "--budget: give a finite number of seconds"),
        (["--plot", "x.gif"], "x.gif: plots are written as .png, .svg, .pdf"),
    ],
)
def test_bench_refuses_in_one_sentence(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from convt3d.bench import run

    monkeypatch.setattr(run, "run", lambda *_: pytest.fail("measured"))
    result = call("bench", "--device", "cpu", *arguments)
    assert result.exit_code == 1
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_bench_fails_when_a_result_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    from convt3d.bench import numerics

    exact = numerics.ours
    monkeypatch.setattr(numerics, "ours", lambda op, t: exact(op, t) * 1.001)
    result = call("bench", "--shape", SMALL, "--device", "cpu", "--budget", "0.01", "--no-peers")
    assert result.exit_code == 1
    assert "less exact" in result.stderr


def test_explain_on_cpu() -> None:
    result = call("explain", "kb77", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert re.search(r"phase +D, H, W\n +0 +\. \. \.\n +1 +0 1 2\n", result.output)
    assert "7 of 8 phases have no tap: what lies there is the bias, or zero." in result.output
    assert portable.POLYPHASE in result.output
    assert "26.64 GFLOP" in result.output


def test_explain_a_conv3d_on_cpu() -> None:
    result = call("explain", "conv_nnunet_32_64_s2", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "A position of grad_input at o has phase o mod stride" in result.output
    assert re.search(r"phase +D, H, W\n +0 +\. 1 \.\n +1 +0 \. 2\n", result.output)
    said = "forward, grad_input, grad_weight: off CUDA, PyTorch's own operator runs a Conv3d.\n"
    assert said in result.output
    result = call("explain", "conv")
    assert result.exit_code == 1
    assert "'conv' stands for 26 layers" in result.stderr


def test_explain_a_conv3d_names_the_kernels_of_its_transposed_layer() -> None:
    pytest.importorskip("cuda.core")
    module = torch.nn.Conv3d(32, 64, 3, stride=2, padding=1, bias=True)
    explanation = explain(module, (2, 32, 32, 32, 32), torch.bfloat16, device="cuda")
    assert explanation.shape.y_size == (2, 64, 16, 16, 16)
    kernels = {"forward": "grad_input", "grad_input": "forward", "grad_weight": "grad_weight"}
    ours = [choice for choice in explanation.choices if choice.runs_as != portable.PYTORCH]
    assert ours
    for choice in ours:
        operation = kernels[choice.operation]
        wanted = f"{operation} of the transposed layer 64->32 k3 s2 p1 op1 d1 g1"
        assert choice.facts["kernels of"] == wanted
        assert choice.facts["arithmetic"] == "bf16"
    left = [choice for choice in explanation.choices if choice not in ours]
    assert all(choice.reason and not choice.facts for choice in left)
    with pytest.raises(RuntimeError, match="to have 32 channels"):
        explain(module, (2, 3, 32, 32, 32))


def test_geometry_of_a_conv3d_with_padding_in_words() -> None:
    same = torch.nn.Conv3d(4, 6, (3, 5, 1), padding="same", dilation=(2, 1, 1))
    assert geometry_of(same).padding == (2, 2, 0)
    assert not geometry_of(same).transposed
    assert geometry_of(torch.nn.Conv3d(4, 6, 3, padding="valid")).padding == (0, 0, 0)
    with pytest.raises(RuntimeError, match="of an even kernel"):
        geometry_of(torch.nn.Conv3d(4, 6, 2, padding="same"))


def test_explain_json_counts_the_work() -> None:
    shape = shapes.named()["kb61"]
    result = call("explain", "kb61", "--device", "cpu", "--json")
    facts = json.loads(result.stdout)
    assert facts["operations"] == shape.operations
    assert facts["bytes"] == shape.traffic(4)
    assert set(facts["choices"]) == {"forward", "grad_input", "grad_weight"}
    assert facts["choices"]["forward"]["reason"]


@pytest.mark.sample(every=6)
@pytest.mark.parametrize(
    "name",
    [
        *("kb61", "kb72", "kb73_g4", "kb77", "nnunet_64_32", "gan_512_256_k4", "pangu_384_5"),
        *("dw_64_k4", "conv_nnunet_32_64_s2", "conv_nnunet_320_320", "conv_r2plus1d_time"),
    ],
)
def test_explain_draws_every_layer_in_a_screen(name: str) -> None:
    pytest.importorskip("cuda.core")
    shape = shapes.named("all")[name]
    for dtype, last in ((torch.float32, False), (torch.bfloat16, True)):
        explanation = explain(
            shape.geometry, shape.x_size, dtype, device="cuda:99", channels_last=last
        )
        lines = str(explanation).splitlines()
        assert len(lines) <= 30
        for choice in explanation.choices:
            assert bool(choice.reason) != bool(choice.decided)
            sketch = choice.sketch
            assert (sketch is None) == (choice.runs_as == portable.PYTORCH)
            if sketch is None:
                continue
            assert any(line.endswith(sketch.work) for line in lines)
            if sketch.work_tiles is not None and not sketch.split:
                assert 0 < sketch.ctas <= sketch.work_tiles * sketch.steps
            drawn = sketch.m > 0 and sketch.n > 0
            assert drawn != ("CUDA cores" in choice.runs_as), choice.runs_as
            if choice.runs_as.startswith("gather"):  # a CTA has one tile
                assert sketch.ctas == sketch.work_tiles


def test_explain_draws_the_tile_of_a_product() -> None:
    pytest.importorskip("cuda.core")
    layer = shapes.parse("n=2,in=64,out=32,size=48,k=2,s=2")  # the table has none of this size
    result = call("explain", layer.name, "--dtype", "bfloat16", "--device", "cuda:99")
    assert result.exit_code == 0, result.output
    facts = call("explain", layer.name, "--dtype", "bfloat16", "--device", "cuda:99", "--json")
    choice = json.loads(facts.stdout)["choices"]["forward"]
    product = choice["product"]
    # The tiles cover the product: cells x (channels x taps).
    assert product["m"] * product["n"] * product["work_tiles"] == 2 * 48**3 * 32 * 8
    assert product["k"] == "64 channels"
    lines = result.output.splitlines()
    drawn = next(n for n, line in enumerate(lines) if f"M {product['m']}" in line)
    above, here = lines[drawn - 1 : drawn + 1]
    assert f"- N {product['n']} -" in above and above.endswith(
        f"forward: {choice['runs_as']} (bf16)"
    )
    assert here.endswith("K loop: 64 channels")
    assert choice["decided"].startswith("the rules and cost models put it first of ")
    assert f"runner-up of another kind: {choice['runner_up']}." in result.output
    assert choice["runner_up"] not in ("", choice["runs_as"])


def test_explain_refuses_other_layers_and_negative_sizes() -> None:
    for shape in (torch.zeros(1, 3, 8, 8, 8), 4):
        with pytest.raises(TypeError, match=r"such as x\.shape"):
            explain(torch.nn.Conv3d(3, 4, 3), shape)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not a Linear"):
        explain(torch.nn.Linear(3, 4), (2, 3))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="not be negative"):
        explain(torch.nn.Conv3d(3, 4, 3), (2, 3, -8, 8, 8))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--model", "gan", "--peers", "default"],
            "--peers has no say where bench measures networks",
        ),
        (["--model", "gan", "--plot", "x.svg"], "--plot has no say where bench measures networks"),
        (["--shape", SMALL, "--fused"], "--fused has no say where bench measures layers"),
        (["--shape", SMALL, "--no-compile"], "--no-compile has no say where bench measures layers"),
        (["--model", "gan", "--graphs", "--no-compile"], "--graphs has no say with --no-compile"),
        (
            ["--model", "gan", "--tune", "--no-cudnn-benchmark"],
            "--tune has no say with --no-cudnn-benchmark",
        ),
        (
            ["--model", "gan", "--optimiser", "--kinds", "inference,inference"],
            "--optimiser has no say with --kinds inference",
        ),
        (["--quick", "--shape", SMALL], "--quick and --shape exclude each other"),
        (["--peers", "default", "--no-peers"], "--peers and --no-peers exclude each other"),
        (["--force"], "--force needs --out"),
        (["--shape", SMALL, "--device", "cpu", "--dtype", "fp32,tf32"], "cpu has no TF32"),
        (["--model", "gan", "--device", "cpu", "--dtype", "tf32"], "cpu has no TF32"),
    ],
)
def test_bench_refuses_options_without_effect(arguments: list[str], said: str) -> None:
    result = call("bench", *arguments)
    assert result.exit_code == 1
    assert said in result.output


def test_plot_says_what_is_no_record(tmp_path: Path) -> None:
    text, binary, other = (tmp_path / name for name in ("a.txt", "b", "c.json"))
    text.write_text("no json")
    binary.write_bytes(b"\x7fELF\xff\xfe")
    other.write_text('{"rows": []}')
    networks = records.RESULTS / "networks-h200.json"
    for path, said in (
        (tmp_path, "is a folder"),
        (text, "is not a benchmark record"),
        (binary, "is not a benchmark record"),
        (other, "it has no 'environment'"),
        *([(networks, "is a record of networks")] if networks.exists() else []),
    ):
        result = call("plot", str(path), "--out", str(tmp_path / "x.svg"))
        assert result.exit_code == 1 and said in result.output, result.output


def test_explain_of_sizes_beyond_all_bounds() -> None:
    pytest.importorskip("cuda.core")
    result = call("explain", "in=4,out=4,size=1000000,k=2", "--device", "cuda:99")
    assert result.exit_code == 0
    assert "a channel has 2^31 elements or more" in result.output
    result = call("explain", f"in={'9' * 20},out=4,size=4,k=2", "--device", "cuda:99")
    assert result.exit_code == 1 and "Traceback" not in result.output
    assert "extents" in result.output


def test_explain_of_a_module_that_pads_is_of_the_layer_behind() -> None:
    for mode in ("circular", "zeros"):
        module = convt3d.Conv3d(4, 6, 3, padding=1, padding_mode=mode)
        explanation = explain(module, (1, 4, 5, 6, 7), device="cpu")
        assert explanation.shape.y_size[2:] == (5, 6, 7)
        padded = mode == "circular"
        assert explanation.shape.x_size[2:] == ((7, 8, 9) if padded else (5, 6, 7))
        assert explanation.shape.geometry.padding == ((0, 0, 0) if padded else (1, 1, 1))


def test_explain_of_even_kernels_that_pad_by_themselves() -> None:
    module = convt3d.Conv3d(4, 6, 2, padding="same", padding_mode="circular")
    explanation = explain(module, (1, 4, 5, 6, 7), device="cpu")
    assert explanation.shape.x_size[2:] == (6, 7, 8)
    assert explanation.shape.y_size[2:] == (5, 6, 7)


def test_explain_knows_the_switch_of_matrix_products() -> None:
    geometry = Geometry(128, 64, (2, 2, 2), (2, 2, 2))
    size = (2, 128, 16, 16, 16)
    assert explain(geometry, size, device="cpu").choices[0].runs_as == portable.GEMM
    torch.set_float32_matmul_precision("medium")
    try:
        choice = explain(geometry, size, device="cpu").choices[0]
    finally:
        torch.set_float32_matmul_precision("highest")
    assert choice.runs_as == portable.PYTORCH and "inexact matrix products" in choice.reason


def test_a_winner_that_another_plan_beat_is_not_called_the_fastest() -> None:
    from convt3d.cuda.plan import plan_for
    from convt3d.cuda.plan.table import Winner
    from convt3d.precision import Arithmetic

    def said(ms: float, next_ms: float | None, timed: int, arithmetic: Arithmetic) -> str:
        return str(Winner(plan, ms, next_ms, timed, arithmetic))

    plan = plan_for("forward", Geometry(32, 64, (3,) * 3), (16,) * 3, 2, torch.bfloat16)
    bf16, f16 = Arithmetic.BF16, Arithmetic.F16
    assert said(1.0, 1.1, 9, bf16).startswith("the fastest of 9 timed on an H200")
    assert said(1.02, 1.0, 9, bf16).startswith("within 2.0% of the fastest of 9 timed on")
    assert said(1.0, 1.1, 9, f16).startswith("the fastest of 9 timed in f16 on an H200")
    assert said(1.0, None, 1, bf16) == "timed on an H200: 1 ms"


@pytest.mark.parametrize("conv", [0, 1])
def test_explain_of_an_empty_batch(conv: int) -> None:
    pytest.importorskip("cuda.core")
    geometry = Geometry(16, 8, (3, 3, 3), padding=(1, 1, 1), transposed=not conv)
    explanation = explain(geometry, (0, 16, 8, 8, 8), device="cuda:99")
    assert {choice.runs_as for choice in explanation.choices} == {"no kernel"}
    assert "a tensor is empty" in str(explanation)


def test_explain_says_that_timing_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.core")
    from convt3d.cuda import winners
    from convt3d.cuda.plan import plan_for

    geometry = Geometry(32, 32, (3, 3, 3), padding=(1, 1, 1))
    plan = plan_for("forward", geometry, (16, 16, 16), 2, torch.float32)
    monkeypatch.setattr(winners, "recall", lambda *_: plan)
    explanation = explain(geometry, (2, 32, 16, 16, 16), device="cuda:99")
    assert "fastest when candidates were timed on this GPU" in explanation.choices[0].decided


def test_explain_says_that_the_table_decided() -> None:
    pytest.importorskip("cuda.core")
    layer = shapes.named()["kb73"]
    explanation = explain(layer.geometry, layer.x_size, device="cuda:99")
    assert "timed on an H200" in explanation.choices[0].decided


@pytest.mark.parametrize(
    "name, operation, why",
    [
        ("conv_nnunet_1_32", "forward", "few channels"),
        ("kb72", "grad_input", "groups"),
        ("kb61", "forward", None),
        ("conv_nnunet_1_32", "grad_weight", None),
    ],
)
def test_explain_says_why_products_are_float32_grade(
    name: str, operation: str, why: str | None
) -> None:
    pytest.importorskip("cuda.core")

    def facts() -> dict[str, Any]:
        told = call("explain", name, "--device", "cuda", "--json").stdout
        choice: dict[str, Any] = json.loads(told)["choices"][operation]
        return choice

    found = facts()
    assert found["arithmetic"] == ("tf32" if why is None else "ieee")
    assert found.get("because of") == why
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        found = facts()
    assert found["arithmetic"] == "ieee" and "because of" not in found


def test_explain_cuda_plan_without_a_gpu() -> None:
    pytest.importorskip("cuda.core")
    explanation = explain(shapes.named()["kb61"].geometry, (8, 48, 64, 64, 64), device="cuda")
    for choice in explanation.choices:
        assert choice.runs_as != portable.PYTORCH
        assert choice.facts["arithmetic"] == "tf32"


def test_explain_says_why_cuda_falls_back() -> None:
    pytest.importorskip("cuda.core")
    g = Geometry(4, 4, (3, 3, 3))
    explanation = explain(g, (1, 4, 5, 5, 5), torch.float64, device="cuda")
    assert {choice.runs_as for choice in explanation.choices} == {portable.PYTORCH}
    assert all("float64" in choice.reason for choice in explanation.choices)


def test_explain_sums_up_the_phases_of_a_large_stride() -> None:
    explanation = explain(Geometry(4, 3, (3, 3, 3), (1, 2, 10**9)), (1, 4, 2, 2, 2), device="cpu")
    text = dict(explanation.lines())
    assert text["taps by phase, H"] == "0: 0, 2; 1: 1"
    assert text["taps by phase, W"].startswith("0: 0; 1: 1; 2: 2; 3: bias only; ")
    assert text["taps by phase, W"].endswith("1000000000 phases, 999999997 of them bias only")
    facts = explanation.to_dict()
    assert [len(axis) for axis in facts["phases"]] == [1, 2, 8]
    assert facts["phase_counts"] == [1, 2, 10**9]
    assert facts["empty_phases"] == [0, 0, 10**9 - 3]


@pytest.mark.parametrize(
    ("dtype", "device", "reason"),
    [
        (torch.float32, "cpu", "no other form measured faster for it"),
        (torch.bfloat16, "cpu", "no other form was measured in bfloat16 on cpu"),
        (torch.float32, "mps", "no other form was measured on mps"),
    ],
)
def test_explain_says_why_pytorch_runs_off_cuda(
    dtype: torch.dtype, device: str, reason: str
) -> None:
    explanation = explain(Geometry(4, 4, (3, 3, 3)), (1, 4, 5, 5, 5), dtype, device=device)
    assert {(c.runs_as, c.reason) for c in explanation.choices} == {(portable.PYTORCH, reason)}


def test_explain_says_that_a_gpu_is_assumed() -> None:
    pytest.importorskip("cuda.core")
    result = call("explain", SMALL, "--device", "cuda:99")
    assert result.exit_code == 0, result.output
    assert "this machine has no cuda:99; the plans are for an H200, which is assumed" in (
        result.stdout
    )
    assert not explain(Geometry(4, 4, (3, 3, 3)), (1, 4, 5, 5, 5), device="cpu").assumed


def test_explain_takes_a_module() -> None:
    module = convt3d.ConvTranspose3d(4, 6, (3, 2, 1), stride=2, padding=1, groups=2, dilation=2)
    geometry = geometry_of(module)
    assert geometry == Geometry(4, 6, (3, 2, 1), (2, 2, 2), (1, 1, 1), (0, 0, 0), (2, 2, 2), 2)
    explanation = explain(module, (4, 5, 6, 7))
    assert explanation.shape.x_size == (1, 4, 5, 6, 7)
    assert explanation.shape.y_size[2:] == tuple(module(torch.zeros(4, 5, 6, 7)).shape[1:])
    assert explanation.shape.bias
    assert geometry.label in str(explanation)
    with pytest.raises(RuntimeError, match="to have 4 channels"):
        explain(module, (1, 5, 5, 6, 7))


def test_export_refuses_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = SimpleNamespace(text="", digest="")
    monkeypatch.setattr("convt3d.export.export", lambda *_, **__: made)
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "broken.py").write_text("class Model:\n    def (")
    (tmp_path / "raises.py").write_text("import nosuchmodule")
    (tmp_path / "model.py").write_text(
        "Model = lambda n: 1 / n\nget_inputs = list\nget_init_inputs = lambda: [0]"
    )
    (tmp_path / "list.json").write_text("[]")
    for arguments, message in (
        (["nofile.py"], "nofile.py"),
        (["--shape", "in=2,out=2,size=2,k=1,n=0"], "is empty"),
        (["--shape", SMALL, "--figures", str(tmp_path / "list.json")], "list.json is no record"),
        ([], "give either a problem file or --shape"),
        (["--shape", SMALL, "--out", str(tmp_path / "file" / "x.py")], "Not a directory"),
        ([str(tmp_path / "broken.py")], "broken.py does not run: SyntaxError"),
        ([str(tmp_path / "raises.py")], "raises.py does not run: ModuleNotFoundError"),
        ([str(tmp_path / "model.py")], "model.py does not run: ZeroDivisionError"),
    ):
        result = call("export", *arguments)
        assert result.exit_code == 1
        assert result.stderr.startswith("convt3d: ")
        assert result.stderr.count("\n") == 1
        assert "Traceback" not in result.output
        assert message in result.stderr


def test_cache_warm_fails_where_nothing_can_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from convt3d.cuda import ahead, compiler

    monkeypatch.setattr(compiler, "missing_library", lambda: None)
    monkeypatch.setattr(ahead, "compile_operations", lambda *_, **__: pytest.fail("compiled"))
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("CONVT3D_CACHE_DIR", str(tmp_path / "file" / "cache"))
    result = call("cache", "warm", "--shape", SMALL)
    assert result.exit_code == 1
    assert "cannot be written: Not a directory" in result.stderr


def test_export_says_where_figures_are_of_other_kernels(tmp_path: Path) -> None:
    figures = records.RESULTS / "kernelbench-level1.json"
    result = call("export", "--shape", SMALL, "--figures", str(figures))
    assert result.exit_code == 0
    assert "kernelbench-level1.json has none of kernels" in result.stderr


def test_export_refuses_what_no_kernel_runs() -> None:
    result = call("export", "--shape", "in=4,out=3,size=2,k=3,s=1x1x100000")
    assert result.exit_code == 1
    assert "a stride of 100000 is left to PyTorch" in result.stderr


def test_version() -> None:
    result = call("--version")
    assert result.exit_code == 0
    assert result.stdout.strip() == convt3d.__version__


def test_doctor_passes_its_self_test_here() -> None:
    findings = {finding.name: finding for finding in doctor.examine()}
    assert findings["self-test"].ok
    assert torch.__version__ in findings["PyTorch"].text
    assert findings["accelerated here"].text
    result = call("doctor")
    assert result.exit_code == 0, result.output
    assert "kernel cache" in result.output
    assert set(json.loads(call("doctor", "--json").stdout)) == set(findings)


def test_doctor_reports_a_broken_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portable, "forward", lambda x, w, b, g: torch.zeros(2, 4, 5, 4, 9))
    result = call("doctor")
    assert result.exit_code == 1


def test_doctor_names_the_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CONVT3D_CACHE_DIR", str(tmp_path))
    (tmp_path / "cubin").mkdir()
    (tmp_path / "cubin" / "one").write_bytes(bytes(1_500_000))
    findings = {finding.name: finding for finding in doctor.examine()}
    assert findings["kernel cache"].text == f"{tmp_path}, 1 files, 1.5 MB"


def test_plots_without_matplotlib_fail_before_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    from convt3d.bench import run

    monkeypatch.delitem(sys.modules, "convt3d.bench.plot", raising=False)
    monkeypatch.delattr("convt3d.bench.plot", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(run, "run", lambda *_: pytest.fail("measured"))
    result = call("bench", "--shape", SMALL, "--device", "cpu", "--plot", "x.svg")
    assert result.exit_code == 1
    assert "pip install 'convt3d[plot]'" in result.stderr


def test_a_missing_extra_is_one_sentence() -> None:
    code = "import sys; sys.modules['typer'] = None; from convt3d.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120,
        env={**__import__("os").environ, "PYTHONPATH": str(Path(convt3d.__file__).parents[1])},
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.strip() == (
        "The convt3d command needs typer, which is not installed: pip install 'convt3d[cli]'."
    )


def test_a_cache_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cuda.core")
    from convt3d.cuda import compiler

    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CONVT3D_CACHE_DIR", str(tmp_path / "file"))
    (finding,) = (f for f in doctor.examine() if f.name == "kernel cache")
    assert finding.ok is False and "cannot be written" in finding.text
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CONVT3D_CACHE_DIR", "~/kernels")
    assert compiler.cache_directory() == tmp_path / "kernels"


@pytest.mark.parametrize(("value", "disabled"), [("1", True), ("false", False), ("No", False)])
def test_what_disables(value: str, disabled: bool) -> None:
    code = "from convt3d import backends; print(backends.DISABLED)"
    environment = {**os.environ, "CONVT3D_DISABLE": value}
    said = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert said.stdout.strip() == str(disabled)
