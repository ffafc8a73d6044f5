"""Tables of the pages: each figure is that of a row of a record, worked out here once more."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator
from importlib import import_module
from math import exp, log
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from convt3d.bench import shapes
from support import records

ROOT = Path(__file__).parents[1]
FACTS: dict[str, Any] = {
    "cpu": "x",
    "cpu_threads": 1,
    "gpu": "NVIDIA H200",
    "torch": "2.11",
    "cudnn": 91900,
    "driver": "580",
    "commit": "a" * 40,
}
MACHINE = "NVIDIA H200; torch 2.11; cuDNN 91900; driver 580"
OPERATIONS = {
    "forward": "forward",
    "by input": "grad_input",
    "by weight": "grad_weight",
    "training step": "train",
}
LAYOUTS = {"NCDHW": "ncdhw", "convt3d": "ncdhw", "channels_last": "ndhwc"}
TYPES = {"TF32": "tf32", "bfloat16": "bf16", "float16": "fp16", "IEEE float32": "fp32"}


@pytest.fixture(scope="module")
def tools() -> Iterator[SimpleNamespace]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "tools"))
        yield SimpleNamespace(
            tables=import_module("tables"), networks=import_module("network_tables")
        )


def stored(tools: SimpleNamespace, folder: Path, **kept: Any) -> Any:
    """Records of a folder, each given by its rows or by what differs from the usual."""
    for name, values in kept.items():
        values = values if isinstance(values, dict) else {"rows": values}
        values = {"environment": FACTS, "command": [], "started": "", **values}
        (folder / f"{name.replace('_', '-')}.json").write_text(json.dumps(values))
    return tools.tables.Results(folder, "results")


def rows_of(text: str) -> list[list[str]]:
    """Cells of the tables in a text, without their rules."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert len({line.count("|") for line in lines}) == 1
    return [line[2:-2].split(" | ") for line in lines]


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
    other = {"environment": {**FACTS, "driver": "590"}, "rows": [{}]}
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
    text = tools.tables.section(results, "tf32", ["x"], named=True)
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
    text = tools.tables.section(stored(tools, tmp_path, x=rows), "tf32", ["x"], named=False)
    assert "| kb61 | 2.00 | 1.00 2.00x 50% |" in text
    assert "Errors were not measured" in text


def page(heading: str) -> str:
    """A section of the page of figures."""
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    return re.split(r"\n##+ ", text.split(f"# {heading}\n", 1)[1])[0]


def cases_of(*names: str) -> dict[tuple[str, ...], dict[tuple[str, str], dict[str, Any]]]:
    """Rows by shape, operation and type, then by contender and format."""
    found: dict[tuple[str, ...], dict[tuple[str, str], dict[str, Any]]] = {}
    for name in names:
        for row in json.loads((records.RESULTS / f"{name}.json").read_text())["rows"]:
            case = found.setdefault((row["shape"], row["pass"], row["mode"]), {})
            case[row["contender"], row["layout"]] = row
    return found


def best(case: dict[tuple[str, str], dict[str, Any]]) -> float:
    return min(r["ms"] for (name, _), r in case.items() if name != "convt3d" and "ms" in r)


def in_digits(value: float) -> str:
    return f"{value:.{3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0}f}"


def gain(value: float) -> str:
    text = f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}x"
    return f"**{text}**" if round(value, 2) < 1 else text


@records.needed
@pytest.mark.parametrize(
    ("heading", "mode", "names"),
    [
        ("Conv3d layers in TF32", "tf32", ["h200-conv-tf32"]),
        ("Conv3d layers in bfloat16", "bf16", ["h200-conv-bf16"]),
        *(
            (f"Transposed layers in {title}", mode, [f"h200-{n}-{mode}" for n in parts] + more)
            for title, mode, parts, more in (
                ("TF32", "tf32", ["forward", "gradients"], ["h200-train"]),
                ("bfloat16", "bf16", ["forward", "gradients"], ["h200-train"]),
                ("float16", "fp16", ["forward"], []),
                ("IEEE float32", "fp32", ["forward", "gradients"], []),
            )
        ),
        ("CPU", "fp32", ["cpu-quick"]),
    ],
)
def test_cells_are_those_of_rows(heading: str, mode: str, names: list[str]) -> None:
    cases = cases_of(*names)
    head, *body = rows_of(page(heading))
    measured = {
        (*key[:2], layout)
        for key, case in cases.items()
        for name, layout in case
        if key[2] == mode and name == "convt3d"
    }
    layers = {row[0]: row[1:] for row in body}
    means = layers.pop("geometric mean")
    layers.pop("over PyTorch as it comes", None)
    seen = set()
    operation = ""
    for at, column in enumerate(head[1:]):
        if column.endswith(": PyTorch"):
            operation = OPERATIONS[column.removesuffix(": PyTorch")]
            for shape, row in layers.items():
                assert row[at].split()[0] == in_digits(best(cases[shape, operation, mode]))
            continue
        gains = []
        for shape, row in layers.items():
            case = cases[shape, operation, mode]
            ours = case["convt3d", LAYOUTS[column]]
            gains.append(best(case) / ours["ms"])
            share = [f"{100 * ours['share']:.0f}%"] if "share" in ours else []
            assert row[at].split() == [in_digits(ours["ms"]), gain(gains[-1]), *share]
            seen.add((shape, operation, LAYOUTS[column]))
        assert means[at].split()[0] == gain(exp(sum(map(log, gains)) / len(gains)))
    assert seen == measured


