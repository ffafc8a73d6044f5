"""Tables of the pages: each figure is that of a row of a record, worked out here once more."""

from __future__ import annotations

import json
import re
from math import exp, log
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from convt3d.bench import shapes
from support import pages, records
from support.pages import TYPES, gain, in_digits, page, rows_of, stored, tables_of

MACHINE = "NVIDIA H200; torch 2.11; cuDNN 91900; driver 580"
OPERATIONS = {
    "forward": "forward",
    "by input": "grad_input",
    "by weight": "grad_weight",
    "training step": "train",
}
LAYOUTS = {"NCDHW": "ncdhw", "convt3d": "ncdhw", "channels_last": "ndhwc"}


@pytest.fixture(name="tools")
def _tools() -> SimpleNamespace:
    return pages.tools()


# --- Pages ---------------------------------------------------------------------------------------


def test_blocks_go_between_their_markers(tools: SimpleNamespace) -> None:
    page = "1\n<!-- a: begin -->\nold\n<!-- a: end -->\n2\n<!-- b: begin -->\n<!-- b: end -->\n3\n"
    blocks = {"a": "new\n\nmore\n", "b": r"\1"}
    text = tools.tables.filled(page, blocks)
    assert text == (
        "1\n<!-- a: begin -->\nnew\n\nmore\n<!-- a: end -->\n2\n<!-- b: begin -->\n\\1\n"
        "<!-- b: end -->\n3\n"
    )
    assert tools.tables.filled(text, blocks) == text
    for wrong in ({"a": ""}, {**blocks, "c": ""}):
        with pytest.raises(ValueError, match="markers"):
            tools.tables.filled(page, wrong)
    with pytest.raises(ValueError, match="markers"):
        tools.tables.filled(page.replace("<!-- b: end -->", ""), blocks)


def test_a_source_names_machine_commits_and_files(tools: SimpleNamespace, tmp_path: Path) -> None:
    rows = [{"commit": "b" * 40}, {}, {"commit": "b" * 40}]
    other = {"environment": {**pages.FACTS, "driver": "590"}, "rows": [{}]}
    results = stored(tools, tmp_path, one=rows, two=[{}], three=other)
    files = "[one](results/one.json), [two](results/two.json)"
    assert results.source("one", "two") == (
        f"Commits bbbbbbbbbbbb, aaaaaaaaaaaa. Raw data: {files}."
    )
    assert results.source("two", machine=True) == (
        f"{MACHINE}; commit aaaaaaaaaaaa. Raw data: [two](results/two.json)."
    )
    assert results.source("three").startswith("NVIDIA H200; torch 2.11; cuDNN 91900; driver 590;")


# --- Layers --------------------------------------------------------------------------------------


def layer_rows(name: str = "kb61", **times: float) -> list[dict[str, Any]]:
    base = {**shapes.named("all")[name].to_dict(), "shape": name, "mode": "tf32", "layout": "ncdhw"}
    return [
        {**base, "pass": "forward", "contender": contender, "ms": ms}
        | ({"layout": "ndhwc"} if contender.endswith("channels_last") else {})
        | ({"share": 0.5, "runs_as": "own"} if contender == "convt3d" else {})
        for contender, ms in times.items()
    ]


def test_a_table_of_layers(tools: SimpleNamespace, tmp_path: Path) -> None:
    rows = layer_rows(convt3d=1.0, default=9.0, cudnn_benchmark=8.0, cudnn_channels_last=2.0)
    rows += layer_rows("kb70", convt3d=2.0, default=4.0, cudnn_benchmark=1.0)
    rows[0]["error"] = {"relative": 3e-4, "pytorch_relative": 1e-7}
    results = stored(tools, tmp_path, x=rows)
    text = tools.tables.section(results, ["tf32"], ["x"], tools.tables.SETTINGS)
    assert rows_of(text) == [
        ["layer", "forward: PyTorch", "convt3d"],
        ["kb61", "2.00 cl", "1.00 2.00x 50%"],
        ["kb70", "1.00 bench", "2.00 **0.50x** 50%"],
        ["geometric mean", "", "1.00x 50%"],
        ["over PyTorch as it comes", "", "4.24x"],
    ]
    assert "Not measured: `cudnn_channels_last` in 1 of 2 cases." in text
    assert (
        "Errors are at most 3.0e-04, more than 2 times PyTorch's in kb61 forward "
        "(3.0e-04, PyTorch's 1.0e-07)."
    ) in text
    del rows[0]["error"]
    text = tools.tables.section(stored(tools, tmp_path, x=rows), ["tf32"], ["x"])
    assert "| kb61 | 2.00 | 1.00 2.00x 50% |" in text
    assert "Errors were not measured" in text


def test_a_table_of_two_types(tools: SimpleNamespace, tmp_path: Path) -> None:
    rows = layer_rows(convt3d=1.0, default=2.0)
    rows[0]["error"] = {"relative": 3e-4, "pytorch_relative": 3e-4}
    rows += [{**row, "mode": "fp16"} for row in layer_rows(convt3d=1.0, default=3.0)]
    results = stored(tools, tmp_path, x=rows)
    text = tools.tables.section(results, ["tf32", "fp16"], ["x"], tools.tables.SETTINGS)
    assert rows_of(text)[:2] == [
        ["layer", "TF32 forward: PyTorch", "convt3d", "float16 forward: PyTorch", "convt3d"],
        ["kb61", "2.00 default", "1.00 2.00x 50%", "3.00 default", "1.00 3.00x 50%"],
    ]
    assert "Errors in TF32 are at most 3.0e-04. Errors in float16 were not measured" in text


def test_conv3d_layers_compare_in_their_format(tools: SimpleNamespace, tmp_path: Path) -> None:
    rows = layer_rows("conv_r3d_64", convt3d=1.0, default=9.0, cudnn_benchmark=8.0)
    rows += layer_rows("conv_vit_patch", convt3d=1.0)
    last = layer_rows("conv_r3d_64", convt3d=2.0, default=4.0, cudnn_channels_last=1.0)
    last += layer_rows("conv_vit_patch", convt3d=2.0, default=8.0)
    rows += [{**row, "layout": "ndhwc"} for row in last]
    text = tools.tables.in_one_format(stored(tools, tmp_path, x=rows), "tf32", ["x"])
    assert tables_of(text) == [
        [
            ["NCDHW", "forward: PyTorch", "convt3d"],
            ["conv_r3d_64", "8.00 bench", "1.00 8.00x 50%"],
            ["conv_vit_patch", "", "1.00 50%"],
            ["geometric mean", "", "8.00x 50%"],
            ["over PyTorch as it comes", "", "9.00x"],
        ],
        [
            ["channels_last", "forward: PyTorch", "convt3d"],
            ["conv_r3d_64", "1.00 bench", "2.00 **0.50x** 50%"],
            ["conv_vit_patch", "8.00", "2.00 4.00x 50%"],
            ["geometric mean", "", "1.41x 50%"],
            ["over PyTorch as it comes", "", "2.83x"],
        ],
    ]
    assert (
        "Not measured: `default` in NCDHW in 1 of 2 cases, `cudnn_benchmark` in 1 of 2 cases, "
        "`cudnn_channels_last` in 1 of 2 cases."
    ) in text


@pytest.mark.parametrize(
    ("runs_as", "ms", "listed", "left_out"),
    [
        ("PyTorch's operator", 1.029, "", 1),
        ("PyTorch's operator", 1.032, "*kb61 0.97x*", 0),
        ("own", 1.029, "kb61 0.97x", 0),
    ],
)
def test_noise_of_one_operator_is_not_listed(
    tools: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    runs_as: str,
    ms: float,
    listed: str,
    left_out: int,
) -> None:
    rows = layer_rows(convt3d=ms, default=1.0) + layer_rows("kb70", convt3d=2.0, default=1.0)
    rows[0]["runs_as"] = runs_as
    # The better setting of another format counts for the transposed layer, not for the Conv3d one.
    conv = layer_rows("conv_r3d_64", convt3d=1.0, default=1.0, cudnn_channels_last=0.5)
    for name, value in (("CONV", {"tf32": ["y"]}), ("OTHERS", {}), ("CPU", [])):
        monkeypatch.setattr(tools.tables, name, value)
    monkeypatch.setattr(tools.tables, "TRANSPOSED", {("tf32",): ["x"]})
    text = tools.tables.slower(stored(tools, tmp_path, x=rows, y=conv))
    cell = ", ".join(filter(None, [listed, "kb70 0.50x"]))
    assert rows_of(text) == [["layers", "forward"], ["transposed, TF32, NCDHW", cell]]
    assert text.startswith(f"Conv3d 0 of 1; transposed {1 + bool(listed)} of 2; ")
    assert f"noise of one operator: {left_out} cases" in text


