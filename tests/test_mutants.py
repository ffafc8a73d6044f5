"""Drawing and applying mutations, and the copy that they are applied to."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from emulator import build
from support import mutations
from support.mutations import Mutation

ROOT = Path(__file__).resolve().parent.parent

CUDA = """#pragma once
#define LARGEST 7 + 3  // 5 < 6
namespace convt3d {
// A comment: a + b < 4; __syncthreads();
template <int A, int B = 2>
CONVT3D_DEVICE void add(const float* from, int (&sums)[A], int n) {
  static_assert(A % 2 == 0, "an even number: 2 * n");
  for (int i = threadIdx.x; i < n; i += 32) sums[i] = min(sums[i], int(from[i] * 0.5f));
  ring.wait_full();  // 8
  __syncthreads();
  async_wait<A - 1>();
  if (n >> 1 == 3u && fence(n)) grid_dependency_wait();
}
}  // namespace convt3d
"""

PYTHON = '''"""A planner: 1 + 1."""
RATE = 3 * 4

def shared_bytes(n: int, *, stages: int = 2) -> int:
    """At most 8 < 9."""
    if n < 0:
        raise ValueError(f"{n} of 5")
    return max(n * stages, 16) + sum(*[-n])

def shape_cost(n: int) -> float:
    return 2 * n

def share(n: int) -> float:
    return 3 * n
'''


def places(file: str, text: str) -> list[tuple[str, str]]:
    found = mutations.mutations(file, text, mutations.random.Random(0))
    return [(mutation.kind, mutation.old) for mutation in found]


def test_places_of_a_kernel() -> None:
    assert sorted(places("a.cuh", CUDA)) == sorted(
        [
            ("bound", "<"),
            ("operator", "+="),
            ("constant", "32"),
            ("bound", "min"),
            ("operator", "*"),
            ("barrier", "ring.wait_full()"),
            ("barrier", "__syncthreads()"),
            ("barrier", "async_wait<A - 1>()"),
            ("operator", "-"),
            ("constant", "1"),
            ("operator", ">>"),
            ("constant", "1"),
            ("operator", "=="),
            ("constant", "3"),
            ("operator", "&&"),
            ("barrier", "grid_dependency_wait()"),
        ]
    )


def test_places_of_a_planner() -> None:
    expected = [("bound", "<"), ("constant", "0"), ("bound", "max"), ("operator", "*")]
    expected += [("constant", "16"), ("operator", "+")]
    assert sorted(places("a.py", PYTHON)) == sorted(expected)


def test_a_mutation_changes_its_place_alone() -> None:
    for file, text in (("a.cuh", CUDA), ("a.py", PYTHON)):
        for mutation in mutations.draw({file: text}, 3):
            mutated = mutation.apply(text)
            assert mutated != text
            assert mutated[: mutation.begin] == text[: mutation.begin]
            assert mutated.endswith(text[mutation.end :])
            assert len(mutated.splitlines()) == len(text.splitlines())
            line = text.splitlines()[mutation.line(text) - 1]
            assert f"\n-{line}\n+" in mutation.diff(text)
    with pytest.raises(ValueError, match=r"a\.cuh has no"):
        mutation = Mutation("a.cuh", "constant", 3, 4, "9", "8")
        mutation.apply(CUDA)


def test_numbers_are_off_by_one_and_never_negative() -> None:
    for seed in range(5):
        for mutation in mutations.draw({"a.cuh": CUDA.replace("32", "0")}, seed):
            if mutation.kind == "constant":
                assert abs(int(mutation.new) - int(mutation.old)) == 1
                assert int(mutation.new) >= 0


def test_draws_evenly_and_the_same_ones_each_time() -> None:
    texts = {"a.cuh": CUDA, "b.cuh": CUDA, "c.py": PYTHON}
    first = list(itertools.islice(mutations.draw(texts, 7), 15))
    assert first[:9] == list(itertools.islice(mutations.draw(texts, 7), 9))
    assert first != list(itertools.islice(mutations.draw(texts, 8), 15))
    assert Counter(mutation.file for mutation in first) == {"a.cuh": 5, "b.cuh": 5, "c.py": 5}
    everything = list(mutations.draw(texts, 7))
    assert len(set(everything)) == len(everything) == 16 + 16 + 6
    keys = {mutation.key(texts[mutation.file]) for mutation in everything}
    assert len(keys) == len(everything)
    assert first[0].key(texts[first[0].file]) != first[0].key("another text")


def test_takes_turns() -> None:
    assert mutations.evenly([["a", "b", "c"], [], ["d"]]) == ["a", "d", "b", "c"]


# ---------------------------------------------------------------- tools/mutants.py


@pytest.fixture(scope="module")
def tool() -> Any:
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "tools" / "mutants.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


def test_kernels_and_their_planners_are_drawn_from(tool: Any) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    files = tool.files()
    assert "src/convt3d/cuda/kernels/phases/kernel.cu" in files
    assert "src/convt3d/cuda/kernels/geometry/axis.cuh" in files
    assert "src/convt3d/cuda/plan/wgrad/layout.py" in files
    assert "src/convt3d/cuda/kernels/device/ptx.cuh" not in files  # the emulator has its own
    assert "src/convt3d/cuda/plan/choose.py" not in files
    assert "geometry/axis.cuh" in tool.contents("phases/kernel.cu")


@pytest.mark.more
@pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
def test_what_tests_reach(tool: Any) -> None:
    with tool.Tree(ROOT) as tree:
        reached = tree.reach_of(["tests/test_emulator_rows.py", "tests/test_launch.py"])
    with tool.Tree(ROOT) as tree, pytest.raises(RuntimeError, match="nothing was recorded"):
        tree._call = lambda *_, **__: ""
        tree.reach_of([])
    found = [of for name, of in reached.items() if "test_emulator_rows" in name]
    assert any("rows/kernel.cu" in of["files"] for of in found)
    assert any("rows" in of["plans"] for of in found)
    launches = [of for name, of in reached.items() if "test_launch" in name]
    assert launches and not any(of["files"] for of in launches)


SUM = "def total(n: int) -> int:\n    return n + 1\n"
TESTS = """import time

