"""Mutates kernels and planners by machine and tells which mutations the tests notice. No GPU.

    python tools/mutants.py --count 100 --seed 1 --minutes 60 --out report.json
    python tools/mutants.py --count 100 --seed 1 --out report.json --again   # survivors
    python tools/mutants.py --out report.json --harmless KEY "why nothing depends on it"

Draws mutations evenly over the files of ``cuda/kernels`` and the planners' layout
(``tests/support/mutations.py``) and tries them one by one, on a copy of the tree:

1. Does it change anything? Programs of the ledger whose kernels have the file are compiled; a
   mutation that leaves their machine code as it is counts as equivalent (or unreached). Where a
   header has very many, the rest of them are compiled after tests that notice nothing. Of a
   planner, the schedules of frozen plans are compared (``tests/support/mutant_plans.py``).
2. Which test fails? The emulator tests that launch such kernels, or such plans, run in turns of
   test functions until one fails; for planners those of ``test_plan.py`` and ``test_launch.py``,
   too. A test that takes longer than ``--hang`` seconds hangs, which counts as noticed.

A branch that no program of the ledger has looks equivalent, too: ``--unreached`` runs the tests of
such mutations as well, and those of the report again.

The report lists noticed, equivalent, harmless (shown to be by hand) and survived mutations with
their lines. A run that finds it goes on where it ended, and tries again what a changed file had.
The wrappers of inline assembly are left out: the emulator has its own.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import multiprocessing
import pathlib
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "src"))
sys.path.insert(1, str(pathlib.Path(__file__).resolve().parent.parent / "tests"))
from convt3d.cuda import compiler
from emulator import build
from support import ledger, mutations
from support.mutant_tree import PLANS, Tree
from support.mutations import Mutation

ROOT = pathlib.Path(__file__).resolve().parent.parent
CUDA = pathlib.PurePosixPath("src/convt3d/cuda")
#: Planners that lay nothing out: they choose, list, search, describe, or read a table.
NO_MIRRORS = {"__init__.py", "choose.py", "families.py", "search.py", "sketch.py", "table.py"}
COMPILE_SECONDS = 180


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100, help="mutations to draw")
    parser.add_argument("--seed", type=int, default=1, help="of the drawing")
    parser.add_argument("--minutes", type=float, default=60, help="no mutation begins after them")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the report, as JSON")
    parser.add_argument("--only", default="", help="regular expression of the files to mutate")
    parser.add_argument("--limit", type=float, default=180, help="seconds for a mutation's tests")
    parser.add_argument("--hang", type=float, default=120, help="seconds of a test that hangs")
    parser.add_argument(
        "--programs", type=int, default=24, help="of the ledger, compiled before tests"
    )
    parser.add_argument("--again", action="store_true", help="try survivors of the report again")
    parser.add_argument(
        "--unreached", action="store_true", help="run tests where the ledger's code stays, too"
    )
    parser.add_argument("--harmless", nargs=2, metavar=("KEY", "WHY"), help="judge a survivor")
    arguments = parser.parse_args()
    report = Report(arguments.out, arguments.seed, arguments.only)
    if arguments.harmless:
        report.judge(*arguments.harmless)
    else:
        run(arguments, report)
    report.print()
    return 0


def run(arguments: argparse.Namespace, report: Report) -> None:
    """Tries the drawn mutations that the report does not have."""
    end = time.monotonic() + 60 * arguments.minutes
    texts = {file: (ROOT / file).read_text() for file in files() if re.search(arguments.only, file)}
    drawn = list(itertools.islice(mutations.draw(texts, arguments.seed), arguments.count))
    report.keep([mutation.key(texts[mutation.file]) for mutation in drawn])
    retried = ["survived"] * arguments.again + ["equivalent"] * arguments.unreached
    left = [m for m in drawn if report.wants(m.key(texts[m.file]), *retried)]
    if not left:
        return
    with Tree(ROOT) as tree, Compiler() as nvrtc:
        for mutation in left:
            if time.monotonic() > end:
                print(f"{arguments.minutes:g} minutes are over")
                break
            begin, text = time.monotonic(), texts[mutation.file]
            verdict = attempt(mutation, text, tree, nvrtc, arguments)
            entry = {"file": mutation.file, "line": mutation.line(text), "kind": mutation.kind}
            entry |= {"diff": mutation.diff(text), **verdict}
            entry["seconds"] = round(time.monotonic() - begin, 1)
            report.add(mutation.key(text), entry)


def files() -> list[str]:
    """The files to mutate, as paths in the tree."""
    kernels = [*compiler.kernel_files(), *compiler.headers()]
    found = [str(CUDA / "kernels" / file) for file in kernels if file not in build.REPLACED]
    plans = [path for path in (ROOT / PLANS).rglob("*.py") if path.name not in NO_MIRRORS]
    return sorted(found + [path.relative_to(ROOT).as_posix() for path in plans])


def attempt(
    mutation: Mutation, text: str, tree: Tree, nvrtc: Compiler, arguments: argparse.Namespace
) -> dict[str, str]:
    """The verdict on a mutation: its status, and what tells so."""
    mutated = mutation.apply(text)
    with tree.mutated(mutation.file, mutated):
        if mutation.file.endswith(".py"):
            effect = tree.changed_plans()
            if effect in ("same", "choice"):
                what = "no frozen plan changes" if effect == "same" else "only the choice changes"
                return {"status": "equivalent", "by": what}
            family = pathlib.PurePath(mutation.file).relative_to(PLANS).with_suffix("").parts[0]
            names = tree.tests_of_plan(family, arguments.seed)
            return tree.test(names, arguments.limit, arguments.hang)
        header = mutation.file.removeprefix(f"{CUDA}/kernels/")
        entries = [file for file in compiler.kernel_files() if header in contents(file)]
        verdict = nvrtc.verdict(header, mutated, entries, arguments.programs)
        if verdict is None or (arguments.unreached and verdict["status"] == "equivalent"):
            names = tree.tests_of_kernels(entries, arguments.seed)
            verdict = tree.test(names, arguments.limit, arguments.hang)
        if verdict["status"] == "survived":
            verdict = nvrtc.verdict(header, mutated, entries) or verdict
        return verdict


@functools.cache
def contents(file: str) -> frozenset[str]:
    """A kernel file with every header that it includes, also through others."""
    text = (compiler.KERNEL_DIRECTORY / file).read_text()
    included = re.findall(r'^#include "([^"]+)"', text, re.MULTILINE)
    return frozenset({file}).union(*map(contents, included))


# --- The ledger's programs -----------------------------------------------------------------------


class Compiler:
    """Compiles programs of the ledger in a process of its own, which a mutation may hang."""

    def __enter__(self) -> Compiler:
        self.known = ledger.read()
        self._original: dict[ledger.Program, dict[str, str]] = {}
        if self.known.nvrtc == ledger.nvrtc_version():
            for program, facts in self.known.lines:
                self._original[program] = {n: e["code"] for n, e in facts.entries.items()}
        self._pool: Any = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.terminate()

    def verdict(
        self, header: str, text: str, entries: Sequence[str], most: int | None = None
    ) -> dict[str, str] | None:
        """A verdict that the compiler can give, or None where it makes other code of the text.

        None, too, where more programs than ``most`` have the header, and the first ones leave open
        whether any changes.
        """
        lines = [line for line in self.known.lines if line[0].today.file in entries]
        programs = [program for program, _ in ledger.sample(lines, most or len(lines))]
        for program in programs:
            flattened = compiler.flatten(program.today.file, {header: text})
            try:
                code = self._codes(program, flattened)
            except multiprocessing.TimeoutError:
                return None
            except Exception as error:
                message = next((m for m in str(error).splitlines() if "error" in m), str(error))
                return {"status": "noticed", "by": "NVRTC", "message": message[:500]}
            if program not in self._original:
                original = compiler.flatten(program.today.file)
                self._original[program] = self._codes(program, original)
            if code != self._original[program]:
                return None
        if len(programs) < len(lines):
            return None
        return {"status": "equivalent", "by": f"the code of all {len(lines)} programs"}

    def _codes(self, program: ledger.Program, text: str) -> dict[str, str]:
        if self._pool is None:
            self._pool = multiprocessing.get_context("spawn").Pool(1)
        try:
            found = self._pool.apply_async(codes, (program, text)).get(COMPILE_SECONDS)
        except multiprocessing.TimeoutError:
            self._pool.terminate()
            self._pool = None
            raise
        return dict(found)


def codes(program: ledger.Program, text: str) -> dict[str, str]:
    """The hash of the machine code of each entry."""
    try:
        code, log = ledger.compiled(text, program.today, program.target)
    except Exception as error:  # another process cannot make the exceptions of cuda.core
        raise RuntimeError(str(error)) from None
    return {name: entry["code"] for name, entry in ledger.facts_of(code, log).entries.items()}


# --- The report ----------------------------------------------------------------------------------


class Report:
    """The verdicts, by the keys of their mutations, in a file that is written after each."""

    def __init__(self, path: pathlib.Path, seed: int, only: str) -> None:
        self.path = path
        self.head: dict[str, Any] = {"seed": seed, "only": only}
        self.entries: dict[str, dict[str, Any]] = {}
        if path.exists():
            found = json.loads(path.read_text())
            self.entries = found.pop("mutations")
            if "--harmless" not in sys.argv and found != self.head:
                raise SystemExit(f"{path} is of {found}, not of {self.head}")
            self.head = found

    def keep(self, keys: Sequence[str]) -> None:
        """Forgets verdicts on mutations that are not drawn, such as those of changed files."""
        wanted = set(keys)
        self.entries = {key: entry for key, entry in self.entries.items() if key in wanted}

    def wants(self, key: str, *retried: str) -> bool:
        """Whether a mutation is to be tried: it is new, or has one of these statuses."""
        entry = self.entries.get(key)
        return entry is None or entry["status"] in retried

    def add(self, key: str, entry: dict[str, Any]) -> None:
        """Adds a verdict, and prints it."""
        self.entries[key] = entry
        self.write()
        at = f"{entry['file'].removeprefix(f'{CUDA}/')}:{entry['line']}"
        print(f"{entry['status']:>10}  {entry['seconds']:5.0f} s  {at}  {entry['by']}", flush=True)

    def judge(self, key: str, why: str) -> None:
        """Records that nothing can depend on a survivor, and why."""
        entry = self.entries[key]
        entry |= {"status": "harmless", "why": why}
        self.write()

    def write(self) -> None:
        """Writes the file."""
        made = self.path.with_suffix(".new")
        made.write_text(json.dumps(self.head | {"mutations": self.entries}, indent=1) + "\n")
        made.replace(self.path)

    def print(self) -> None:
        """Prints the survivors, the numbers and the share noticed."""
        for key, entry in self.entries.items():
            if entry["status"] == "survived":
                print(f"\n{key}  {entry['file']}, survived {entry['by']}\n{entry['diff']}")
        count = Counter(entry["status"] for entry in self.entries.values())
        refused = sum(entry["by"] == "NVRTC" for entry in self.entries.values())
        noticed, settled = count["noticed"], count["equivalent"] + count["harmless"]
        print(
            f"\n{len(self.entries)} mutations: {noticed} noticed ({refused} of them by NVRTC), "
            f"{count['equivalent']} equivalent or unreached, {count['harmless']} harmless, "
            f"{count['survived']} survived"
        )
        if noticed + count["survived"]:
            share = noticed / (noticed + count["survived"])
            print(f"noticed of what is neither equivalent nor harmless: {share:.0%}")
            print(f"noticed or settled of all: {(noticed + settled) / len(self.entries):.0%}")


if __name__ == "__main__":
    sys.exit(main())