def cases_of(*names: str) -> dict[tuple[str, ...], dict[tuple[str, str], dict[str, Any]]]:
    """Rows by shape, operation and type, then by contender and format."""
    found: dict[tuple[str, ...], dict[tuple[str, str], dict[str, Any]]] = {}
    for name in names:
        for row in json.loads((records.RESULTS / f"{name}.json").read_text())["rows"]:
            case = found.setdefault((row["shape"], row["pass"], row["mode"]), {})
            case[row["contender"], row["layout"]] = row
    return found


def best(case: dict[tuple[str, str], dict[str, Any]], layout: str = "") -> float:
    """The least time of PyTorch's settings, or of those in a memory format."""
    return min(
        row["ms"]
        for (name, own), row in case.items()
        if name != "convt3d" and "ms" in row and layout in ("", own)
    )


def mean(values: list[float]) -> float:
    return exp(sum(map(log, values)) / len(values))


@records.needed
@pytest.mark.parametrize(
    ("heading", "modes", "names"),
    [
        ("Conv3d layers in TF32", ["tf32"], ["h200-conv-tf32"]),
        ("Conv3d layers in bfloat16", ["bf16"], ["h200-conv-bf16"]),
        *(
            (f"Transposed layers in {title}", modes, [f"h200-{name}" for name in names.split()])
            for title, modes, names in (
                ("TF32", ["tf32"], "forward-tf32 gradients-tf32 train"),
                (
                    "bfloat16 and float16",
                    ["bf16", "fp16"],
                    "forward-bf16 forward-fp16 gradients-bf16 train",
                ),
                ("IEEE float32", ["fp32"], "forward-fp32 gradients-fp32"),
            )
        ),
        ("CPU", ["fp32"], ["cpu-quick"]),
    ],
)
def test_cells_are_those_of_rows(heading: str, modes: list[str], names: list[str]) -> None:
    cases = cases_of(*names)
    measured = {
        (*key, layout)
        for key, case in cases.items()
        for name, layout in case
        if key[2] in modes and name == "convt3d"
    }
    found = tables_of(page(heading))
    one_format = heading.startswith("Conv3d")
    assert [head[0] for head, *_ in found] == (
        ["NCDHW", "channels_last"] if one_format else ["layer"]
    )
    seen = set()
    for head, *body in found:
        peers = LAYOUTS[head[0]] if one_format else ""
        layers = {row[0]: row[1:] for row in body}
        means = layers.pop("geometric mean")
        over_default = layers.pop("over PyTorch as it comes", None)
        (mode, *_), operation = modes, ""
        for at, column in enumerate(head[1:]):
            if column.endswith(": PyTorch"):
                words = column.removesuffix(": PyTorch")
                if len(modes) > 1:
                    kind, words = words.split(" ", 1)
                    mode = TYPES[kind]
                operation = OPERATIONS[words]
                for shape, row in layers.items():
                    case = cases[shape, operation, mode]
                    time, *setting = row[at].split()
                    assert time == in_digits(best(case, peers))
                    if one_format:
                        default = case["default", peers]["ms"] == best(case, peers)
                        assert setting == ([] if default else ["bench"])
                continue
            gains, default_gains = [], []
            layout = peers or LAYOUTS[column]
            for shape, row in layers.items():
                case = cases[shape, operation, mode]
                ours = case["convt3d", layout]
                gains.append(best(case, peers) / ours["ms"])
                default = case.get(("default", layout)) or case["default", "ncdhw"]
                default_gains.append(default["ms"] / ours["ms"])
                share = [f"{100 * ours['share']:.0f}%"] if "share" in ours else []
                assert row[at].split() == [in_digits(ours["ms"]), gain(gains[-1]), *share]
                seen.add((shape, operation, mode, layout))
            assert means[at].split()[0] == gain(mean(gains))
            if over_default:
                assert over_default[at] == gain(mean(default_gains))
    assert seen == measured