@records.needed
def test_every_slower_case_is_told() -> None:
    wanted, native = set(), set()
    names = [path.stem for path in records.RESULTS.glob("h200-*.json")]
    names.remove("h200-pytorch-numerics")
    for name in [*names, "cpu-quick"]:
        for (shape, operation, mode), case in cases_of(name).items():
            for (contender, layout), row in case.items():
                if contender == "convt3d" and round(best(case) / row["ms"], 2) < 1:
                    told = (shape, operation, mode, layout, f"{best(case) / row['ms']:.2f}x")
                    wanted.add(told)
                    if row["runs_as"] == "PyTorch's operator":
                        native.add(told)
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
    assert found == wanted and len(wanted) > 100
    assert found_native == native
    counts = [int(count) for count in re.findall(r" (\d+) of \d+[;.]", text)]
    assert sum(counts) == len(wanted)


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
    for title in TYPES:
        head, *body = rows_of(page(f"Transposed layers in {title}"))
        at = [i for i, column in enumerate(head) if column.endswith("PyTorch")]
        used |= {row[i].partition(" ")[2] for row in body for i in at} - {""}
    assert used <= explained and len(used) > 5


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


# --- Networks ------------------------------------------------------------------------------------


@records.needed
@pytest.mark.parametrize("layout", ["ncdhw", "ndhwc"])
def test_cells_of_networks_are_those_of_rows(layout: str) -> None:
    heading, names = {
        "ncdhw": ("Whole networks", ["networks-h200", "networks-libraries-h200"]),
        "ndhwc": ("Networks in channels_last_3d", ["networks-ndhwc-h200"]),
    }[layout]
    times: dict[tuple[str, ...], dict[str, list[float]]] = {}
    for name in names:
        for row in json.loads((records.RESULTS / f"{name}.json").read_text())["rows"]:
            assert row["kind"] == "training" and row["cudnn_benchmark"] and not row["tuned"]
            if row["layout"] == layout:
                how = "compiled" if row["compiled"] else "eager"
                sides = times.setdefault((row["network"], row["mode"], how), {})
                sides.setdefault(row["side"], []).append(row["ms"])
    text = page(heading)
    head, *body = rows_of(text)
    found = {}
    for network, *cells in body:
        for title, cell in zip(head[1:], cells, strict=True):
            mode, how = title.rsplit(" ", 1)
            found[network, TYPES[mode], how] = cell
    assert found.keys() == times.keys()
    for setting, sides in times.items():
        before, (after,) = statistics.median(sides["pytorch"]), sides["convt3d"]
        change = f"{in_digits(before)} -> {in_digits(after)}, {gain(before / after)}"
        assert found[setting] == change
    if layout == "ncdhw":
        readme = (ROOT / "README.md").read_text()
        assert "\n".join(line for line in text.splitlines() if line.startswith("|")) in readme


def network_rows(**changes: Any) -> list[dict[str, Any]]:
    row = {
        "network": "unet", "mode": "bf16", "layout": "ncdhw", "compiled": False,
        "cudnn_benchmark": True, "kind": "training", "optimiser": False, "first_s": 2.0,
        "peak_mbytes": 4000.0, "conv_ms": 9.0, "conv_share": 0.5, **changes,
    }  # fmt: skip
    sides = {"pytorch": 30.0, "convt3d": 20.0}
    return [
        {**row, "side": side, "part": part, "ms": ms}
        for part, (side, ms) in enumerate(sides.items())
    ]


def test_networks_of_several_records_are_one_table(tools: SimpleNamespace, tmp_path: Path) -> None:
    others = network_rows(network="MONAI A", mode="tf32", compiled=True, commit="b" * 40)
    others[1]["ms_of_processes"] = [19.0, 20.0, 25.0]
    failed = [{**row, "failed": "no kernel"} for row in network_rows(network="broken")]
    results = stored(
        tools,
        tmp_path,
        networks_h200=network_rows() + network_rows(layout="ndhwc") + failed,
        networks_libraries_h200={
            "rows": others,
            "runs": [{"commit": "b" * 40, "how": "at once"}, {"commit": "c"}],
        },
    )
    found = tools.networks.networks(results, tools.networks.NETWORKS)
    assert rows_of(found) == [
        ["network", "TF32 compiled", "bfloat16 eager"],
        ["unet", "", "30.0 -> 20.0, 1.50x"],
        ["MONAI A", "30.0 -> 20.0, 1.50x", ""],
    ]
    assert "Commits aaaaaaaaaaaa, bbbbbbbbbbbb." in found
    memory = tools.networks.by_network(
        tools.networks._lines(results, ["networks-h200"], "ncdhw"), tools.networks._memory
    )
    assert rows_of(memory)[1] == ["unet", "50% -> 50%, 4.00 -> 4.00"]
    notes = tools.networks.notes(results, tools.networks.NETWORKS)
    assert "took eager 2.0 to 2.0 s, converted 2.0 to 2.0 s" in notes
    waits = "MONAI A: TF32 compiled 18.0 of 30.0 ms"
    assert waits in notes and "converted 18.0 of 20.0" not in notes
    assert "MONAI A: TF32 compiled converted 19.0 to 25.0 ms." in notes
    assert notes.endswith("Rows of commit bbbbbbbbbbbb: at once.")


