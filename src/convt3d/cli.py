"""The ``convt3d`` command: bench, plot, explain, export, doctor. Needs the extra ``cli``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from convt3d.bench import run

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="A faster drop-in ConvTranspose3d for PyTorch: measure, ask what runs, check a machine.",
    pretty_exceptions_show_locals=False,
)

CPU_OPERATIONS = 1.5e9  # of one pass of a reduced layer: 10 to 100 ms on two cores


@app.command()
def bench(
    quick: Annotated[
        bool, typer.Option("--quick", help="Six task layers; reduced inputs without a GPU.")
    ] = False,
    shape: Annotated[
        list[str] | None,
        typer.Option(help="A named layer, or one as in=64,out=32,size=64,k=2,s=2. Repeatable."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of tf32, fp32, bf16, fp16, fp64; comma-separated.")
    ] = None,
    passes: Annotated[
        str,
        typer.Option(
            "--passes",
            "--pass",
            help="Of forward, grad_input, grad_weight, train; comma-separated.",
        ),
    ] = "forward,grad_input,grad_weight",
    layout: Annotated[str, typer.Option(help="Of ncdhw, ndhwc; comma-separated.")] = "ncdhw",
    peers: Annotated[
        str | None,
        typer.Option(help="Which peers run beside convt3d; comma-separated, default all."),
    ] = None,
    no_peers: Annotated[bool, typer.Option("--no-peers", help="Measure convt3d alone.")] = False,
    no_ours: Annotated[bool, typer.Option("--no-ours", help="Measure the peers alone.")] = False,
    no_check: Annotated[
        bool, typer.Option("--no-check", help="Skip the comparison with float64.")
    ] = False,
    full_size: Annotated[
        bool, typer.Option("--full-size", help="Do not reduce the layers on CPU.")
    ] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1; default cuda.")] = None,
    budget: Annotated[
        float | None,
        typer.Option(help="Seconds for one measurement (30 runs may take 4x); 0.2, or 3 on CPU."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="JSON record, written as rows come.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep the rows that --out has; measure the others.")
    ] = False,
    commit: Annotated[
        str | None, typer.Option(help="Recorded where the source is not a git checkout.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record, no table.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw it: a .png or .svg (extra: plot).")
    ] = None,
) -> None:
    """Measure convt3d beside PyTorch and every other way to get the same result."""
    import torch

    from convt3d.bench import cases, contenders, report, run, shapes

    draw = None if plot is None else _drawer()  # first: measuring takes long
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_cuda = device.startswith("cuda")
    try:
        names = shape or (list(shapes.QUICK) if quick else list(shapes.named()))
        selected = shapes.select(
            part for name in names for part in ([name] if "=" in name else name.split(","))
        )
        available = contenders.peers(torch.device(device).type)
        quick_peers = [p for p in available if p in (contenders.DEFAULT, "cudnn_benchmark")]
        chosen = _pick("peers", peers, available, quick_peers if quick else available)
        modes = _pick("dtype", dtype, list(cases.MODES), ["tf32"] if on_cuda else ["fp32"])
        layouts = _pick("layout", layout, list(cases.LAYOUTS), [])
        operations = _pick("passes", passes, list(cases.PASSES), [])
    except (ValueError, RuntimeError) as error:
        _fail(str(error))
    if not on_cuda and not full_size:
        selected = [s if "=" in s.name else s.reduced(CPU_OPERATIONS) for s in selected]
    request = run.Request(
        shapes=selected,
        modes=modes,
        layouts=layouts,
        passes=operations,
        contenders=([] if no_ours else [contenders.OURS]) + ([] if no_peers else chosen),
        device=device,
        budget_s=budget or (0.2 if on_cuda else 3.0),
        check=not no_check,
    )
    if not request.contenders:
        _fail("--no-ours with --no-peers leaves nothing to measure")
    record = run.Record.create(out, sys.argv[1:], commit)
    if resume and out is not None and out.exists():
        try:
            record.rows = run.Record.load(out).rows
        except ValueError as error:
            _fail(str(error))
    failure = None
    try:
        _run(request, record)
    except RuntimeError as error:
        failure = error
    if as_json:
        print(json.dumps(record.to_dict(), indent=1))
    else:
        _console().print(report.table(record))
    if draw is not None and plot is not None:
        try:
            draw(record, plot)
        except ValueError as error:
            _fail(str(error))
    if failure is not None:
        _fail(str(failure))
    if not report.acceptable(record):
        _fail("some rows failed, or are less exact than PyTorch's, or differ from run to run")


@app.command("plot")
def plot_record(
    record: Annotated[Path, typer.Argument(help="A record, as bench --out writes it.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="A .png or .svg; default RECORD.svg here.")
    ] = None,
) -> None:
    """Draw a record without measuring: speed-up bars and roofline (extra: plot)."""
    from convt3d.bench import run

    out = out or Path(record.with_suffix(".svg").name)
    try:
        _drawer()(run.Record.load(record), out)
    except (OSError, ValueError) as error:
        _fail(str(error))
    print(out)


@app.command()
def explain(
    shape: Annotated[
        str, typer.Argument(help="A named layer (kb61, ...), or in=64,out=32,size=64,k=2,s=2.")
    ],
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32",
    channels_last: Annotated[bool, typer.Option("--channels-last")] = False,
    device: Annotated[
        str | None,
        typer.Option(help="cpu or cuda; cuda without a GPU explains the plan for an H200."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Say what runs for a layer: phases, taps, kernel, tile, work, limit, and why."""
    import torch

    from convt3d.bench import shapes
    from convt3d.explanation import explain as explain_layer

    try:
        (selected,) = shapes.select([shape])
        if dtype not in ("float32", "bfloat16", "float16", "float64"):
            raise ValueError(f"unknown dtype {dtype!r}")
        kind = getattr(torch, dtype)
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except (ValueError, RuntimeError) as error:
        _fail(str(error))
    limit = None
    if place.type == "cpu" or torch.cuda.is_available():
        from convt3d.bench.limits import measure_limit

        limit = measure_limit(selected, kind, place)
    explanation = explain_layer(
        selected.geometry,
        selected.x_size,
        kind,
        device=place,
        channels_last=channels_last,
        limit=limit,
    )
    if as_json:
        print(json.dumps(explanation.to_dict(), indent=1))
    else:
        _console().print(str(explanation), highlight=False, markup=False, soft_wrap=True)


