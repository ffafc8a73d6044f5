"""Shapes, contenders, timing, records and reports of the benchmark, on small layers."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from convt3d import native
from convt3d.bench import cases, contenders, numerics, report, run, shapes, timing, warm, worker
from convt3d.bench.cases import MODES
from convt3d.bench.contenders import CONTENDERS, OURS
from convt3d.bench.record import Record
from convt3d.bench.run import Request
from convt3d.bench.timing import Timing
from convt3d.bench.worker import Job
from convt3d.cuda.plan import plan_problem
from convt3d.cuda.schedule import Gpu, Problem, WeightLayout
from convt3d.operations import OPERATIONS
from convt3d.precision import Arithmetic
from support import records

CPU = torch.device("cpu")
COMPILED = {"gemm_shuffle_compiled", "max_autotune"}
SMALL = (
    "n=2,in=4,out=6,size=3x4x5,k=3,p=1,bias=1",
    "n=1,in=4,out=6,size=3x4x5,k=3,s=2,p=1,op=1",
    "n=2,in=4,out=3,size=2x3x4,k=2,s=2,bias=1",
    "n=1,in=4,out=4,size=3,k=3,s=2,g=2",
)
CONV = (
    "n=2,in=4,out=6,size=3x4x5,k=3,p=1,bias=1,conv=1",
    "n=2,in=4,out=6,size=6x5x8,k=3x2x3,s=2x1x3,p=1x0x1,bias=1,conv=1",
    "n=1,in=4,out=4,size=7,k=3,s=2,g=2,d=2,conv=1",
)


# --- Shapes --------------------------------------------------------------------------------------


def test_named_shapes() -> None:
    named = shapes.named()
    assert len(named) == 17
    assert set(shapes.QUICK) <= set(named)
    kb72 = named["kb72"]
    assert kb72.x_size == (8, 32, 12, 24, 48)
    assert kb72.y_size == (8, 32, 24, 48, 96)
    assert kb72.geometry.groups == 4


def test_named_conv3d_layers() -> None:
    conv = shapes.named("conv")
    assert len(conv) == 26
    assert all(name.startswith("conv_") for name in conv)
    assert {shape.kind for shape in conv.values()} == {"conv"}
    assert shapes.named("all") == {**shapes.named(), **conv}
    strided = conv["conv_nnunet_32_64_s2"]
    assert strided.y_size == (2, 64, 64, 64, 64)
    assert strided.geometry.weight_size == (64, 32, 3, 3, 3)
    assert all(shape.origin for shape in conv.values())


def test_kinds_stand_for_their_layers() -> None:
    assert shapes.select(["conv"]) == list(shapes.named("conv").values())
    assert shapes.select(["transposed"]) == list(shapes.named().values())
    both = shapes.select(["conv_r3d_64", "all"])
    assert len(both) == 43
    assert both[0].name == "conv_r3d_64"
    assert shapes.one("kb61").name == "kb61"
    with pytest.raises(ValueError, match="'conv' stands for 26 layers"):
        shapes.one("conv")


@pytest.mark.parametrize("text", [*SMALL, *CONV])
def test_a_layer_counts_what_its_transposed_layer_does(text: str) -> None:
    shape = shapes.parse(text)
    for operation in OPERATIONS:
        other, _ = shape.as_transposed(operation)
        assert other.geometry.transposed
        assert other.operations == shape.operations > 0
        assert other.traffic(2) == shape.traffic(2)
    if shape.geometry.transposed:
        assert shape.as_transposed("forward") == (shape, "forward")
    else:
        assert (other.x_size, other.y_size) == (shape.y_size, shape.x_size)
        assert [shape.as_transposed(operation)[1] for operation in OPERATIONS] == [
            "grad_input", "forward", "grad_weight"
        ]  # fmt: skip
        assert shape.as_transposed("forward")[0].bias == shape.bias
        assert not shape.as_transposed("grad_input")[0].bias


def test_shapes_survive_json() -> None:
    for shape in [*shapes.named("all").values(), shapes.parse(CONV[1])]:
        assert shapes.Shape.from_dict(json.loads(json.dumps(shape.to_dict()))) == shape


def test_parse_reads_every_key() -> None:
    shape = shapes.parse(
        "n=3,in=6,out=4,size=5x6x7,k=3x2x3,s=2x1x2,p=1x0x1,op=1x0x1,d=1,g=2,bias=1"
    )
    g = shape.geometry
    assert (shape.batch, shape.input_size, shape.bias) == (3, (5, 6, 7), True)
    assert (g.in_channels, g.out_channels, g.groups) == (6, 4, 2)
    assert (g.kernel_size, g.stride, g.padding) == ((3, 2, 3), (2, 1, 2), (1, 0, 1))
    assert (g.output_padding, g.dilation) == ((1, 0, 1), (1, 1, 1))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("in=4,out=4,k=3", "lacks size"),
        ("in=4,out=4,size=8,k=3,z=1", "cannot read 'z=1'"),
        ("in=4,out=4,size=8x8,k=3", "needs one number"),
        ("in=4,out=4,size=8,k=three", "needs one number"),
        ("in=4,out=4,size=8,k=3,g=3", "groups must divide"),
        ("in=4,out=4,size=8,k=3,s=2,op=2", "output padding must be smaller"),
        ("in=4,out=4,size=1,k=1,p=3", "Output size is too small"),
        ("in=4,out=4,size=4,k=3,s=2,op=1,conv=1", "a Conv3d has no output padding"),
        ("in=4,out=4,size=2,k=3,conv=1", "Kernel size can't be greater"),
    ],
)
def test_parse_refuses(text: str, part: str) -> None:
    with pytest.raises(ValueError, match=part):
        shapes.parse(text)


def test_select_refuses_unknown_names() -> None:
    with pytest.raises(ValueError, match="unknown shape 'kb99'; known are kb58"):
        shapes.select(["kb99"])


def test_reduced_shapes_fit_and_stay_the_same_layer() -> None:
    for shape in shapes.named("all").values():
        small = shape.reduced(1e9)
        assert small.geometry == shape.geometry
        assert min(small.y_size) > 0
        large = max(n // m for n, m in zip(small.input_size, small.least_size, strict=True))
        assert small.operations <= 1e9 or max(small.input_size) < 16 or large < 2
        assert shape.reduced(1e15) == shape


# --- Contenders and numerics ---------------------------------------------------------------------


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("text", [*SMALL, *CONV])
def test_contenders_agree_with_float64(text: str, layout: str) -> None:
    """Whatever is timed computes the layer: a wrong peer would be an unfair one."""
    shape = shapes.parse(text)
    t = cases.make(shape, MODES["fp64"], layout == "ndhwc", CPU)
    ran = set()
    for name in (OURS, *contenders.peers("cuda")):
        contender = CONTENDERS[name]
        for operation in OPERATIONS:
            if not contender.runs(shape, layout, operation) or name in COMPILED:
                continue
            result = contender.prepare(operation, t)()
            error, _ = numerics.error(result, numerics.reference(operation, t))
            assert error < 1e-13, (name, operation)
            ran.add(name)
    assert {OURS, contenders.DEFAULT} <= ran
    assert len(ran) >= 3


@pytest.mark.parametrize("text", CONV)
def test_kernels_of_the_transposed_layer_are_a_conv3d(text: str) -> None:
    """What runs on CUDA, by backends of CPU."""
    t = cases.make(shapes.parse(text), MODES["fp64"], False, CPU)
    for operation in OPERATIONS:
        result = numerics.run(native, operation, t)
        assert numerics.error(result, numerics.reference(operation, t))[0] < 1e-13, operation


@pytest.mark.parametrize("text", [SMALL[0], CONV[1]])
def test_train_gives_all_gradients(text: str) -> None:
    shape = shapes.parse(text)
    t = cases.make(shape, MODES["fp64"], False, CPU)
    gx, gw, gb = CONTENDERS[OURS].prepare("train", t)()
    assert numerics.error(gx, numerics.reference("grad_input", t))[0] < 1e-13
    assert numerics.error(gw, numerics.reference("grad_weight", t))[0] < 1e-13
    assert torch.allclose(gb, t.gy.sum((0, 2, 3, 4)))


def test_compiled_peer_applies_to_the_same_layers_as_the_eager_one() -> None:
    eager, compiled = CONTENDERS["gemm_shuffle"], CONTENDERS["gemm_shuffle_compiled"]
    for shape in shapes.named().values():
        assert eager.applies(shape) == compiled.applies(shape)
    assert not COMPILED & set(contenders.peers("cpu"))


def test_peers_of_a_conv3d_are_pytorchs() -> None:
    beside = {"default", "cudnn_benchmark", "cudnn_channels_last", "max_autotune"}
    for shape in shapes.named("conv").values():
        peers = {c.name for c in CONTENDERS.values() if c.applies(shape)} - {OURS}
        assert peers == beside
    dilated, transposed = shapes.parse(CONV[2]), shapes.named()["kb61"]
    assert not CONTENDERS["max_autotune"].applies(dilated)
    assert not CONTENDERS["max_autotune"].applies(transposed)


def test_a_failing_compiler_is_a_failed_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's errors are RuntimeErrors, whatever went wrong below."""

    def broken(*_: object, **__: object) -> None:
        raise torch._dynamo.exc.BackendCompilerFailed("inductor", ValueError("no template"), None)

    contender = replace(CONTENDERS["max_autotune"], name=OURS)
    monkeypatch.setitem(CONTENDERS, OURS, contender)
    monkeypatch.setattr(torch, "compile", lambda *_, **__: broken)
    request = Request(shapes=[shapes.parse(CONV[0])], modes=["fp32"], contenders=[OURS])
    found = Record.create(None, [], None)
    run.run(request, found)
    (row,) = found.rows.values()
    assert "BackendCompilerFailed" in row["failed"]


