"""A copy of the tree for tools/mutants.py: files are mutated in it, and its tests run."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from support import mutations

PLANS = "src/convt3d/cuda/plan"
PLAN_TESTS = ("tests/test_plan.py", "tests/test_launch.py")
CACHE_BYTES = 2 << 30  # of compiled mutants that are kept
PYTEST = ("-m", "pytest", "-q", "-m", "", "-p", "support.mutant_tests", "-p", "no:cacheprovider")


@dataclass
class Tree:
    """A copy of what the tests need, which is mutated in place of the checkout."""

    original: pathlib.Path

    def __enter__(self) -> Tree:
        self._scratch = tempfile.TemporaryDirectory(prefix="convt3d-mutants-")
        self.scratch = pathlib.Path(self._scratch.name)
        self.root = self.scratch / "tree"
        ignored = shutil.ignore_patterns("__pycache__")
        for name in ("src", "tests"):
            shutil.copytree(self.original / name, self.root / name, ignore=ignored)
        shutil.copy(self.original / "pyproject.toml", self.root)
        (self.scratch / "objects").mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        self._scratch.cleanup()

    @contextlib.contextmanager
    def mutated(self, file: str, text: str) -> Iterator[None]:
        """Another text of a file, for a while."""
        path = self.root / file
        before = path.read_text()
        self._prepare(file.endswith(".py"))
        path.write_text(text)
        try:
            yield
        finally:
            path.write_text(before)
            prune(self.scratch / "objects", CACHE_BYTES)

    def _prepare(self, planner: bool) -> None:
        """What is made of the tree as it is, where it is needed for the first time."""
        self.reach  # noqa: B018
        if planner and not self._frozen.exists():
            self._call("-m", "support.mutant_plans", "freeze", str(self._frozen))

    @property
    def _frozen(self) -> pathlib.Path:
        return self.scratch / "plans.pickle"

    @functools.cached_property
    def reach(self) -> dict[str, dict[str, list[str]]]:
        """Of every test, the kernel files and the planners that it reaches.

        Kept among the temporary files, by the texts that it depends on.
        """
        digest = hashlib.sha256()
        for path in sorted([*self.root.glob("tests/**/*.py"), *self.root.glob("src/**/*.py")]):
            digest.update(path.read_bytes())
        name = f"convt3d-reach-{os.getuid()}-{digest.hexdigest()[:16]}.json"
        path = pathlib.Path(tempfile.gettempdir()) / name
        if not path.exists():
            print("seeing which test reaches which kernel (a few minutes)", flush=True)
            emulated = sorted(self.root.glob("tests/test_emulator_*.py"))
            names = [str(test.relative_to(self.root)) for test in emulated]
            path.write_text(json.dumps(self.reach_of([*names, *PLAN_TESTS])))
        return dict(json.loads(path.read_text()))

    def reach_of(self, files: Sequence[str]) -> dict[str, dict[str, list[str]]]:
        """Of every test of some files, the kernel files and the planners that it reaches."""
        made = self.scratch / "reach.json"
        self._call(*PYTEST, "--tb=no", *files, check=False, CONVT3D_REACH=made)
        if not made.exists():
            raise RuntimeError("nothing was recorded: pytest fails with support.mutant_tests")
        return dict(json.loads(made.read_text()))

    def changed_plans(self) -> str:
        """What became of the frozen plans: same, choice, or changed."""
        return self._call("-m", "support.mutant_plans", "compare", str(self._frozen)) or "changed"

    def tests_of_kernels(self, entries: Sequence[str], seed: int) -> list[str]:
        """The tests that launch one of the kernel files: files, then test functions, in turns."""
        return in_turns(
            {name: reached["files"] for name, reached in self.reach.items()}, entries, seed
        )

    def tests_of_plan(self, module: str, seed: int) -> list[str]:
        """Those of all planners, and in turns with them those whose plans have to do with one."""
        always = [name for name, reached in self.reach.items() if not reached["files"]]
        plans = {name: reached["plans"] for name, reached in self.reach.items()}
        users = [module, *self._users(module)]
        return mutations.evenly([always, in_turns(plans, users, seed)])

    def _users(self, module: str) -> list[str]:
        """Planners that import a planner; a folder of modules is one."""
        folder = self.original / PLANS
        pattern = rf"^from convt3d\.cuda\.plan(?:\.{module} import| import [^()\n]*\b{module}\b)"
        paths = [p for p in folder.rglob("*.py") if re.search(pattern, p.read_text(), re.MULTILINE)]
        return sorted({p.relative_to(folder).with_suffix("").parts[0] for p in paths})

    def test(self, names: Sequence[str], limit: float, hang: float) -> dict[str, str]:
        """Runs tests until one fails or hangs, or none begins any more after the limit."""
        listed, progress = self.scratch / "tests", self.scratch / "progress"
        listed.write_text("\n".join(names))
        progress.write_text("")
        paths = sorted({name.partition("::")[0] for name in names})
        environment = self._environment(CONVT3D_TESTS=listed, CONVT3D_PROGRESS=progress)
        process = subprocess.Popen(
            [sys.executable, *PYTEST, "-x", "--tb=short", *paths], cwd=self.root, env=environment,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        begin = since = time.monotonic()
        test, late = "", False
        while process.poll() is None:
            time.sleep(0.2)
            lines = [json.loads(line) for line in progress.read_text().splitlines(keepends=True)
                     if line.endswith("\n")]  # fmt: skip
            begun = [line["begins"] for line in lines if "begins" in line]
            if begun and begun[-1] != test:
                test, since = begun[-1], time.monotonic()
                late = since > begin + limit
            hangs = time.monotonic() > since + hang
            if late or hangs:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                if hangs:
                    return {"status": "noticed", "by": test, "message": "it does not end"}
        lines = [json.loads(line) for line in progress.read_text().splitlines()]
        for line in lines:
            if "failed" in line:
                return {"status": "noticed", "by": line["failed"], "message": line["message"]}
        ran = sum("begins" in line for line in lines) - late
        if not late and process.returncode != 0:  # it does not even import, or a kernel ended it
            return {"status": "noticed", "by": test, "message": f"ends with {process.returncode}"}
        return {"status": "survived", "by": f"{ran} of {len(names)} tests"}

    def _environment(self, **more: object) -> dict[str, str]:
        paths = os.pathsep.join(str(self.root / name) for name in ("src", "tests"))
        values = {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        values["CONVT3D_EMULATOR_CACHE"] = str(self.scratch / "objects")
        return {**os.environ, **values, **{name: str(value) for name, value in more.items()}}

    def _call(self, *command: str, check: bool = True, **more: object) -> str:
        """What Python writes; an empty text where it fails and needs not succeed."""
        done = subprocess.run(
            [sys.executable, *command], cwd=self.root, env=self._environment(**more),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE if check else subprocess.DEVNULL,
            text=True,
        )  # fmt: skip
        return done.stdout.strip() if done.returncode == 0 else ""


def in_turns(reached: Mapping[str, Sequence[str]], wanted: Sequence[str], seed: int) -> list[str]:
    """The tests that reach one of the wanted names; each name's test functions take turns."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, found in reached.items():
        for one in found:
            if one in wanted:
                groups[one, name.partition("[")[0]].append(name)
                break
    generator = random.Random(seed)
    shuffled = [generator.sample(group, len(group)) for _, group in sorted(groups.items())]
    return mutations.evenly(generator.sample(shuffled, len(shuffled)))


def prune(directory: pathlib.Path, most: int) -> None:
    """Deletes the oldest files of a directory, until the others have no more than so many bytes."""
    found = sorted(
        (path for path in directory.iterdir() if path.is_file()), key=lambda p: -p.stat().st_mtime
    )
    total = 0
    for path in found:
        total += path.stat().st_size
        if total > most:
            path.unlink()