from summed import total


def test_one():
    assert total(1) {} 2


def test_two():
    time.sleep({})
"""


@pytest.mark.more
def test_the_checkout_is_left_alone(tool: Any, tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    files = {"src/summed.py": SUM, "tests/test_sum.py": TESTS.format("==", 0)}
    files |= {"pyproject.toml": '[tool.pytest.ini_options]\npythonpath = ["src"]\n'}
    files |= {"tests/support/mutant_tests.py": (ROOT / "tests/support/mutant_tests.py").read_text()}
    for name, text in files.items():
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text(text)
    tests = ["tests/test_sum.py::test_two", "tests/test_sum.py::test_one"]
    plus = next(m for m in mutations.draw({"src/summed.py": SUM}, 0) if m.kind == "operator")
    with tool.Tree(checkout) as tree:
        tree.reach = {}
        assert tree.test(tests, 60, 60) == {"status": "survived", "by": "2 of 2 tests"}
        with tree.mutated("src/summed.py", plus.apply(SUM)):
            noticed = tree.test(tests, 60, 60)
            assert (noticed["status"], noticed["by"]) == ("noticed", tests[1])
            assert "assert 0 == 2" in noticed["message"]
        assert (tree.root / "src/summed.py").read_text() == SUM
        with tree.mutated("tests/test_sum.py", TESTS.format("==", 60)):
            assert tree.test(tests, 60, 1.5)["message"] == "it does not end"
        with tree.mutated("tests/test_sum.py", TESTS.format("==", 1)):
            assert tree.test(tests, 0.1, 60) == {"status": "survived", "by": "0 of 2 tests"}
    for name, text in files.items():
        assert (checkout / name).read_text() == text
    assert sorted(p.name for p in checkout.rglob("*") if p.is_file()) == sorted(
        Path(name).name for name in files
    )
    assert not tree.scratch.exists()


def test_a_report_goes_on(tool: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    entry = {"file": "a.cuh", "line": 1, "diff": "-a\n+b", "by": "1 of 1 tests", "seconds": 1}
    report = tool.Report(path, 1, "")
    report.add("one", entry | {"status": "survived"})
    report.add("two", entry | {"status": "noticed"})
    report = tool.Report(path, 1, "")
    assert not report.wants("one") and report.wants("one", "survived", "equivalent")
    assert not report.wants("two", "survived", "equivalent") and report.wants("three")
    report.print()
    assert "noticed of what is neither equivalent nor harmless: 50%" in capsys.readouterr().out
    report.judge("one", "nothing reads it")
    report.print()
    assert "noticed or settled of all: 100%" in capsys.readouterr().out
    report.keep(["two"])
    assert list(report.entries) == ["two"]
    assert json.loads(path.read_text())["mutations"]["one"]["why"] == "nothing reads it"
    with pytest.raises(SystemExit, match="is of"):
        tool.Report(path, 2, "")
