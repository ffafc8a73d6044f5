"""Tables of whole networks: each figure is that of a row of a record, worked out here once more."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support import pages, records
from support.pages import ROOT, TYPES, gain, in_digits, page, rows_of, stored


@pytest.fixture(name="tools")
def _tools() -> SimpleNamespace:
    return pages.tools()


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
    found = {}
    if layout == "ncdhw":
        head, *body = rows_of(text)
        for network, *cells in body:
            for title, cell in zip(head[1:], cells, strict=True):
                mode, how = title.rsplit(" ", 1)
                found[network, TYPES[mode], how] = cell
    else:  # a sentence
        for network, mode, how, change in re.findall(
            r"(\S+) (\S+) (\w+) (\S+ -> [^;]+x)[;.]", text
        ):
            found[network, TYPES[mode], how] = change
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


def test_steps_that_wait_for_the_host_are_told(tools: SimpleNamespace, tmp_path: Path) -> None:
    rows = network_rows() + network_rows(network="gan", kind="inference", mode="tf32")
    rows += [{**row, "network": "graphs", "conv_ms": None, "conv_share": None} for row in rows[:1]]
    for row in rows:
        busy = 0.5 if row["network"] == "gan" else 0.9
        row["conv_ms"] = row["conv_share"] and row["conv_share"] * busy * row["ms"]
    text = tools.networks.waits(stored(tools, tmp_path, networks_timed=rows), ["networks-timed"])
    steps = "TF32 eager inference 15.0 of 30.0 ms, TF32 eager converted inference 10.0 of 20.0 ms"
    assert text.endswith(f"for less than 80% of the time: gan: {steps}.")


def test_cuda_graphs_stand_beside_steps_without(tools: SimpleNamespace, tmp_path: Path) -> None:
    plain = network_rows(compiled=True)
    rows = [{**row, "graphs": True, "ms": row["ms"] / 2} for row in plain]
    rows += plain + network_rows(network="gan", compiled=True, graphs=True)
    rows += network_rows(network="gan")  # eager
    kept = {"networks_graphs": rows}
    assert [*tools.networks.graphs(stored(tools, tmp_path, **kept))] == [
        "unet bfloat16 training 15.0 -> 10.0, 1.50x (without 30.0 -> 20.0, 1.50x)",
        "gan bfloat16 training 30.0 -> 20.0, 1.50x",
    ]


def test_networks_in_a_sentence(tools: SimpleNamespace, tmp_path: Path) -> None:
    rows = network_rows() + network_rows(network="gan", kind="inference", mode="tf32")
    text = tools.networks.in_a_sentence(
        stored(tools, tmp_path, networks_timed=rows), [tools.networks.TIMED]
    )
    wanted = "unet bfloat16 training 30.0 -> 20.0, 1.50x; gan TF32 inference 30.0 -> 20.0, 1.50x. "
    assert text.startswith(wanted)
    assert "results/networks-timed.json" in text


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


@records.needed
def test_the_readme_has_networks_with_the_fusing_backend() -> None:
    readme = (ROOT / "README.md").read_text()
    names = {mode: name for name, mode in TYPES.items()}
    sides: dict[tuple[str, ...], dict[str, float]] = {}
    rows = json.loads((records.RESULTS / "networks-fused.json").read_text())["rows"]
    for row in rows:
        setting = row["network"], names[row["mode"]], row["kind"]
        sides.setdefault(setting, {})[row["side"]] = row["ms"]
    assert len(sides) > 4
    for setting, ms in sides.items():
        before, after, fused = ms["pytorch"], ms["convt3d"], ms["convt3d fused"]
        found = re.search(rf"{' '.join(setting)} (\S+) -> (\S+), \S+, and (\S+), (\S+)x", readme)
        assert found is not None, setting
        for text, value in zip(found.groups(), (before, after, fused, before / fused), strict=True):
            assert float(text) == pytest.approx(value, rel=5e-3)
