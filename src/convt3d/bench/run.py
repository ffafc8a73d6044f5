"""Runs a whole benchmark: which processes measure what, and how their rows come here."""

from __future__ import annotations

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


def run_isolated(
    jobs: Sequence[Measured],
    record: Rows,
    progress: Progress,
    module: str = "convt3d.bench.worker",
    variables: Mapping[str, str] | None = None,
) -> None:
    """Measure each job in a process of its own, one after the other; raises as :func:`run`.

    Args:
        module: what a process runs: it reads a job as a line of JSON and writes rows as lines.
        variables: of the environment of the processes, beside those of this one.
    """
    # The next process imports torch while this one measures; it touches the GPU on its job only.
    following = _start(module, variables or {}) if jobs else None
    deaths = []
    try:
        for index, job in enumerate(jobs):
            current, more = following, index + 1 < len(jobs)
            following = _start(module, variables or {}) if more else None
            assert current is not None
            try:
                for row in _rows(current, job):
                    record.add(row)
                    progress(row)
            except RuntimeError as error:
                deaths.append(str(error))
    finally:
        if following is not None:
            following.kill()
            following.wait()
    if deaths:
        raise RuntimeError("\n".join(deaths))


def _start(module: str, variables: Mapping[str, str]) -> subprocess.Popen[str]:
    source = str(Path(__file__).resolve().parents[2])
    given = {**os.environ, **variables}
    path = os.pathsep.join(filter(None, (source, given.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**given, "PYTHONPATH": path},
    )


def _rows(process: subprocess.Popen[str], job: Measured) -> Iterator[dict[str, Any]]:
    assert process.stdin and process.stdout and process.stderr
    errors: list[str] = []
    reader = threading.Thread(target=lambda: errors.extend(process.stderr or ()), daemon=True)
    reader.start()
    try:
        process.stdin.write(job.to_json() + "\n")
        process.stdin.close()
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
        status = process.wait()
        reader.join(timeout=10)
        if status != 0:
            name, tail = job.title, "".join(errors[-15:])
            raise RuntimeError(f"the process that measures {name} ended with {status}:\n{tail}")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
