"""Documents, figures and examples: they are those of the code and of the records."""

from __future__ import annotations

import dataclasses
import json
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import convt3d
from support import records

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")])
EXAMPLES = sorted(path.stem for path in ROOT.glob("examples/*.py"))


@pytest.fixture(scope="module")
def figures() -> SimpleNamespace:
    pytest.importorskip("matplotlib")
    return SimpleNamespace(**runpy.run_path(str(ROOT / "tools" / "figures.py")))


@records.needed
def test_tables_are_those_of_the_records(figures: SimpleNamespace) -> None:
    for path, text in figures.documents().items():
        assert path.read_text() == text, f"{path.name} is stale, run: make figures"


@records.needed
def test_plots_are_those_of_the_records(figures: SimpleNamespace) -> None:
    found = figures.records()
    assert figures.SHOWN_IN_README in found
    for name, record in found.items():
        plot = (ROOT / "docs" / "figures" / f"{name}.svg").read_text()
        wanted = {figures.report.headline(record)}
        wanted |= {f"{line.speedup:.1f}x" for line in figures.report.lines(record) if line.speedup}
        assert wanted <= set(re.findall(r">([^<>]+)</text>", plot)), f"{name}: make figures"


@records.needed
def test_times_lie_within_their_spread(figures: SimpleNamespace) -> None:
    timed = 0
    for name, record in figures.records().items():
        for row in record.rows.values():
            if "ms" in row:
                assert row["ms_low"] <= row["ms"] <= row["ms_high"], f"{name}: {row}"
                timed += 1
    assert timed > 1000


@records.needed
def test_what_kernelbench_compares_with_is_that_of_its_record() -> None:
    page = (ROOT / "docs" / "kernelbench.md").read_text()
    record = json.loads((records.RESULTS / "h200-pytorch-numerics.json").read_text())
    rows = re.findall(r"\| (kb\w+) \| \d \| (.+), (.+) \| (.+), (.+) \|", page)
    assert {name for name, *_ in rows} == set(record["default"])
    for name, *values in rows:
        known = [*record["default"][name], *record["tf32_off"][name]]
        assert [float(value) for value in values] == known, name


@records.needed
def test_records_of_networks_become_tables(figures: SimpleNamespace, tmp_path: Path) -> None:
    times = {"before": 30.0, "after": 20.0, "up_before": 12.0, "up_after": 3.0}
    times["up_share_before"] = 0.4
    rows: dict[str, dict[str, Any]] = {
        "models": {
            "network": "net", "precision": "bf16", "cudnn_benchmark": True,
            "inference": times, "training": {**times, "after": 15.0},
        },
        "training": {
            "network": "net", "precision": "tf32", "step_ms": {"pytorch": 30.0, "convt3d": 24.0},
            "up_share": {"pytorch": 0.25}, "distance": {"convt3d": 1e-4, "noise": 2e-4},
        },
        "distributed": {
            "wrapper": "ddp", "run": "convt3d", "ms_on_one": 50.0, "ms_on_all": 52.0,
            "efficiency": 50 / 52,
        },
    }  # fmt: skip
    facts = next(iter(figures.records().values())).environment
    for kind, row in rows.items():
        record = {"environment": facts, "steps": 9, "ranks": 2, "patch": 64, "rows": [row]}
        (tmp_path / f"{kind}-x.json").write_text(json.dumps(record))
    networks, training, scaling = figures.tables.sections(tmp_path)
    inference = "| net | bf16 | yes | inference | 30 ms | 20 ms | **1.50x** | 12 ms | 3 ms | "
    assert inference + "**4.00x** | 40% |" in networks
    assert "| training | 30 ms | 15 ms | **2.00x** |" in networks
    row_text = "| net | tf32 | 30 ms | 24 ms | **1.25x** | 25% | 1.0e-04 | 2.0e-04 |"
    assert row_text in training
    assert "| ddp | convt3d | 50 ms | 52 ms | 96.2% |" in scaling
    assert "results/distributed-x.json" in scaling


@records.needed
def test_training_beside_the_noise_of_plans_becomes_a_table(
    figures: SimpleNamespace, tmp_path: Path
) -> None:
    row = {
        "network": "net", "precision": "tf32", "step_ms": {"pytorch": 30.0, "convt3d": 24.0},
        "conv_share": {"pytorch": 0.75},
        "distance": {"convt3d": 1e-4, "noise": 2e-4, "plans": 3e-4},
    }  # fmt: skip
    facts = next(iter(figures.records().values())).environment
    record = {"environment": facts, "steps": 50, "rows": [row]}
    (tmp_path / "training-x.json").write_text(json.dumps(record))
    (section,) = figures.tables.sections(tmp_path)
    assert (
        "| net | tf32 | 30 ms | 24 ms | **1.25x** | 75% | 1.0e-04 | 2.0e-04 | 3.0e-04 |" in section
    )
    assert "| share of convolutions |" in section
    assert len({line.count("|") for line in section.splitlines() if line.startswith("|")}) == 1