@app.command()
def export(
    problem: Annotated[
        Path | None, typer.Argument(help="A KernelBench problem file (Model, get_inputs, ...).")
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(help="Instead: a named layer, or one as in=64,out=32,size=64,k=2,s=2."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Default: print it.")] = None,
    precision: Annotated[
        str, typer.Option(help="follow (PyTorch's switch, at every call), tf32 or ieee.")
    ] = "follow",
    figures: Annotated[
        Path | None, typer.Option(help="Record of tools/kernelbench_check.py to quote.")
    ] = None,
) -> None:
    """Write one layer as a self-contained ModelNew file: kernels, launcher and module."""
    from convt3d import export as exporter
    from convt3d.bench import shapes

    if (problem is None) == (shape is None):
        _fail("give either a problem file or --shape")
    try:
        if problem is not None:
            layer = exporter.from_problem(problem)
        else:
            (selected,) = shapes.select([str(shape)])
            layer = exporter.from_shape(selected)
        quoted = None if figures is None else json.loads(figures.read_text())
        made = exporter.export(layer, precision, figures=quoted)
    except (ValueError, OSError) as error:
        _fail(str(error))
    if out is None:
        print(made.text, end="")
    else:
        out.write_text(made.text)
        print(f"{out}: {layer.geometry.label}, kernels {made.digest}", file=sys.stderr)


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """Report GPU, driver, NVRTC, versions, cache, and what will be accelerated here."""
    from convt3d import doctor as examination

    findings = examination.examine()
    if as_json:
        print(json.dumps(examination.to_dict(findings), indent=1))
    else:
        from rich.table import Table

        table = Table(show_header=False, box=None, pad_edge=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        marks = {True: "[green]ok[/] ", False: "[red]!![/] ", None: ""}
        for finding in findings:
            table.add_row(finding.name, marks[finding.ok] + _escape(finding.text))
        _console().print(table)
    if any(f.name == "self-test" and f.ok is False for f in findings):
        raise typer.Exit(1)


def _run(request: run.Request, record: run.Record) -> None:
    """Measure with a progress bar on stderr."""
    from convt3d.bench import run as runner

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True
    ) as progress:
        task = progress.add_task("starting", total=request.rows())

        def step(row: dict[str, object]) -> None:
            text = f"{row['contender']} {row['shape']} {row['mode']} {row['pass']}"
            progress.update(task, advance=1, description=text)

        runner.run(request, record, step)


def _drawer() -> Callable[[run.Record, Path], None]:
    try:
        from convt3d.bench import plot
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        _fail("plots need matplotlib: pip install 'convt3d[plot]'")
    return plot.draw


def _pick(option: str, text: str | None, known: list[str], default: list[str]) -> list[str]:
    if text is None:
        return default
    wanted = [part.strip() for part in text.split(",") if part.strip()]
    for name in wanted:
        if name not in known:
            raise ValueError(f"--{option}: unknown {name!r}; known are {', '.join(known)}")
    return wanted


def _console() -> Console:
    # Piped output has no width of its own; a table must not be folded to 80 columns there.
    console = Console()
    return console if console.is_terminal else Console(width=180)


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _fail(message: str) -> NoReturn:
    print(f"convt3d: {message}", file=sys.stderr)
    raise typer.Exit(1)
