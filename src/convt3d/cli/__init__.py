"""The ``convt3d`` command; see ``convt3d --help``. Needs the extra ``cli``.

One module a command; each imports what it runs when it runs, so that ``--help`` is quick.
"""

from __future__ import annotations

from typing import Annotated

import typer

from convt3d._version import __version__
from convt3d.cli import bench, cache, doctor, explain, export, tune

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Faster drop-in Conv3d and ConvTranspose3d for PyTorch: measure, ask what runs, check a "
    "machine.",
    pretty_exceptions_show_locals=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print it."),
    ] = False,
) -> None:
    pass


app.command()(bench.bench)
app.command()(bench.plot)
app.command()(explain.explain)
app.command()(export.export)
app.command()(tune.tune)
app.command()(doctor.doctor)
app.add_typer(cache.app, name="cache")
