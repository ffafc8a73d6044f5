"""Python code in a process of its own, for what a test must not do to its neighbours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import convt3d

_SOURCES = str(Path(convt3d.__file__).parents[1])
_TESTS = str(Path(__file__).parents[1])


def run_python(code: str, timeout: float = 120, **environment: str) -> str:
    """What ``code`` prints; CalledProcessError with its stderr in the notes if it fails."""
    path = os.pathsep.join(filter(None, (_SOURCES, _TESTS, os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
