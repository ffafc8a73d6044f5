"""Which plan won when candidates were timed, remembered on disk.

One small file a problem, class of extents, GPU and version of the package and its kernels, written
whole or not at all. A file names a plan among those that the cost models offer and holds no more:
whatever is in it, only a plan of ours can run. What cannot be read is as if it were not there.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import pathlib
import tempfile
from typing import Any

from convt3d.cuda import compiler
from convt3d.cuda.schedule import Gpu, Plan, Problem
from convt3d.log import log_once

Extents = tuple[int, ...]

_found: dict[str, str | None] = {}  # what the files say, by their name


def fingerprint(plan: Plan) -> str:
    """A name of a plan that holds as long as its family describes it in the same way."""
    digest = hashlib.sha256(repr(plan).encode(), usedforsecurity=False).hexdigest()
    return f"{type(plan).__name__} {digest[:20]}"


def directory() -> pathlib.Path:
    """Where the files are."""
    return compiler.cache_directory() / "tuned"


@functools.cache
def _version() -> str:
    from convt3d import __version__

    text = "".join(compiler.flatten(p.name) for p in sorted(compiler.KERNEL_DIRECTORY.glob("*.cu")))
    return f"{__version__} {hashlib.sha256(text.encode(), usedforsecurity=False).hexdigest()[:20]}"


def _key(problem: Problem, batch: int, extents: Extents, gpu: Gpu) -> str:
    return f"{gpu.name}; {_version()}; {problem!r}; batch {batch}; extents {extents}"


def _path(key: str) -> pathlib.Path:
    name = hashlib.sha256(key.encode(), usedforsecurity=False).hexdigest()
    return directory() / f"{name[:40]}.json"


def recall(problem: Problem, batch: int, extents: Extents, gpu: Gpu) -> str | None:
    """Fingerprint of the plan that won, or None; ``batch`` and ``extents`` are classes."""
    if not gpu.name:  # no GPU at hand: what was timed elsewhere says nothing
        return None
    key = _key(problem, batch, extents, gpu)
    path = _path(key)
    if str(path) not in _found:
        _found[str(path)] = _read(path, key)
    return _found[str(path)]


def _read(path: pathlib.Path, key: str) -> str | None:
    try:
        record = json.loads(path.read_text())
        if record["key"] == key and isinstance(record["plan"], str):
            return record["plan"]
        log_once(f"{path} is of something else, and is ignored")
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError) as error:
        log_once(f"{path} cannot be read, and is ignored: {error}")
    return None


def remember(
    problem: Problem, batch: int, extents: Extents, gpu: Gpu, plan: Plan, facts: dict[str, Any]
) -> bool:
    """Keep the winner, for this process and on disk; whether it could be written.

    ``facts`` (times) are for people who read the file.
    """
    key = _key(problem, batch, extents, gpu)
    path, name = _path(key), fingerprint(plan)
    _found[str(path)] = name
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
        with os.fdopen(handle, "w") as file:
            json.dump({"key": key, "plan": name, **facts}, file, indent=1)
        os.replace(temporary, path)
    except OSError as error:
        log_once(f"what was tuned is not remembered: {path.parent} is unusable ({error})")
        if temporary is not None:
            pathlib.Path(temporary).unlink(missing_ok=True)
        return False
    return True


def forget() -> None:
    """Drop what this process has read."""
    _found.clear()
