"""``convt3d export``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from convt3d.cli.common import fail, filled


def export(
    problem: Annotated[
        Path | None, typer.Argument(help="A KernelBench problem file (Model, get_inputs, ...).")
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            help="Instead: a named layer, or one as in=64,out=32,size=64,k=2,s=2 (or conv=1)."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Default: print it.")] = None,
    precision: Annotated[
        str,
        typer.Option(
            help="problem (PyTorch's default), follow (its switch, at every call), tf32 or ieee."
        ),
    ] = "problem",
    arch: Annotated[
        str,
        typer.Option(help="sm_90a (Hopper), sm_80 (any GPU and extents), or both: sm_90a,sm_80."),
    ] = "sm_90a",
    tidy: Annotated[
        bool,
        typer.Option(
            "--tidy", help="Keep only the code that the kernels need; takes some minutes."
        ),
    ] = False,
    figures: Annotated[
        Path | None, typer.Option(help="Record of tools/kernelbench_check.py to quote.")
    ] = None,
) -> None:
    """Write a layer, or a network of one convolution, as a self-contained ModelNew file."""
    from convt3d import export as exporter
    from convt3d.bench import shapes
    from convt3d.export.header import quotes_figures

    if (problem is None) == (shape is None):
        fail("give either a problem file or --shape")
    try:
        if problem is not None:
            found = exporter.layer_or_network(problem)
        else:
            selected = filled(shapes.one(str(shape)))
            found = exporter.from_shape(selected)
        quoted = None if figures is None else json.loads(figures.read_text())
        if not isinstance(quoted, dict | None):
            raise ValueError(f"--figures: {figures} is no record")
        if isinstance(found, exporter.Network):
            if (precision, arch) != ("problem", "sm_90a"):
                fail("networks are written with --precision problem and --arch sm_90a alone")
            what = found.origin
            made = exporter.export_network(found, tidy=tidy, figures=quoted)
        else:
            what = found.geometry.label
            made = exporter.export(
                found,
                precision,
                architectures=list(dict.fromkeys(name.strip() for name in arch.split(","))),
                tidy=tidy,
                figures=quoted,
            )
    except (ValueError, OSError, ImportError, OverflowError) as error:
        fail(str(error))
    if quoted is not None and not quotes_figures(made.text):
        print(f"--figures: {figures} has none of kernels {made.digest}", file=sys.stderr)
    if out is None:
        print(made.text, end="")
    else:
        try:
            out.write_text(made.text)
        except OSError as error:
            fail(str(error))
        print(f"{out}: {what}, kernels {made.digest}", file=sys.stderr)