@records.needed
@pytest.mark.parametrize("title", ["TF32", "bfloat16"])
def test_settings_that_conv3d_layers_lack_are_told(title: str) -> None:
    text = page(f"Conv3d layers in {title}")
    cases = cases_of(f"h200-conv-{TYPES[title]}").values()
    wanted = set()
    for name, layout in (("cudnn_benchmark", "ncdhw"), ("cudnn_channels_last", "ndhwc")):
        lacking = sum("ms" not in case.get((name, layout), {}) for case in cases)
        if lacking:
            wanted.add(f"`{name}` in {lacking} of {len(cases)} cases")
    found = re.findall(r"Not measured: (.+?)\. Errors", text)
    assert set(", ".join(found).split(", ")) - {""} == wanted


@records.needed
def test_every_slower_case_is_told() -> None:
    wanted, native, noise = set(), set(), 0
    names = [path.stem for path in records.RESULTS.glob("h200-*.json")]
    names.remove("h200-pytorch-numerics")
    for name in [*names, "cpu-quick"]:
        for (shape, operation, mode), case in cases_of(name).items():
            for (contender, layout), row in case.items():
                if contender != "convt3d":
                    continue
                peer = best(case, layout if name.startswith("h200-conv-") else "")
                if round(peer / row["ms"], 2) >= 1:
                    continue
                told = (shape, operation, mode, layout, f"{peer / row['ms']:.2f}x")
                if row["runs_as"] == "PyTorch's operator":
                    if row["ms"] < 1.03 * peer:
                        noise += 1
                        continue
                    native.add(told)
                wanted.add(told)
    text = page("Where PyTorch's best setting is faster")
    head, *body = rows_of(text)
    found, found_native = set(), set()
    for where, *cells in body:
        mode, layout = where.split(", ")[-2:]
        for title, cell in zip(head[1:], cells, strict=True):
            for case in filter(None, cell.split(", ")):
                shape, times = case.strip("*").split()
                told = (shape, OPERATIONS[title], TYPES[mode], LAYOUTS[layout], times)
                found.add(told)
                if case.startswith("*"):
                    found_native.add(told)
    assert found == wanted and len(wanted) > 20
    assert found_native == native
    counts = [int(count) for count in re.findall(r" (\d+) of \d+[;.]", text)]
    assert sum(counts) == len(wanted)
    assert f"noise of one operator: {noise} cases" in text


def measured(contender: str, ms: float, **changes: Any) -> dict[str, Any]:
    error = {"relative": 1e-3, "pytorch_relative": 2e-3}
    row = {"shape": "a", "mode": "bf16", "layout": "ndhwc", "pass": "forward", "runs_as": "sweep"}
    return {**row, "error": error, "contender": contender, "ms": ms, **changes}


def test_layers_that_time_both_sides_are_means(tools: SimpleNamespace, tmp_path: Path) -> None:
    native = {"shape": "b", "runs_as": "PyTorch's operator"}
    inexact = {"relative": 5e-3, "pytorch_relative": 2e-3}
    rows = [
        *(measured("convt3d", 2.0), measured("default", 8.0), measured("cudnn_benchmark", 1.0)),
        measured("cudnn_channels_last", 9.0),
        *(measured("convt3d", 4.0, **native), measured("default", 3.0, **native)),
        measured("cudnn_channels_last", 2.0, **native),
        measured("convt3d", 1.0, **{"pass": "grad_input"}),
        measured("default", 0.5, **{"pass": "grad_input"}),
        measured("cudnn_channels_last", 0.9, **{"pass": "grad_input"}),
        measured("convt3d", 1.0, **{"pass": "grad_weight", "error": inexact}),
        measured("default", 1.0, **{"pass": "grad_weight"}),
        measured("cudnn_channels_last", 3.0, **{"pass": "grad_weight"}),
    ]
    other = [
        measured(name, ms, layout="ncdhw", **{"pass": operation})
        for operation in ("forward", "grad_input", "grad_weight")
        for name, ms in (("convt3d", 2.0), ("default", 9.0), ("cudnn_benchmark", 5.0))
    ]
    later = {**pages.FACTS, "commit": "later"}
    record = tools.tuned_rows.condensed(
        [{"environment": pages.FACTS, "rows": rows}, {"environment": later, "rows": other}]
    )
    assert [row.get("commit") for row in record["rows"]] == [None] * 4 + ["later"] * 3
    step = [
        measured(name, ms, layout="ndhwc", share=None, **{"pass": "train"})
        for name, ms in (("convt3d", 2.0), ("default", 6.0))
    ]
    for row in step:
        del row["error"]
    transposed = tools.tuned_rows.condensed(
        [{"environment": pages.FACTS, "rows": [*({**r, "share": 0.48} for r in rows[-3:]), *step]}]
    )
    text = tools.tables.tuned(
        stored(tools, tmp_path, conv_tuned=record, transposed_tuned=transposed)
    )
    assert rows_of(text)[1:] == [
        [
            *("Conv3d, bfloat16, channels_last", "1.41x, least 0.50x"),
            *("0.50x, least 0.50x", "1.00x, least 1.00x", ""),
        ],
        ["Conv3d, bfloat16, NCDHW", *["2.50x, least 2.50x"] * 3, ""],
        [
            *("transposed, bfloat16, channels_last", "", "", "1.00x, least 1.00x, 48%"),
            "3.00x, least 3.00x",
        ],
    ]
    assert "Conv3d: PyTorch's operator is the faster one in 1 of 7 cases" in text
    assert "PyTorch's was not timed with `cudnn.benchmark` in 1 of 2 cases." in text
    both = "Slower although it runs on both sides: b forward in bfloat16, channels_last 0.50x."
    assert both in text
    assert "Slower: a by input in bfloat16, channels_last 0.50x." in text
    assert (
        "Errors are more than 2 times PyTorch's in 1 of 7 cases ([numerics](numerics.md)): "
        "a by weight in bfloat16, channels_last." in text
    )


@records.needed
def test_means_of_layers_that_time_both_sides_are_those_of_rows() -> None:
    rows = json.loads((records.RESULTS / "conv-tuned.json").read_text())["rows"]
    table = rows_of(page("Layers that time both sides"))[1:]
    conv = [row for row in table if row[0].startswith("Conv3d")]
    assert len(conv) == 4 and len(table) == 6
    for title, *cells, step in conv:
        _, dtype, format = title.split(", ")
        mode, layout = TYPES[dtype], LAYOUTS[format]
        assert not step
        for operation, cell in zip(("forward", "grad_input", "grad_weight"), cells, strict=True):
            gains = [
                min(row["default_ms"], row["cudnn_benchmark_ms"]) / row["ms"]
                for row in rows
                if (row["mode"], row["layout"], row["pass"]) == (mode, layout, operation)
            ]
            mean = exp(sum(map(log, gains)) / len(gains))
            assert cell == f"{mean:.2f}x, least {min(gains):.2f}x" and len(gains) == 25


@records.needed
def test_the_worst_of_other_layers_is_named() -> None:
    for title, layers, *_, worst in rows_of(page("Other transposed layers"))[1:]:
        cases = cases_of(f"h200-others-{TYPES[title]}")
        gains = {key[0]: best(c) / c["convt3d", "ncdhw"]["ms"] for key, c in cases.items()}
        shape = min(gains, key=lambda name: gains[name])
        assert (layers, worst) == (str(len(gains)), f"{gains[shape]:.2f}x `{shape}`")


@records.needed
def test_settings_of_pytorch_are_explained() -> None:
    explained = set(re.findall(r"`([^`]+)`", page("Transposed layers")))
    used = set()
    for title in ("TF32", "bfloat16 and float16", "IEEE float32"):
        head, *body = rows_of(page(f"Transposed layers in {title}"))
        at = [i for i, column in enumerate(head) if column.endswith("PyTorch")]
        used |= {row[i].partition(" ")[2] for row in body for i in at} - {""}
    assert used <= explained and len(used) > 5
    assert "`bench`" in page("Conv3d layers")


@records.needed
def test_the_layers_have_their_geometry() -> None:
    cells = [c for row in rows_of(page("The layers"))[1:] for c in (row[:2], row[2:]) if c[0]]
    for name, text in cells:
        shape = shapes.named("all")[name]
        channels, *words = text.split(", ")[0].split()
        g = shape.geometry
        assert channels == f"{g.in_channels}->{g.out_channels}"
        full = g.label.removeprefix("conv ").split()[1:]
        assert words == [word for word in full if word not in ("s1", "p0", "d1", "g1")]
        assert text.split(", ")[1] == "x".join(map(str, (shape.batch, *shape.input_size)))
    assert sorted(name for name, _ in cells) == sorted(shapes.named("all"))
