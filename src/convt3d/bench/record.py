"""Rows of a benchmark with the environment they were measured in; kept on disk as they come."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from convt3d.environment import environment

_Record = TypeVar("_Record", bound="Record")


def digits(value: float) -> float:
    """Five significant digits: more would be noise."""
    return float(f"{value:.5g}")


def record_text(values: Mapping[str, Any]) -> str:
    """A record as JSON: each value in a line, of ``rows`` and ``files`` each entry."""
    members = [
        f" {json.dumps(name)}: "
        + (_in_lines(value) if name in ("rows", "files") else json.dumps(value))
        for name, value in values.items()
    ]
    return "{\n" + ",\n".join(members) + "\n}\n"


def _in_lines(entries: Sequence[Any] | Mapping[str, Any]) -> str:
    if isinstance(entries, Mapping):
        lines = [f"  {json.dumps(name)}: {_compact(entry)}" for name, entry in entries.items()]
        return "{\n" + ",\n".join(lines) + "\n }"
    return "[\n" + ",\n".join(f"  {_compact(entry)}" for entry in entries) + "\n ]"


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


@dataclass
class Record:
    """Rows by what makes them, with their environment.

    Args:
        path: the file that holds it; None keeps it in memory.
        environment: see ``environment.environment``.
        command: arguments of the command line that measured it.
        started: when, in ISO 8601.
        rows: by :meth:`key`. One that names a commit was measured at that, not the environment's.
        runs: earlier runs that measured rows at other commits; each its commit, start and command.
    """

    NAME: ClassVar[str] = "a benchmark record"
    KEY: ClassVar[tuple[str, ...]] = ("shape", "mode", "layout", "pass", "contender")
    FACTS: ClassVar[tuple[str, ...]] = ("commit", "cpu", "cpu_threads", "cudnn", "gpu", "torch")
    """What headlines quote of the environment."""

    path: Path | None = None
    environment: dict[str, Any] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)
    started: str = ""
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    runs: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def key(cls, row: Mapping[str, Any]) -> str:
        """What makes a row: a second measurement of the same replaces the first."""
        return "|".join(str(row[name]) for name in cls.KEY)

    @classmethod
    def create(
        cls: type[_Record], path: Path | None, command: Sequence[str], commit: str | None
    ) -> _Record:
        """An empty record of this machine, now; ``commit`` is the source's where git has none."""
        facts = environment(commit)
        started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        return cls(path, facts, list(command), started)

    @classmethod
    def load(cls: type[_Record], path: Path) -> _Record:
        """Read a record; raises ValueError if the file is none."""
        try:
            values = json.loads(path.read_text())
            rows = {cls.key(row): row for row in values["rows"]}
            for fact in cls.FACTS:
                values["environment"][fact]
            command, started = values["command"], values["started"]
            return cls(path, values["environment"], command, started, rows, values.get("runs", []))
        except KeyError as error:
            raise ValueError(f"{path} is not {cls.NAME}: it has no {error}") from None
        except (TypeError, ValueError):  # of another shape, no JSON, or no text
            raise ValueError(f"{path} is not {cls.NAME}") from None

    def resume(self, path: Path) -> None:
        """Take the rows of an earlier record in; they keep the commit that they were measured at.

        Raises:
            ValueError: the file is none.
        """
        earlier = self.load(path)
        self.rows, self.runs = earlier.rows, earlier.runs
        commit = earlier.environment.get("commit")
        if commit and commit != self.environment.get("commit"):
            self.rows = {
                key: {**row, "commit": row.get("commit", commit)} for key, row in self.rows.items()
            }
            run = {"commit": commit, "started": earlier.started, "command": earlier.command}
            self.runs = [*self.runs, run]

    def add(self, row: dict[str, Any]) -> None:
        """Take a row in, in place of an earlier one of the same key, and save."""
        self.rows[self.key(row)] = row
        self.save()

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON has it."""
        return {
            "environment": self.environment,
            "command": self.command,
            "started": self.started,
            **({"runs": self.runs} if self.runs else {}),
            "rows": list(self.rows.values()),
        }

    def save(self) -> None:
        """Write the whole record; a reader never sees half of one."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(record_text(self.to_dict()))
        os.replace(temporary, self.path)


class NetworkRecord(Record):
    """Rows of whole networks."""

    NAME = "a record of networks"
    KEY = (
        *("network", "mode", "layout", "compiled", "graphs", "cudnn_benchmark", "tuned", "kind"),
        *("optimiser", "small", "side", "part"),
    )
    FACTS = ()

    @classmethod
    def key(cls, row: Mapping[str, Any]) -> str:
        return super().key(cls.completed(row))

    @staticmethod
    def completed(row: Mapping[str, Any]) -> dict[str, Any]:
        """A row that names ``graphs``, which those of earlier versions do not."""
        return {"graphs": False, **row}