@records.needed
def test_a_record_of_conv3d_layers_says_so(figures: SimpleNamespace) -> None:
    (record,) = (r for name, r in figures.records().items() if name == "h200-forward-tf32")
    assert "Conv3d" not in figures.section("x", record).splitlines()[0]
    shape = figures.shapes.named("conv")["conv_r3d_64"]
    (row, *_) = (dict(row) for row in record.rows.values() if row["contender"] == "convt3d")
    row |= {"shape": shape.name, "geometry": shape.geometry.to_dict()}
    text = figures.section("x", dataclasses.replace(record, rows={"one": row}))
    assert ": Conv3d, forward (" in text.splitlines()[0]
    assert "| conv_r3d_64 | conv 64->64 k3 s1 p1 d1 g1, " in text


def test_drawings_are_those_of_the_phases(figures: SimpleNamespace) -> None:
    for path, text in figures.schematics.drawings(ROOT / "docs" / "figures").items():
        assert path.read_text() == text, f"{path.name} is stale, run: make figures"


def test_links_lead_somewhere() -> None:
    checked = 0
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            generated = link in ("changes.md", "contributing.md", "emulator.md")
            absent = "results/" in link and not records.PRESENT
            if "://" not in link and not absent and not (generated and page.parent.name == "docs"):
                assert (page.parent / link).exists(), f"{page.name}: {link}"
                checked += 1
    assert checked > 20


@pytest.mark.parametrize("repository", [None, "https://git.example/team/convt3d/"])
def test_links_of_the_readme_on_a_package_index(repository: str | None) -> None:
    hook = runpy.run_path(str(ROOT / "tools" / "pypi_readme.py"))
    text = (ROOT / "README.md").read_text()
    shown = hook["on_index"](text, repository, "1.2.3")
    links = re.findall(r"(!?)\[[^]]*\]\(([^)]+)\)", shown)
    assert "](docs/" in text and "](docs/" not in shown
    if repository is None:
        assert not links
        assert "examples/ has single" in " ".join(shown.split())
    else:
        figure = "https://git.example/team/convt3d/raw/v1.2.3/docs/figures/h200-forward-tf32.svg"
        assert ("!", figure) in links
        assert ("", "https://git.example/team/convt3d/blob/v1.2.3/docs/index.md") in links
        assert all(target.startswith("https://") for _, target in links)


def test_quick_start_runs() -> None:
    text = (ROOT / "docs" / "index.md").read_text()
    names: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) >= 4
    for block in blocks:
        exec(compile(block, "docs/index.md", "exec"), names)


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = set(sys.modules)
    with torch.random.fork_rng():
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    said = capsys.readouterr().out
    if name == "convert_monai":
        assert said.startswith("skipped:") == ("monai" not in {*before, *sys.modules})
    assert said.strip()


def test_documents_name_real_options() -> None:
    """Every option of the command that a page shows exists."""
    from typer.main import get_command

    from convt3d.cli import app

    shown = 0
    for page in PAGES:
        for words in re.findall(r"convt3d (\w+(?: [^`\n#]*)?)", page.read_text()):
            command: Any = get_command(app)
            for word in words.split():
                command = getattr(command, "commands", {}).get(word, command)
            known = {o for p in command.params for o in p.opts} | {"--help"}
            for option in re.findall(r"(?<=\s)--[a-z-]+", words):
                assert option in known, f"{page.name}: convt3d {words}"
                shown += 1
    assert shown > 10


def test_the_architecture_names_every_module() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    folders = (".", "bench", "cli", "compile", "cuda", "cuda/plan", "export")
    folders += ("export/network", "export/tidy")
    for folder in folders:
        for path in sorted((ROOT / "src" / "convt3d" / folder).glob("*.py")):
            if path.name != "__init__.py":
                assert path.name in page, f"docs/architecture.md lacks {folder}/{path.name}"


def test_the_license_is_apache() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert 'license = "Apache-2.0"' in (ROOT / "pyproject.toml").read_text()
    assert "license: Apache-2.0" in (ROOT / "CITATION.cff").read_text()
    assert f"version: {convt3d.__version__}\n" in (ROOT / "CITATION.cff").read_text()
