"""Runs a whole benchmark: which processes measure what, and how their rows come here."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from convt3d.bench import contenders as known
from convt3d.bench import worker
from convt3d.bench.record import Record
from convt3d.bench.shapes import Shape
from convt3d.bench.worker import Job

Progress = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Request:
    """What to measure, as the command line puts it.

    ``tuned``: torch.backends.cudnn.benchmark is True for our layers, which time candidates then.
    """

    shapes: Sequence[Shape]
    modes: Sequence[str]
    layouts: Sequence[str] = ("ncdhw",)
    passes: Sequence[str] = ("forward", "grad_input", "grad_weight")
    contenders: Sequence[str] = (known.OURS, known.DEFAULT)
    device: str = "cpu"
    budget_s: float = 0.2
    check: bool = True
    tuned: bool = False

    def jobs(self) -> list[Job]:
        """One job per process. On CUDA each contender has its own: see ``contenders.py``."""
        job = Job(
            contenders=tuple(self.contenders),
            shapes=tuple(self.shapes),
            modes=tuple(self.modes),
            layouts=tuple(self.layouts),
            passes=tuple(self.passes),
            device=self.device,
            budget_s=self.budget_s,
            check=self.check,
            tuned=self.tuned,
        )
        if not self.device.startswith("cuda"):
            return [job]
        jobs = []
        for name in self.contenders:
            fixed = known.CONTENDERS[name].layout
            layouts = (fixed,) if fixed else job.layouts
            jobs.append(replace(job, contenders=(name,), layouts=layouts))
        return jobs

    def rows(self) -> int:
        """Number of rows that the request gives."""
        return sum(
            known.CONTENDERS[name].runs(shape, layout, operation)
            for job in self.jobs()
            for name in job.contenders
            for _ in job.modes
            for shape in job.shapes
            for layout in job.layouts
            for operation in job.passes
        )


def run(request: Request, record: Record, progress: Progress = lambda row: None) -> None:
    """Measure a request into a record, skipping the rows that it has (failed ones are retried).

    Raises:
        RuntimeError: measuring processes died; their rows until then, and those of all others, are
            in the record.
    """
    done = tuple(k for k, row in record.rows.items() if "failed" not in row)
    jobs = [replace(job, skip=done) for job in request.jobs()]
    if request.device.startswith("cuda"):
        run_isolated(jobs, record, progress)
        return
    for job in jobs:
        for row in worker.rows(job):
            record.add(row)
            progress(row)


class Measured(Protocol):
    """A job for a process."""

    @property
    def title(self) -> str:
        """What it measures, in a few words."""
        ...

    def to_json(self) -> str:
        """The line that its process reads."""
        ...


class Rows(Protocol):
    """What keeps the rows."""

    def add(self, row: dict[str, Any]) -> None: ...


READY = "ready"
"""The line by which a process says that it is to measure when its input ends."""


def run_isolated(
    jobs: Sequence[Measured],
    record: Rows,
    progress: Progress,
    module: str = "convt3d.bench.worker",
    variables: Mapping[str, str] | None = None,
    together: int = 1,
) -> None:
    """Measure each job in a process of its own, one after the other; raises as :func:`run`.

    Args:
        module: what a process runs: it reads a job as a line of JSON and writes rows as lines.
        variables: of the environment of the processes, beside those of this one.
        together: processes that compile at once, where the module says :data:`READY`. None
            measures before all of them are ready, and each measures alone.
    """
    batches = [jobs[i : i + together] for i in range(0, len(jobs), together)]
    deaths: list[str] = []
    ahead: list[_Process] = []
    running: list[_Process] = []
    try:
        for index, batch in enumerate(batches):
            running = ahead or [_Process(module, variables or {}) for _ in batch]
            # The next process imports torch while this one measures; it touches the GPU on its
            # job only.
            more = together == 1 and index + 1 < len(batches)
            ahead = [_Process(module, variables or {})] if more else []
            for process, job in zip(running, batch, strict=True):
                process.give(job)
            if together > 1:
                for process in running:
                    process.wait_until_ready()
            for process in running:
                try:
                    for row in process.rows():
                        record.add(row)
                        progress(row)
                except RuntimeError as error:
                    deaths.append(str(error))
    finally:
        for process in (*running, *ahead):
            process.end()
    if deaths:
        raise RuntimeError("\n".join(deaths))


class _Process:
    """A process that measures one job."""

    def __init__(self, module: str, variables: Mapping[str, str]) -> None:
        source = str(Path(__file__).resolve().parents[2])
        given = {**os.environ, **variables}
        path = os.pathsep.join(filter(None, (source, given.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**given, "PYTHONPATH": path},
        )
        self._title = ""
        self._early: list[str] = []
        self._errors: list[str] = []
        self._reader = threading.Thread(target=self._read_errors, daemon=True)
        self._reader.start()

    def _read_errors(self) -> None:
        self._errors.extend(self._process.stderr or ())

    def give(self, job: Measured) -> None:
        """Send the job; a process that has died says so when its rows are read."""
        assert self._process.stdin
        self._title = job.title
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(job.to_json() + "\n")
            self._process.stdin.flush()

    def wait_until_ready(self) -> None:
        """Return when the process is ready to measure, or has ended."""
        assert self._process.stdout
        for line in self._process.stdout:
            if line.strip() == READY:
                return
            self._early.append(line)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Let it measure; raises RuntimeError with its last messages if it fails."""
        assert self._process.stdin and self._process.stdout
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        for line in itertools.chain(self._early, self._process.stdout):
            if line.startswith("{"):
                yield json.loads(line)
        status = self._process.wait()
        self._reader.join(timeout=10)
        if status != 0:
            tail = "".join(self._errors[-15:])
            raise RuntimeError(
                f"the process that measures {self._title} ended with {status}:\n{tail}"
            )

    def end(self) -> None:
        """Stop it, if it runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
