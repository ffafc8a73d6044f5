"""What ``convt3d tune`` goes through, and its table."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from convt3d.bench.cases import MODES
from convt3d.bench.report import geometric_mean
from convt3d.bench.shapes import Shape
from convt3d.cuda import plan as plans
from convt3d.cuda.plan import table as plan_table
from convt3d.cuda.schedule import Problem
from convt3d.cuda.tuning import Outcome
from convt3d.precision import arithmetic_for

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Job:
    """One operation of one layer to be tuned.

    ``shape`` and ``operation`` are a transposed layer's, whose kernels run; ``asked`` is what the
    layer of that name calls the operation, which differs for a Conv3d.
    """

    shape: Shape
    mode: str
    layout: str
    operation: str
    asked: str

    @property
    def problem(self) -> Problem:
        mode, geometry, last = MODES[self.mode], self.shape.geometry, self.layout == "ndhwc"
        return plans.problem_for(
            self.operation,
            geometry,
            mode.dtype,
            last,
            bias=self.shape.bias and self.asked == "forward",
            arithmetic=arithmetic_for(mode.dtype, geometry, self.operation, last, tf32=mode.tf32),
        )

    @property
    def label(self) -> str:
        return f"{self.shape.name} {self.mode} {self.layout} {self.asked}"


def jobs(
    shapes: Sequence[Shape],
    modes: Sequence[str],
    layouts: Sequence[str],
    passes: Sequence[str],
    capability: tuple[int, int],
) -> list[Job]:
    """All combinations that our kernels run."""
    every = (
        Job(layer, mode, layout, operation, asked)
        for shape, mode, layout, asked in itertools.product(shapes, modes, layouts, passes)
        for layer, operation in (shape.as_transposed(asked),)
    )
    return [
        job
        for job in every
        if plans.refusal(job.operation, job.shape.geometry, MODES[job.mode].dtype, capability)
        is None
    ]


Tune = Callable[[Problem, int, tuple[int, ...]], Outcome]


def rows(todo: Sequence[Job], tune: Tune, gpu: str = plan_table.GPU) -> Iterator[dict[str, Any]]:
    """Tune one job after another; each row is ready for JSON.

    ``line`` of a row is what the table of plans has of it, ``gpu`` the name of what timed it.
    """
    for job in todo:
        row: dict[str, Any] = {
            "shape": job.shape.name,
            "mode": job.mode,
            "layout": job.layout,
            "pass": job.asked,
        }
        try:
            outcome = tune(job.problem, job.shape.batch, job.shape.input_size)
            # What runs, and is looked up, is the plan of the canonical form.
            problem, size = job.problem.canonical(job.shape.input_size)
        except (RuntimeError, torch.cuda.OutOfMemoryError) as error:
            yield {**row, "failed": str(error).splitlines()[0][:200]}
            continue
        yield {
            **row,
            "heuristic_ms": outcome.heuristic_ms,
            "tuned_ms": outcome.ms,
            "share": outcome.share,
            "timed": outcome.timed,
            "kept": outcome.kept,
            "plan": outcome.plan.describe(),
            "line": plan_table.line_of(
                problem,
                job.shape.batch,
                size,
                f"{job.shape.name} {job.asked}",
                outcome.plan,
                {
                    "ms": outcome.ms,
                    "model_ms": outcome.heuristic_ms,
                    "next_ms": outcome.next_ms,
                    "timed": outcome.timed,
                },
                gpu,
            ),
        }


def mean_share(found: Sequence[dict[str, Any]]) -> float | None:
    """Geometric mean of the shares: what the heuristic reaches of the best."""
    return geometric_mean(row.get("share") for row in found)


def table(found: Sequence[dict[str, Any]]) -> Table:
    """Heuristic beside tuned, and the geometric mean."""
    from rich.table import Table

    result = Table(title="tuned time as a share of the heuristic's choice", title_justify="left")
    for name in ("layer", "dtype", "layout", "pass"):
        result.add_column(name, no_wrap=True)
    for name in ("heuristic ms", "tuned ms", "share", "timed"):
        result.add_column(name, justify="right")
    result.add_column("winner")
    for row in found:
        first = (row["shape"], row["mode"], row["layout"], row["pass"])
        if "failed" in row:
            result.add_row(*first, "", "", "", "", f"failed: {row['failed']}")
            continue
        numbers = (f"{row['heuristic_ms']:.4f}", f"{row['tuned_ms']:.4f}", f"{row['share']:.2f}")
        winner = "; ".join((row["plan"]["kernel"], row["plan"].get("tile", "")))
        result.add_row(*first, *numbers, str(row["timed"]), winner)
    mean = mean_share(found)
    if mean is not None:
        result.add_section()
        result.add_row("geometric mean", "", "", "", "", "", f"{mean:.2f}")
    return result