def up_row(network: str, before: float, share: float, **changes: Any) -> dict[str, Any]:
    times = {"before": before, "after": 20.0, "up_share_before": share}
    times |= {"up_before": 12.0, "up_after": 3.0}
    row = {"network": network, "precision": "bf16", "cudnn_benchmark": False, "inference": times}
    return {**row, "training": {**times, "after": 10.0}, **changes}


def test_transposed_layers_alone(tools: SimpleNamespace, tmp_path: Path) -> None:
    rows = [up_row("a", 9.0, 0.1), up_row("a", 30.0, 0.2, cudnn_benchmark=True)]
    rows.append(up_row("a", 50.0, 0.25, precision="tf32"))
    text = tools.networks.up_layers(stored(tools, tmp_path, models_h200=rows))
    head, off, on = rows_of(text)
    assert head[2:6] == [
        f"{t} {k}" for t in ("TF32", "bfloat16") for k in ("inference", "training")
    ]
    assert off[:4] == ["a", "off", "50.0 -> 20.0, 2.50x", "50.0 -> 10.0, 5.00x"]
    assert off[4:] == ["9.00 -> 20.0, **0.45x**", "9.00 -> 10.0, **0.90x**", "10% to 25%", "4.00x"]
    assert on == ["a", "on", "", "", "30.0 -> 20.0, 1.50x", "30.0 -> 10.0, 3.00x", "20%", "4.00x"]


def test_gains_by_transposed_layers_alone_are_a_sentence(
    tools: SimpleNamespace, tmp_path: Path
) -> None:
    rows = [up_row("big", 60.0, 0.9), up_row("big", 300.0, 0.9)]
    rows += [up_row("a", 9.0, 0.1), up_row("b", 12.0, 0.25)]
    text = tools.networks.up_layers_in_short(stored(tools, tmp_path, models_h200=rows))
    assert "big 3.00x to 15.0x in inference and 6.00x to 30.0x in training; the 2 others" in text
    assert "up to 25% of the time in them, 0.45x to 0.60x in inference and 0.90x to 1.20x" in text


def test_loss_curves_are_one_table(tools: SimpleNamespace, tmp_path: Path) -> None:
    row = {
        "network": "net", "precision": "tf32", "step_ms": {"pytorch": 30.0, "convt3d": 24.0},
        "up_share": {"pytorch": 0.25}, "distance": {"convt3d": 1e-4, "noise": 2e-4},
    }  # fmt: skip
    whole = {
        **row,
        "conv_share": {"pytorch": 0.75},
        "distance": {"convt3d": 1e-4, "noise": 2e-4, "plans": 3e-4},
    }
    kept = {
        name.replace("-", "_"): {"steps": 50, "tuned": name == "training-conv-h200", "rows": [r]}
        for name, r in zip(tools.networks.CURVES, (whole, whole, row), strict=True)
    }
    text = tools.networks.curves(stored(tools, tmp_path, **kept))
    first, second, third = rows_of(text)[1:]
    assert first[:4] == ["net", "TF32", "all", "timed"]
    assert first[4:] == ["30.0 -> 24.0, 1.25x", "75%", "1.0e-04", "2.0e-04", "3.0e-04"]
    assert second[3] == "planned"
    assert third[2:] == [
        *("transposed", "planned", "30.0 -> 24.0, 1.25x", "25%", "1.0e-04", "2.0e-04", ""),
    ]
    assert "50 steps" in text


def test_weak_scaling(tools: SimpleNamespace, tmp_path: Path) -> None:
    row = {"wrapper": "ddp", "run": "convt3d", "ms_on_one": 50.0, "ms_on_all": 52.0}
    values = {"ranks": 2, "patch": 64, "rows": [{**row, "efficiency": 50 / 52}]}
    text = tools.networks.scaling(stored(tools, tmp_path, distributed_h200=values))
    assert rows_of(text)[1] == ["ddp", "convt3d", "50.0 ms", "52.0 ms", "96.2%"]
    assert "64^3" in text and "results/distributed-h200.json" in text
