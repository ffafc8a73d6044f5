"""``convt3d tune``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from convt3d.cli.common import ALL_PASSES, Dtypes, Layouts, Passes, Shapes, console, fail, selection
from convt3d.progress import steps


def tune(
    shape: Shapes = None,
    dtype: Dtypes = "tf32",
    layout: Layouts = "ncdhw",
    passes: Passes = ALL_PASSES,
    count: Annotated[int, typer.Option(min=1, help="Candidates to time, a problem.")] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows, no table.")] = False,
    table: Annotated[
        Path | None,
        typer.Option(help="Also put the winners into this table of plans (cuda/plan/table)."),
    ] = None,
) -> None:
    """Time the best candidates of each layer on this GPU; later calls use the winners."""
    import torch

    from convt3d.bench import tune as tuning
    from convt3d.cuda import tuning as timing
    from convt3d.cuda.plan import table as plan_table
    from convt3d.cuda.schedule import Gpu, Problem

    selected, modes, layouts, operations = selection(shape, dtype, layout, passes)
    if not torch.cuda.is_available():
        fail("tuning times kernels, and this machine has no usable GPU")
    device = torch.device("cuda", torch.cuda.current_device())
    capability = Gpu.of(torch.cuda.current_device()).capability
    name = torch.cuda.get_device_name(device)
    todo = tuning.jobs(selected, modes, layouts, operations, capability)

    def run(problem: Problem, batch: int, size: tuple[int, ...]) -> timing.Outcome:
        return timing.tune_here(problem, batch, size, device, count)

    found = []
    with steps(len(todo)) as step:
        for job, row in zip(todo, tuning.rows(todo, run, name), strict=True):
            found.append(row)
            step(job.label)
    if table is not None:
        plan_table.update(table, [row["line"] for row in found if "line" in row])
    if as_json:
        mean = tuning.mean_share(found)
        print(json.dumps({"rows": found, "geometric_mean": mean}, indent=1))
    else:
        console().print(tuning.table(found))
    if any("failed" in row for row in found):
        fail("some layers could not be tuned")
    if not all(row["kept"] for row in found):
        fail("the winners could not be written: see CONVT3D_LOG=info, convt3d cache path")
