"""A pytest plugin for tools/mutants.py: which tests reach which kernels, and some tests in order.

``CONVT3D_REACH=FILE`` writes what every emulator test would launch, as JSON of its id: ``files`` of
``kernels/`` and ``plans`` (modules of ``cuda/plan``). Nothing runs then, so the outcomes mean
nothing. Tests that edit kernels themselves are left out; those of other files are listed with
neither, and do not run at all.

``CONVT3D_TESTS=FILE`` runs the tests whose ids the file lists, in its order, and appends a line to
``CONVT3D_PROGRESS`` as each begins, and one with the message of the first that fails.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

REACH = os.environ.get("CONVT3D_REACH")
TESTS = os.environ.get("CONVT3D_TESTS")
PROGRESS = os.environ.get("CONVT3D_PROGRESS")

_found: dict[str, dict[str, list[str]]] = {}
_edited: set[str] = set()
_current = ""


def pytest_configure(config: pytest.Config) -> None:
    if REACH:
        _record()


def _record() -> None:
    from cuda.bindings.driver import CUresult

    from convt3d.cuda.plan import PLANS
    from emulator import harness
    from emulator.gpu import EmulatedGpu

    def launch(gpu: EmulatedGpu, configuration: Any, launch: Any, *_: Any) -> Any:
        if gpu.edit is not None:
            _edited.add(_current)
        _note("files", launch.kernel.file)
        gpu.launches.append(launch.kernel)
        return (CUresult.CUDA_SUCCESS,)

    EmulatedGpu._launch = launch  # type: ignore[method-assign]
    harness.launch = lambda *_, **__: {}  # of tests of the emulator itself
    for plan in PLANS:
        plan.schedule = _noting(plan.schedule)  # type: ignore[method-assign]


def _noting(schedule: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(schedule)
    def noting(plan: Any, *arguments: Any) -> Any:
        for kind in type(plan).__mro__:
            if ".plan." in kind.__module__:
                _note("plans", kind.__module__.rpartition(".")[2])
        return schedule(plan, *arguments)

    return noting


def _note(what: str, name: str) -> None:
    names = _found.setdefault(_current, {"files": [], "plans": []})[what]
    if name not in names:
        names.append(name)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    global _current
    _current = item.nodeid
    _progress({"begins": item.nodeid})
    yield


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if REACH:
        for item in items:
            if not item.path.name.startswith("test_emulator_"):
                _found[item.nodeid] = {"files": [], "plans": []}
        items[:] = [item for item in items if item.nodeid not in _found]
    if TESTS:
        wanted = Path(TESTS).read_text().splitlines()
        by_id = {item.nodeid: item for item in items}
        items[:] = [by_id[name] for name in wanted if name in by_id]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        _progress({"failed": report.nodeid, "message": str(crash.message if crash else "")[:500]})


def _progress(line: dict[str, str]) -> None:
    if PROGRESS:
        with open(PROGRESS, "a") as file:
            file.write(json.dumps(line) + "\n")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if REACH:
        kept = {
            name: found
            for name, found in _found.items()
            if name not in _edited and (found["files"] or not found["plans"])
        }
        Path(REACH).write_text(json.dumps(kept))