def test_every_shape_has_a_peer_beyond_cudnn_or_none_exists() -> None:
    for shape in shapes.named().values():
        others = {
            c.name for c in CONTENDERS.values() if c.applies(shape) and c.passes == ("forward",)
        }
        stride_1 = shape.geometry.stride == (1, 1, 1)
        assert others >= ({"flipconv", "flipconv_cl"} if stride_1 else {"polyphase"})


def test_compare_finds_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = shapes.parse(SMALL[1])
    t = cases.make(shape, MODES["fp32"], False, CPU)
    good = numerics.compare("forward", t, MODES["fp32"])
    assert good["acceptable"]
    assert good["deterministic"]
    assert 0 < good["relative"] < 1e-6
    exact = numerics.ours
    monkeypatch.setattr(numerics, "ours", lambda op, t: exact(op, t) * (1 + 1e-3 * torch.rand(())))
    bad = numerics.compare("forward", t, MODES["fp32"])
    assert not bad["acceptable"]
    assert not bad["deterministic"]


@pytest.mark.parametrize("text", [SMALL[1], CONV[1]])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_compare_on_the_ends_of_a_batch(
    operation: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a large layer on CUDA is compared by, run here: a wrong last sample must show."""
    shape = replace(shapes.parse(text), batch=5)
    t = cases.make(shape, MODES["fp32"], True, CPU)
    monkeypatch.setattr(numerics, "_compares_ends", lambda t: True)
    good = numerics.compare(operation, t, MODES["fp32"])
    assert good["relative"] < 1e-6
    exact = numerics.ours

    def wrong(operation: str, t: cases.Tensors) -> torch.Tensor:
        return exact(operation, replace(t, x=_damaged(t.x), gy=_damaged(t.gy)))

    monkeypatch.setattr(numerics, "ours", wrong)
    assert numerics.compare(operation, t, MODES["fp32"])["relative"] > 1e-4


def _damaged(t: torch.Tensor) -> torch.Tensor:
    result = t.clone()
    result[-1] *= 1.001
    return result


def test_acceptable_follows_the_factors() -> None:
    assert numerics.acceptable(1.09e-3, 1e-3, False, 0.0)
    assert not numerics.acceptable(1.11e-3, 1e-3, False, 0.0)
    assert numerics.acceptable(1.9e-7, 1e-7, True, 0.0)
    assert not numerics.acceptable(2.1e-7, 1e-7, True, 0.0)
    assert numerics.acceptable(2.1e-7, 1e-7, True, 3e-7)
    assert not numerics.acceptable(float("nan"), 1e-7, True, 1.0)


@pytest.mark.parametrize(
    "text, operations",
    [
        ("in=4,out=4,size=3,k=3,g=1", ()),
        ("in=4,out=4,size=3,k=3,g=2", OPERATIONS),
        ("in=32,out=2,size=3,k=1,conv=1", ("forward", "grad_input")),
        ("in=1,out=32,size=3,k=3,p=1,conv=1", ("forward",)),
        ("in=3,out=64,size=8,k=7,s=2,p=3,conv=1", ("grad_input",)),
    ],
)
def test_what_is_exact_under_tf32(text: str, operations: tuple[str, ...]) -> None:
    tensors = cases.make(shapes.parse(text), MODES["tf32"], False, CPU)
    for operation in OPERATIONS:
        under = {name: numerics._exact(operation, tensors, mode) for name, mode in MODES.items()}
        exact = operation in operations
        assert under == {"tf32": exact, "fp32": True, "bf16": False, "fp16": False, "fp64": True}


@pytest.mark.parametrize("conv", [0, 1])
def test_tf32_error_is_what_rounding_the_operands_gives(conv: int) -> None:
    shape = shapes.parse(f"n=2,in=8,out=8,size=8,k=3,s=2,p=1,conv={conv}")
    t = cases.make(shape, MODES["tf32"], False, CPU)
    for operation in OPERATIONS:
        rounded = replace(t, x=_tf32(t.x), w=_tf32(t.w), gy=_tf32(t.gy))
        exact = numerics.reference(operation, t)
        inherent, _ = numerics.error(numerics.reference(operation, rounded), exact)
        assert numerics.tf32_error(operation, t) == pytest.approx(inherent, rel=0.1), operation


def _tf32(values: torch.Tensor) -> torch.Tensor:
    """Ten bits of mantissa, by arithmetic rather than by bits."""
    mantissa, exponent = torch.frexp(values.double())
    return torch.ldexp((mantissa * 2**11).round() / 2**11, exponent).float()


# --- Timing --------------------------------------------------------------------------------------


def test_timing_interleaves_all_calls() -> None:
    order: list[str] = []
    calls = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    times = timing.measure(calls, CPU, 0.001)
    assert set(times) == {"a", "b"}
    rounds = [set(order[i : i + 2]) for i in range(0, len(order), 2)]
    assert all(names == {"a", "b"} for names in rounds)
    assert {order[i] for i in range(0, len(order), 2)} == {"a", "b"}  # neither is always first
    assert times["a"].runs == times["b"].runs >= timing.RUNS


def test_least_times_are_seen_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """One lucky run does not decide on CPU: rounds go on until it is repeated, or time is up."""
    clock = [0.0]
    took = iter([5.0, 5.0, 5.0, *[5.0 - 0.1 * n for n in range(30)], 1.0, 1.2, 1.4, 1.005])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def call() -> None:
        clock[0] += next(took, 1.0)

    t = timing.measure({"call": call}, CPU, 100.0)["call"]
    assert t.ms == 1000.0
    assert t.runs > timing.RUNS
    assert next(took, None) is None  # it went on up to the run that confirms, and no further
    assert clock[0] <= 300.0


def test_number_of_runs() -> None:
    assert timing.runs(1e-6, 0.3) == timing.MAX_RUNS
    assert timing.runs(0.005, 0.3) == 60
    assert timing.runs(0.02, 0.3) == timing.RUNS  # a little over the budget
    assert timing.runs(0.1, 0.3) == 3


def test_timing_of() -> None:
    times = [float(n) for n in (11, 1, 10, 2, 9, 3, 8, 4, 7, 5, 6)]
    assert Timing.of(times, least=False) == Timing(6.0, 3.0, 9.0, 11)
    assert Timing.of(times, least=True) == Timing(1.0, 1.0, 9.0, 11)


# --- Records and reports -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    path = tmp_path_factory.mktemp("bench") / "record.json"
    found = Record.create(path, ["bench"], "0123456789abcdef")
    request = Request(
        shapes=[shapes.parse(text) for text in (SMALL[0], SMALL[2], CONV[1])],
        modes=["fp32"],
        passes=["forward", "grad_weight"],
        contenders=[OURS, "default", "gemm_shuffle"],
        budget_s=0.001,
    )
    seen: list[str] = []
    run.run(request, found, lambda row: seen.append(Record.key(row)))
    assert len(seen) == request.rows() == len(found.rows)
    return found


def test_record_rows_have_what_reports_need(record: Record) -> None:
    for row in record.rows.values():
        assert row["ms"] > 0
        assert row["runs"] >= 3
        assert row["cpu_us"] > 0
        if row["contender"] == OURS:
            assert row["limit"]["ms"] > 0
            assert row["share"] == pytest.approx(row["limit"]["ms"] / row["ms"], rel=0.02)
            assert row["error"]["acceptable"]
            assert row["runs_as"]
        else:
            assert "limit" not in row


def test_extra_memory_is_shown_where_it_was_measured(record: Record) -> None:
    assert "extra MB" not in _text(report.table(record))
    on_cuda = Record.create(None, [], None)
    on_cuda.rows = {name: dict(row) for name, row in record.rows.items()}
    for row in on_cuda.rows.values():
        row["extra_mbytes"] = 1.25 if row["contender"] == OURS else 77.0
    text = _text(report.table(on_cuda))
    assert "extra MB" in text
    assert "1.2 (77.0)" in text


def test_record_on_disk_is_complete(record: Record) -> None:
    assert record.path is not None
    again = Record.load(record.path)
    assert again.to_dict() == json.loads(json.dumps(record.to_dict()))
    assert again.environment["torch"] == torch.__version__
    assert again.environment["commit"]


def test_resuming_measures_only_what_is_missing(record: Record) -> None:
    rows = dict(record.rows)
    missing = next(iter(rows))
    del rows[missing]
    failed = list(rows)[-1]
    rows[failed] = {**rows[failed], "failed": "out of memory"}
    partial = replace(record, path=None, rows=rows)
    seen: list[str] = []
    request = Request(
        shapes=[shapes.parse(text) for text in (SMALL[0], SMALL[2], CONV[1])],
        modes=["fp32"],
        passes=["forward", "grad_weight"],
        contenders=[OURS, "default", "gemm_shuffle"],
        budget_s=0.001,
    )
    run.run(request, partial, lambda row: seen.append(Record.key(row)))
    assert sorted(seen) == sorted([missing, failed])


def test_resumed_rows_keep_the_commit_they_were_measured_at(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    base = {"shape": "kb61", "mode": "tf32", "layout": "ncdhw", "contender": OURS}
    for commit, name in (("abc", "forward"), ("def", "train"), ("def", "grad_input")):
        record = Record.create(path, ["bench", name], commit)
        if path.exists():
            record.resume(path)
        record.add({**base, "pass": name})
    found = Record.load(path)
    assert found.environment["commit"] == "def"
    assert [row.get("commit") for row in found.rows.values()] == ["abc", None, None]
    (first,) = found.runs
    assert (first["commit"], first["command"]) == ("abc", ["bench", "forward"])
    third = Record.create(None, [], "012")
    third.resume(path)
    assert [row["commit"] for row in third.rows.values()] == ["abc", "def", "def"]
    assert [r["commit"] for r in third.runs] == ["abc", "def"]


@pytest.mark.more
def test_isolated_jobs_survive_the_death_of_one() -> None:
    """The way of CUDA, on CPU: a process for each job, and rows of all that lived."""
    request = Request(
        shapes=[shapes.parse(SMALL[2])], modes=["fp32"], passes=["forward"], budget_s=0.001
    )
    (job,) = request.jobs()
    jobs = [replace(job, contenders=(name,)) for name in (OURS, "nobody", "default")]
    found = Record.create(None, [], None)
    seen: list[str] = []
    with pytest.raises(RuntimeError, match="measures nobody ended with 1") as caught:
        run.run_isolated(jobs, found, lambda row: seen.append(row["contender"]))
    assert "KeyError: 'nobody'" in str(caught.value)
    assert seen == [OURS, "default"]
    assert report.acceptable(found)


def test_load_refuses_other_files(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"rows": 3}')
    with pytest.raises(ValueError, match="not a benchmark record"):
        Record.load(path)


def test_a_failing_case_is_a_row_and_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(operation: str, tensors: cases.Tensors) -> timing.Call:
        raise RuntimeError("no kernel\nsecond line")

    monkeypatch.setitem(CONTENDERS, OURS, replace(CONTENDERS[OURS], prepare=broken))
    request = Request(
        shapes=[shapes.parse(SMALL[0])], modes=["fp32"], contenders=[OURS], budget_s=0.001
    )
    found = Record.create(None, [], None)
    run.run(request, found)
    assert [row["failed"] for row in found.rows.values()] == ["RuntimeError: no kernel"] * 3
    assert not report.acceptable(found)
    assert "failed" in _text(report.table(found))


def test_on_cuda_each_contender_has_a_process_and_its_layout() -> None:
    request = Request(
        shapes=list(shapes.named().values()),
        modes=["tf32", "bf16"],
        contenders=[OURS, *contenders.peers("cuda")],
        device="cuda",
    )
    jobs = request.jobs()
    assert [job.contenders for job in jobs] == [(name,) for name in CONTENDERS]
    layouts = {job.contenders[0]: job.layouts for job in jobs}
    assert layouts["cudnn_channels_last"] == ("ndhwc",)
    assert layouts[OURS] == layouts["cudnn_benchmark"] == ("ncdhw",)
    assert worker.Job.from_json(jobs[0].to_json()) == jobs[0]


def test_lines_compare_with_default_and_best_peer() -> None:
    kb61 = shapes.named()["kb61"].to_dict()
    base = {**kb61, "shape": "kb61", "mode": "tf32", "layout": "ncdhw", "pass": "forward"}
    rows = [
        {**base, "contender": OURS, "ms": 1.0, "share": 0.7},
        {**base, "contender": "default", "ms": 9.0},
        {**base, "contender": "cudnn_channels_last", "layout": "ndhwc", "ms": 2.0},
        {**base, "contender": "flipconv", "failed": "out of memory"},
        {**base, "pass": "train", "contender": "default", "ms": 0.1},
    ]
    found = Record(environment={"gpu": "NVIDIA H200"}, rows={Record.key(r): r for r in rows})
    (line,) = report.lines(found)
    assert (line.speedup, line.speedup_best) == (9.0, 2.0)
    assert (line.best_name, line.best_layout) == ("cudnn_channels_last", "ndhwc")
    assert line.problem == "48->48 k3 s1 p0 d1 g1, 8x64x64x64"
    (line,) = report.lines(found, same_layout=True)
    assert (line.best, line.best_name, line.best_layout) == (9.0, "default", "ncdhw")
    assert report.geometric_mean([2.0, None, 8.0]) == pytest.approx(4.0)


def test_a_line_of_one_layout_has_no_peer_of_another() -> None:
    kb61 = shapes.named()["kb61"].to_dict()
    base = {**kb61, "shape": "kb61", "mode": "tf32", "layout": "ndhwc", "pass": "forward"}
    rows = [
        {**base, "contender": OURS, "ms": 1.0},
        {**base, "contender": "default", "layout": "ncdhw", "ms": 9.0},
    ]
    found = Record(environment={"gpu": "NVIDIA H200"}, rows={Record.key(r): r for r in rows})
    (line,) = report.lines(found)
    assert (line.speedup, line.speedup_best) == (9.0, 9.0)
    (line,) = report.lines(found, same_layout=True)
    assert (line.speedup, line.speedup_best, line.best_name) == (None, None, "")


def test_numbers_have_three_digits() -> None:
    values = (0.0154, 2.345, 98.76, 294.7)
    assert [report.milliseconds(v) for v in values] == ["0.015 ms", "2.35 ms", "98.8 ms", "295 ms"]
    assert [report.times(v) for v in values] == ["0.02x", "2.35x", "98.8x", "295x"]
    assert (report.percent(0.234), report.milliseconds(2, "")) == ("23%", "2.00")
    assert report.milliseconds(None) == report.times(None) == report.percent(None) == ""


def test_plot_is_drawn(record: Record, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from convt3d.bench import plot

    for name in ("a.png", "a.svg"):
        plot.draw(record, tmp_path / name)
        assert (tmp_path / name).stat().st_size > 5000
    text = (tmp_path / "a.svg").read_text()
    for line in report.lines(record):
        assert f">{line.shape}</text>" in text
        assert f">{line.speedup:.1f}x</text>" in text
    for word in ("forward", "grad_weight", "roofline", report.headline(record)):
        assert f">{word}</text>" in text
    plot.draw(record, tmp_path / "b.svg")
    assert (tmp_path / "b.svg").read_text() == text
    with pytest.raises(ValueError, match="neither"):
        plot.draw(replace(record, rows={}), tmp_path / "c.svg")


@records.needed
@pytest.mark.sample
@pytest.mark.parametrize("name", ["h200-others-bf16", "h200-forward-tf32", "h200-conv-bf16"])
def test_no_text_of_a_plot_is_cut_off_or_covered(name: str) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib import pyplot

    from convt3d.bench import plot

    figure = plot.made(Record.load(records.RESULTS / f"{name}.json"))
    figure.canvas.draw()
    seen = 0
    for axes in figure.axes:
        assert figure.bbox.containsx(axes.get_tightbbox().x0), name
        assert figure.bbox.containsx(axes.get_tightbbox().x1), name
        boxes = [(text, text.get_window_extent()) for text in axes.texts if text.get_text()]
        for i, (text, box) in enumerate(boxes):
            assert axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1, text
            assert axes.bbox.y0 <= box.y0 and box.y1 <= axes.bbox.y1, text
            assert not any(box.overlaps(other) for _, other in boxes[:i]), text
            seen += 1
        for axis in (axes.xaxis, axes.yaxis):
            labels = [label for label in axis.get_ticklabels() if label.get_text()]
            ticks = [label.get_window_extent() for label in labels]
            assert not any(a.overlaps(b) for a, b in pairwise(ticks)), axis
    assert seen >= 34
    pyplot.close(figure)


def test_names_find_places_clear_of_each_other() -> None:
    pytest.importorskip("matplotlib")
    from convt3d.bench.roofline import Box, place

    inside = Box(0, 0, 200, 100)
    dots = [(100.0, 50.0), (101.0, 50.0), (198.0, 98.0)]
    found = place(dots, [(40, 8)] * 3, [Box(104, 46, 200, 54)], inside)
    boxes = [box for box in found if box is not None]
    assert len(boxes) == 3
    assert all(box.overlap(inside) == pytest.approx(box.area) == 320 for box in boxes)
    assert not any(a.overlap(b) for i, a in enumerate(boxes) for b in boxes[:i])
    assert not any(box.overlap(Box(104, 46, 200, 54)) for box in boxes)
    crowd = place([(100.0, 50.0)] * 200, [(40, 8)] * 200, [], inside)
    assert None in crowd and crowd[0] is not None


def _text(table: object) -> str:
    from rich.console import Console

    console = Console(width=200)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_kernels_are_compiled_ahead_for_weights_of_both_formats() -> None:
    shape = shapes.parse("n=2,in=64,out=64,size=16,k=4,s=2,p=1")
    gpu = Gpu((9, 0))
    operations = warm.operations([shape], ["bf16"], ["ndhwc"], ["forward"], gpu.capability)
    problem = Problem("forward", shape.geometry, Arithmetic.BF16, True, True)
    assert {operation.problem for operation in operations} == {problem}
    schedule = plan_problem(problem, shape.batch, shape.input_size, gpu).schedule(
        shape.batch, shape.input_size
    )
    as_it_lies = schedule.on_weights[WeightLayout(channels_last=True)]
    assert {launch.kernel for operation in operations for launch in operation.launches(gpu)} == {
        launch.kernel for s in (schedule, as_it_lies) for launch in s.launches
    }


def test_gradients_by_weight_and_bias_are_compiled_ahead() -> None:
    shape = shapes.parse("n=1,in=8,out=8,size=6,k=3,bias=1")
    operations = warm.operations([shape], ["tf32", "fp32"], ["ncdhw"], ["train"], (9, 0))
    found = {(o.name, o.bias) for o in operations if o.arithmetic is Arithmetic.IEEE}
    assert found == {
        ("forward", True),
        ("grad_input", False),
        ("grad_weight", False),
        ("grad_weight", True),
    }
    assert {o.arithmetic for o in operations} == {Arithmetic.TF32, Arithmetic.IEEE}


def test_tuning_is_for_our_layers_alone(monkeypatch: pytest.MonkeyPatch, switches: None) -> None:
    """``bench --tune``: each contender on CUDA runs under the cuDNN setting of its name."""
    request = Request(
        shapes=[shapes.parse(SMALL[0])],
        modes=["bf16"],
        contenders=[OURS, "default", "cudnn_benchmark"],
        device="cuda",
        tuned=True,
    )
    assert [job.tuned for job in request.jobs()] == [True] * 3
    assert Job.from_json(request.jobs()[0].to_json()) == request.jobs()[0]
    seen = {}

    def measure(job: Job, chosen: Any, *arguments: Any) -> dict[str, Any]:
        seen[chosen[0].name] = torch.backends.cudnn.benchmark
        return {}

    monkeypatch.setattr(worker, "_measure", measure)
    monkeypatch.setattr(cases, "make", lambda *arguments: None)
    with torch.backends.cudnn.flags(benchmark=False):
        for job in request.jobs():
            mode = MODES[job.modes[0]]
            list(worker._case(job, job.shapes[0], mode, "ncdhw", torch.device("cuda", 0), None))
    assert seen == {OURS: True, "default": False, "cudnn_benchmark": True}
