"""``convt3d cache``: path, size, clear and warm."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from convt3d.cli.common import (
    ALL_PASSES,
    AsJson,
    Dtypes,
    Layouts,
    Passes,
    Shapes,
    console,
    escape,
    fail,
    selection,
)
from convt3d.progress import steps

app = typer.Typer(no_args_is_help=True, help="Compiled kernels and tuned plans on disk.")

_CACHED = {"kernels": "cubin", "chosen plans": "chosen", "tuned plans": "tuned"}


@app.command()
def path(as_json: AsJson = False) -> None:
    """Print where the cache is."""
    from convt3d.cuda.compiler import cache_directory

    where = str(cache_directory())
    print(json.dumps({"path": where}) if as_json else where)


@app.command()
def size(as_json: AsJson = False) -> None:
    """Print how many kernels and tuned plans there are, and their bytes."""
    from convt3d.cuda.compiler import cache_directory
    from convt3d.environment import directory_size

    parts = {name: directory_size(cache_directory() / folder) for name, folder in _CACHED.items()}
    if as_json:
        facts = {name: {"files": n, "bytes": b} for name, (n, b) in parts.items()}
        print(json.dumps({"path": str(cache_directory()), **facts}, indent=1))
        return
    from rich.table import Table

    table = Table(title=escape(str(cache_directory())), title_justify="left")
    table.add_column("")
    table.add_column("files", justify="right")
    table.add_column("MB", justify="right")
    for name, (files, total) in parts.items():
        table.add_row(name, str(files), f"{total / 1e6:.1f}")
    console().print(table)


@app.command()
def clear(
    tuned: Annotated[bool, typer.Option("--tuned", help="Only the tuned plans.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete compiled kernels and remembered plans; they are made again when needed."""
    import shutil

    from convt3d.cuda import winners
    from convt3d.cuda.compiler import cache_directory
    from convt3d.environment import directory_size

    files = total = 0
    for folder in ("tuned",) if tuned else _CACHED.values():
        where = cache_directory() / folder
        n, b = directory_size(where)
        try:
            shutil.rmtree(where)
        except FileNotFoundError:
            continue
        except OSError as error:
            fail(f"{where} could not be deleted: {error}")
        files, total = files + n, total + b
    winners.forget()
    if as_json:
        print(json.dumps({"files": files, "bytes": total}))
    else:
        print(f"{files} files, {total / 1e6:.1f} MB deleted")


@app.command()
def warm(
    shape: Shapes = None,
    dtype: Dtypes = "tf32",
    layout: Layouts = "ncdhw",
    passes: Passes = ALL_PASSES,
    as_json: AsJson = False,
) -> None:
    """Compile the kernels of layers ahead: for this GPU, or for an H200 where there is none."""
    import torch

    from convt3d.bench.warm import operations as operations_of
    from convt3d.cuda.ahead import compile_operations
    from convt3d.cuda.compiler import architecture, missing_library, unwritable
    from convt3d.cuda.schedule import Gpu

    selected, modes, layouts, operations = selection(shape, dtype, layout, passes)
    obstacle = missing_library() or unwritable()
    if obstacle is not None:
        fail(obstacle)
    gpu = Gpu.of(torch.cuda.current_device()) if torch.cuda.is_available() else Gpu()
    todo = operations_of(selected, modes, layouts, operations, gpu.capability)
    with steps(len(todo)) as step:
        done = compile_operations(todo, gpu, step=step)
    target = architecture(gpu.capability)
    for note in done.notes:
        print(f"convt3d: {note}", file=sys.stderr)
    if as_json:
        counts = {"kernels": done.compiled + done.cached, "compiled": done.compiled}
        print(json.dumps({**counts, "target": target}))
    else:
        where = gpu.name or "no GPU here: an H200 is assumed"
        print(f"{done.compiled} kernels compiled, {done.cached} found, for {target} ({where})")
