"""The ``convt3d`` command; see ``convt3d --help``. Needs the extra ``cli``."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console

from convt3d.progress import steps

if TYPE_CHECKING:
    from convt3d.bench import run
    from convt3d.bench.shapes import Shape

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="A faster drop-in ConvTranspose3d for PyTorch: measure, ask what runs, check a machine.",
    pretty_exceptions_show_locals=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from convt3d import __version__

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


_NETWORKS = "Whole networks (--model)"
CPU_OPERATIONS = 1.5e9  # of one pass of a reduced layer: 10 to 100 ms on two cores


@app.command()
def bench(
    quick: Annotated[
        bool, typer.Option("--quick", help="Six task layers; reduced inputs without a GPU.")
    ] = False,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help="A named layer, or one as in=64,out=32,size=64,k=2,s=2 (conv=1: a Conv3d); "
            "transposed (default), conv or all for the named ones. Repeatable."
        ),
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
    tuned: Annotated[
        bool,
        typer.Option("--tune", help="Our layers under torch.backends.cudnn.benchmark = True."),
    ] = False,
    full_size: Annotated[
        bool, typer.Option("--full-size", help="Do not reduce the layers on CPU.")
    ] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1; default cuda.")] = None,
    budget: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Seconds for one measurement (30 runs may take 4x); 0.2, or 3 on CPU; 0: 3 runs.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="JSON record, written as rows come; a new file.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep the rows that --out has; measure the others.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace what --out has.")] = False,
    commit: Annotated[
        str | None, typer.Option(help="Recorded where the source is not a git checkout.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record, no table.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw it: a .png, .svg or .pdf (extra: plot).")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="unet, residual-unet, gan, pangu-recovery.", rich_help_panel=_NETWORKS),
    ] = None,
    compiled: Annotated[
        bool | None,
        typer.Option("--compile/--no-compile", help="Default: both.", rich_help_panel=_NETWORKS),
    ] = None,
    cudnn_benchmark: Annotated[
        bool,
        typer.Option(
            "--cudnn-benchmark/--no-cudnn-benchmark",
            help="Of PyTorch as built and of converted networks.",
            rich_help_panel=_NETWORKS,
        ),
    ] = True,
    kinds: Annotated[
        str, typer.Option(help="Of training, inference.", rich_help_panel=_NETWORKS)
    ] = "training,inference",
    optimiser: Annotated[
        bool,
        typer.Option("--optimiser", help="Steps of SGD, too.", rich_help_panel=_NETWORKS),
    ] = False,
    once: Annotated[
        bool,
        typer.Option(
            "--once", help="Not PyTorch a second time, after ours.", rich_help_panel=_NETWORKS
        ),
    ] = False,
    cold: Annotated[
        bool,
        typer.Option(
            "--cold", help="Begin with empty caches of kernels.", rich_help_panel=_NETWORKS
        ),
    ] = False,
    small: Annotated[
        bool, typer.Option("--small", help="Tiny sizes, to try it.", rich_help_panel=_NETWORKS)
    ] = False,
) -> None:
    """Measure convt3d beside PyTorch and every other way to get the same result.

    With --model, whole networks as built and converted, which also take --dtype, --layout,
    --device, --budget, --out, --resume, --commit, --json and --tune (with --cudnn-benchmark).
    """
    import torch

    from convt3d.bench import cases, contenders, report, run, shapes

    draw = None if plot is None else _drawer(plot)  # first: measuring takes long
    _check_record_options(out, resume, force)
    if budget is not None and math.isinf(budget):
        _fail("--budget: give a finite number of seconds")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_cuda = device.startswith("cuda")
    if model is not None:
        from convt3d.bench import network_command, network_run
        from convt3d.bench.network_worker import KINDS, NETWORK_MODES
        from convt3d.bench.networks import NETWORKS

        try:
            if shape or quick:
                raise ValueError("--model measures networks; leave out --shape and --quick")
            _require_device(device)
            networks = network_run.Request(
                networks=_pick("model", model, list(NETWORKS), []),
                modes=_pick("dtype", dtype, list(NETWORK_MODES), ["tf32" if on_cuda else "fp32"]),
                layouts=_pick("layout", layout, list(cases.LAYOUTS), []),
                kinds=_pick("kinds", kinds, list(KINDS), []),
                compiled=(False, True) if compiled is None else (compiled,),
                cudnn_benchmark=(cudnn_benchmark,),
                once=once,
                optimiser=optimiser,
                tuned=tuned,
                small=small,
                cold=cold,
                device=device,
                budget_s=1.0 if budget is None else budget,
            )
        except (ValueError, RuntimeError) as error:
            _fail(str(error))
        problem = network_command.measure(
            networks, out, resume=resume, commit=commit, as_json=as_json
        )
        if problem is not None:
            _fail(problem)
        return
    try:
        _require_device(device)
        names = shape or (list(shapes.QUICK) if quick else list(shapes.named()))
        selected = _layers(names)
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
        budget_s=(0.2 if on_cuda else 3.0) if budget is None else budget,
        check=not no_check,
        tuned=tuned,
    )
    if not request.contenders:
        _fail("--no-ours with --no-peers leaves nothing to measure")
    record = run.Record.create(out, sys.argv[1:], commit)
    if resume and out is not None and out.exists():
        try:
            record.rows = run.Record.load(out).rows
        except ValueError as error:
            _fail(str(error))
    try:
        record.save()  # before measuring, which takes long
    except OSError as error:
        _fail(f"--out: {error}")
    failure = None
    try:
        _run(request, record)
    except (RuntimeError, OSError) as error:
        failure = error
    if as_json:
        print(json.dumps(record.to_dict(), indent=1))
    else:
        _console().print(report.table(record))
    if draw is not None and plot is not None:
        try:
            draw(record, plot)
        except (ValueError, OSError) as error:
            _fail(str(error))
    if failure is not None:
        _fail(str(failure))
    if not report.acceptable(record):
        _fail("some rows failed, or are less exact than PyTorch's, or differ from run to run")


@app.command("plot")
def plot_record(
    record: Annotated[Path, typer.Argument(help="A record, as bench --out writes it.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="A .png, .svg or .pdf; default RECORD.svg here."),
    ] = None,
) -> None:
    """Draw a record without measuring: speed-up bars and roofline (extra: plot)."""
    from convt3d.bench import run

    out = out or Path(record.with_suffix(".svg").name)
    try:
        _drawer(out)(run.Record.load(record), out)
    except (OSError, ValueError) as error:
        _fail(str(error))
    except (AttributeError, KeyError, TypeError) as error:
        _fail(f"{record} is not a benchmark record: {error!r}")
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
        typer.Option(help="cpu or cuda; where there is no such GPU, an H200 is assumed."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Say what runs for a layer: phases, taps, kernel, tile, work, limit, and why."""
    import torch

    from convt3d.bench import shapes
    from convt3d.explanation import explain as explain_layer
    from convt3d.explanation import has_gpu

    try:
        selected = shapes.one(shape)
        if dtype not in ("float32", "bfloat16", "float16", "float64"):
            raise ValueError(f"unknown dtype {dtype!r}")
        kind = getattr(torch, dtype)
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except (ValueError, RuntimeError) as error:
        _fail(str(error))
    limit = None
    if place.type == "cpu" or (place.type == "cuda" and has_gpu(place)):
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
            selected = shapes.one(str(shape))
            layer = exporter.from_shape(selected)
        quoted = None if figures is None else json.loads(figures.read_text())
        made = exporter.export(layer, precision, figures=quoted)
    except (ValueError, OSError) as error:
        _fail(str(error))
    if out is None:
        print(made.text, end="")
    else:
        try:
            out.write_text(made.text)
        except OSError as error:
            _fail(str(error))
        print(f"{out}: {layer.geometry.label}, kernels {made.digest}", file=sys.stderr)


_Shapes = Annotated[
    list[str] | None,
    typer.Option(help="A named layer, or one as in=64,out=32,size=64,k=2,s=2. Repeatable."),
]
_Dtypes = Annotated[str, typer.Option(help="Of tf32, fp32, bf16, fp16; comma-separated.")]
_Layouts = Annotated[str, typer.Option(help="Of ncdhw, ndhwc; comma-separated.")]
_Passes = Annotated[str, typer.Option(help="Of forward, grad_input, grad_weight; comma-separated.")]
_ALL_PASSES = "forward,grad_input,grad_weight"


@app.command()
def tune(
    shape: _Shapes = None,
    dtype: _Dtypes = "tf32",
    layout: _Layouts = "ncdhw",
    passes: _Passes = _ALL_PASSES,
    count: Annotated[int, typer.Option(min=1, help="Candidates to time, a problem.")] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows, no table.")] = False,
) -> None:
    """Time the best candidates of each layer on this GPU; later calls use the winners."""
    import torch

    from convt3d.bench import tune as tuning
    from convt3d.cuda import tuning as timing
    from convt3d.cuda.schedule import Gpu, Problem

    selected, modes, layouts, operations = _selection(shape, dtype, layout, passes)
    if not torch.cuda.is_available():
        _fail("tuning times kernels, and this machine has no usable GPU")
    device = torch.device("cuda", torch.cuda.current_device())
    capability = Gpu.of(torch.cuda.current_device()).capability
    todo = tuning.jobs(selected, modes, layouts, operations, capability)

    def run(problem: Problem, batch: int, size: tuple[int, ...]) -> timing.Outcome:
        return timing.tune_here(problem, batch, size, device, count)

    found = []
    with steps(len(todo)) as step:
        for job, row in zip(todo, tuning.rows(todo, run), strict=True):
            found.append(row)
            step(job.label)
    if as_json:
        mean = tuning.mean_share(found)
        print(json.dumps({"rows": found, "geometric_mean": mean}, indent=1))
    else:
        _console().print(tuning.table(found))
    if any("failed" in row for row in found):
        _fail("some layers could not be tuned")
    if not all(row["kept"] for row in found):
        _fail("the winners could not be written: see CONVT3D_LOG=info, convt3d cache path")


cache = typer.Typer(no_args_is_help=True, help="Compiled kernels and tuned plans on disk.")
app.add_typer(cache, name="cache")


@cache.command()
def path(as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """Print where the cache is."""
    from convt3d.cuda.compiler import cache_directory

    where = str(cache_directory())
    print(json.dumps({"path": where}) if as_json else where)


@cache.command()
def size(as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """Print how many kernels and tuned plans there are, and their bytes."""
    from convt3d.cuda.compiler import cache_directory
    from convt3d.environment import directory_size

    parts = {name: directory_size(cache_directory() / folder) for name, folder in _CACHED.items()}
    if as_json:
        facts = {name: {"files": n, "bytes": b} for name, (n, b) in parts.items()}
        print(json.dumps({"path": str(cache_directory()), **facts}, indent=1))
        return
    from rich.table import Table

    table = Table(title=_escape(str(cache_directory())), title_justify="left")
    table.add_column("")
    table.add_column("files", justify="right")
    table.add_column("MB", justify="right")
    for name, (files, total) in parts.items():
        table.add_row(name, str(files), f"{total / 1e6:.1f}")
    _console().print(table)


_CACHED = {"kernels": "cubin", "chosen plans": "chosen", "tuned plans": "tuned"}


@cache.command()
def clear(
    tuned: Annotated[bool, typer.Option("--tuned", help="Only the tuned plans.")] = False,
    as_json: Annotated[bool, typer.Option("--json")] = False,
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
            _fail(f"{where} could not be deleted: {error}")
        files, total = files + n, total + b
    winners.forget()
    if as_json:
        print(json.dumps({"files": files, "bytes": total}))
    else:
        print(f"{files} files, {total / 1e6:.1f} MB deleted")


@cache.command()
def warm(
    shape: _Shapes = None,
    dtype: _Dtypes = "tf32",
    layout: _Layouts = "ncdhw",
    passes: _Passes = _ALL_PASSES,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Compile the kernels of layers ahead: for this GPU, or for an H200 where there is none."""
    import torch

    from convt3d.bench.warm import operations as operations_of
    from convt3d.cuda.ahead import compile_operations
    from convt3d.cuda.compiler import architecture, missing_library
    from convt3d.cuda.schedule import Gpu

    selected, modes, layouts, operations = _selection(shape, dtype, layout, passes)
    missing = missing_library()
    if missing is not None:
        _fail(missing)
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


def _selection(
    shape: list[str] | None, dtype: str, layout: str, passes: str
) -> tuple[list[Shape], list[str], list[str], list[str]]:
    """The layers, dtypes, layouts and passes that options name; ends the program if unknown."""
    from convt3d.bench import cases, shapes
    from convt3d.operations import OPERATIONS

    try:
        return (
            _layers(shape or list(shapes.named())),
            _pick("dtype", dtype, [m for m in cases.MODES if m != "fp64"], []),
            _pick("layout", layout, list(cases.LAYOUTS), []),
            _pick("passes", passes, list(OPERATIONS), []),
        )
    except ValueError as error:
        _fail(str(error))


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

    with steps(request.rows()) as step:
        runner.run(
            request,
            record,
            lambda row: step(f"{row['contender']} {row['shape']} {row['mode']} {row['pass']}"),
        )


def _check_record_options(out: Path | None, resume: bool, force: bool) -> None:
    """End the program where a record would be lost, or rows would not be found again."""
    if resume and out is None:
        _fail("--resume needs --out, the record that it goes on with")
    if resume and force:
        _fail("--resume keeps the rows of --out, and --force replaces them: give one of them")
    if out is not None and out.exists() and not (resume or force):
        _fail(f"--out: {out} exists; --resume keeps its rows, --force replaces them")


def _drawer(path: Path) -> Callable[[run.Record, Path], None]:
    """What draws a record into a file; ends the program where it could not."""
    try:
        from convt3d.bench import plot
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        _fail("plots need matplotlib: pip install 'convt3d[plot]'")
    if path.suffix.lower() not in plot.SUFFIXES:
        _fail(f"{path}: plots are written as {', '.join(plot.SUFFIXES)}")
    return plot.draw


def _layers(names: list[str]) -> list[Shape]:
    """Layers by name, several of which may be joined by commas, or described."""
    from convt3d.bench import shapes

    return shapes.select(
        part for name in names for part in ([name] if "=" in name else name.split(","))
    )


def _require_device(name: str) -> None:
    """ValueError if there is no such device here, or PyTorch knows no such name (RuntimeError)."""
    import torch

    device = torch.device(name)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device: {name!r} is neither cpu nor cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device: this machine has no usable GPU {name!r}")


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
