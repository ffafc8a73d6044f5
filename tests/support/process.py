"""Python code in a process of its own, for what a test must not do to its neighbours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import convt3d

_SOURCES = str(Path(convt3d.__file__).parents[1])
_TESTS = str(Path(__file__).parents[1])


def environment(**changes: str) -> dict[str, str]:
    """The environment of a process that is to find the package and the tests."""
    path = os.pathsep.join(filter(None, (_SOURCES, _TESTS, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, **changes}


def run_python(code: str, timeout: float = 120, **changes: str) -> str:
    """What ``code`` prints; an error with its exit code and all that it printed if it fails."""
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", code],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment(**changes),
    )
    if done.returncode:
        raise AssertionError(f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout
