"""Documents, figures and examples: they are those of the code and of the records."""

from __future__ import annotations

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
from convt3d.bench import report
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
    documents = figures.documents()
    assert sorted(path.name for path in documents) == ["README.md", "benchmarks.md"]
    for path, text in documents.items():
        assert path.read_text() == text, f"{path.name} is stale, run: make figures"


@records.needed
def test_the_page_of_figures_is_read_in_one_sitting() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    # Some 290 lines are rows of tables, as many as there are layers and networks (each of 26 Conv3d
    # layers has four, each of 17 transposed ones three); 460 leave 170 to headings and prose.
    assert len(text.splitlines()) <= 460
    assert len(text.encode()) <= 48_000
    headings = re.findall(r"^#+ (.+)", text, re.MULTILINE)
    assert len(headings) == len(set(headings)) > 10
    assert sum(path.stat().st_size for path in records.RESULTS.iterdir()) < 2_000_000


@records.needed
def test_a_page_leads_to_every_record() -> None:
    texts = [page.read_text() for page in PAGES]
    linked = {name for text in texts for name in re.findall(r"results/([\w-]+)\.json", text)}
    found = {path.stem for path in records.RESULTS.glob("*.json")}
    quoted = {name for name in found if name.startswith("kernelbench")}  # by the files themselves
    assert found - quoted <= linked


@records.needed
def test_plots_are_those_of_the_records(figures: SimpleNamespace) -> None:
    found = figures.records()
    assert figures.tables.IN_README in found
    for name, record in found.items():
        plot = (ROOT / "docs" / "figures" / f"{name}.svg").read_text()
        wanted = {report.headline(record)}
        wanted |= {f"{line.speedup:.1f}x" for line in report.lines(record) if line.speedup}
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
