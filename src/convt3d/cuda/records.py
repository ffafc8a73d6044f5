"""What is remembered of plans: small files of JSON below the cache folder, one a key.

A file serves one problem, its extents, one GPU and version of the package and its kernels. It is
written whole or not at all; what cannot be read is as if it were not there.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any, TypeVar

from convt3d._version import __version__
from convt3d.cuda import compiler
from convt3d.cuda.schedule import Gpu, Problem
from convt3d.log import log_once

Extents = tuple[int, ...]
Found = TypeVar("Found")


def digest(text: str) -> str:
    """SHA-256 of a text, in hexadecimal digits."""
    return hashlib.sha256(text.encode(), usedforsecurity=False).hexdigest()


def digest_of_files(folder: pathlib.Path, pattern: str) -> str:
    """A short digest of the texts of files."""
    return digest("".join(path.read_text() for path in sorted(folder.rglob(pattern))))[:20]


@functools.cache
def _version() -> str:
    return f"{__version__} {digest_of_files(compiler.KERNEL_DIRECTORY, '*.cu*')}"


def key_of(problem: Problem, batch: int, extents: Extents, gpu: Gpu) -> str:
    """What a record is about; ``batch`` and ``extents`` are classes."""
    return f"{gpu!r}; {_version()}; {problem!r}; batch {batch}; extents {extents}"


def path_of(folder: str, key: str) -> pathlib.Path:
    """The file of a key in one of the folders."""
    return compiler.cache_directory() / folder / f"{digest(key)[:40]}.json"


def read(folder: str, key: str, decode: Callable[[dict[str, Any]], Found]) -> Found | None:
    """What ``decode`` makes of the record of a key; None where there is none.

    ``decode`` raises ValueError, KeyError or TypeError for what it does not understand.
    """
    path = path_of(folder, key)
    try:
        record = json.loads(path.read_text())
        if record["key"] == key:
            return decode(record)
        log_once(f"{path} is of something else, and is ignored")
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        log_once(f"{path} cannot be read, and is ignored: {error}")
    return None


def write(folder: str, key: str, record: dict[str, Any]) -> bool:
    """Put the record of a key on disk, in place of what was there; whether that worked."""
    path = path_of(folder, key)
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
        with os.fdopen(handle, "w") as file:
            json.dump({"key": key, **record}, file, indent=1)
        os.replace(temporary, path)
    except OSError as error:
        log_once(f"plans are not remembered: {path.parent} is unusable ({error})")
        if temporary is not None:
            pathlib.Path(temporary).unlink(missing_ok=True)
        return False
    return True
