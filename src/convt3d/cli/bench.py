"""``convt3d bench`` and ``convt3d plot``."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from convt3d.cli.common import console, fail, layers, pick, require_device
from convt3d.progress import steps

if TYPE_CHECKING:
    from convt3d.bench import network_run, run
    from convt3d.bench.record import Record

_NETWORKS = "Whole networks (--model)"
_CPU_OPERATIONS = 1.5e9  # of one pass of a reduced layer: 10 to 100 ms on two cores


def bench(
    context: typer.Context,
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
    fused: Annotated[
        bool,
        typer.Option(
            "--fused",
            help="Compiled by the backend that fuses epilogues, too.",
            rich_help_panel=_NETWORKS,
        ),
    ] = False,
    graphs: Annotated[
        bool,
        typer.Option(
            "--graphs",
            help="CUDA graphs of compiled steps (mode reduce-overhead).",
            rich_help_panel=_NETWORKS,
        ),
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
    --device, --budget, --out, --resume, --force, --commit, --json and --tune (with
    --cudnn-benchmark).
    """
    import torch

    from convt3d.bench import report

    _check_options(context, model is not None)
    draw = None if plot is None else _drawer(plot)  # first: measuring takes long
    _check_record_options(out, resume, force)
    if budget is not None and math.isinf(budget):
        fail("--budget: give a finite number of seconds")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_cuda = device.startswith("cuda")
    if model is not None:
        from convt3d.bench import network_command

        try:
            networks = _networks(
                model,
                dtype,
                layout,
                kinds,
                compiled=(False, True) if compiled is None else (compiled,),
                cudnn_benchmark=(cudnn_benchmark,),
                once=once,
                optimiser=optimiser,
                fused=fused,
                graphs=graphs,
                tuned=tuned,
                small=small,
                cold=cold,
                device=device,
                budget_s=1.0 if budget is None else budget,
            )
        except (ValueError, RuntimeError) as error:
            fail(str(error))
        problem = network_command.measure(
            networks, out, resume=resume, commit=commit, as_json=as_json
        )
        if problem is not None:
            fail(problem)
        return
    try:
        request = _layers(
            shape,
            dtype,
            layout,
            passes,
            peers,
            quick=quick,
            with_ours=not no_ours,
            with_peers=not no_peers,
            reduced=not (on_cuda or full_size),
            device=device,
            budget_s=(0.2 if on_cuda else 3.0) if budget is None else budget,
            check=not no_check,
            tuned=tuned,
        )
    except (ValueError, RuntimeError) as error:
        fail(str(error))
    if not request.contenders:
        fail("--no-ours with --no-peers leaves nothing to measure")
    if no_ours and not as_json and out is None:
        fail("--no-ours has no table, which compares with ours: give --json or --out")
    record = _record(out, resume, commit)
    failure = None
    try:
        _run(request, record)
    except (RuntimeError, OSError) as error:
        failure = error
    if as_json:
        print(json.dumps(record.to_dict(), indent=1))
    elif not no_ours:
        console().print(report.table(record))
    if draw is not None and plot is not None:
        try:
            draw(record, plot)
        except (ValueError, OSError) as error:
            fail(str(error))
    if failure is not None:
        fail(str(failure))
    if not report.acceptable(record):
        fail("some rows failed, or are less exact than PyTorch's, or differ from run to run")


def _networks(
    model: str, dtype: str | None, layout: str, kinds: str, **settings: Any
) -> network_run.Request:
    """What to measure of whole networks; ``settings`` are the other fields of the request.

    Raises:
        ValueError, RuntimeError: an option names what there is not.
    """
    from convt3d.bench.cases import LAYOUTS
    from convt3d.bench.network_run import Request
    from convt3d.bench.network_worker import KINDS, NETWORK_MODES
    from convt3d.bench.networks import NETWORKS

    require_device(settings["device"])
    return Request(
        networks=pick("model", model, list(NETWORKS), []),
        modes=_modes(dtype, list(NETWORK_MODES), settings["device"]),
        layouts=pick("layout", layout, list(LAYOUTS), []),
        kinds=pick("kinds", kinds, list(KINDS), []),
        **settings,
    )


def _layers(
    shape: list[str] | None,
    dtype: str | None,
    layout: str,
    passes: str,
    peers: str | None,
    *,
    quick: bool,
    with_ours: bool,
    with_peers: bool,
    reduced: bool,
    **settings: Any,
) -> run.Request:
    """What to measure of single layers; ``settings`` are the other fields of the request.

    ``reduced`` layers have inputs that a CPU is done with soon, but for those that the user
    describes.

    Raises:
        ValueError, RuntimeError: an option names what there is not.
    """
    import torch

    from convt3d.bench import cases, contenders, shapes
    from convt3d.bench.run import Request

    device = settings["device"]
    require_device(device)
    selected = layers(shape or (list(shapes.QUICK) if quick else list(shapes.named())))
    available = contenders.peers(torch.device(device).type)
    quick_peers = [p for p in available if p in (contenders.DEFAULT, "cudnn_benchmark")]
    chosen = pick("peers", peers, available, quick_peers if quick else available)
    if reduced:
        selected = [s if "=" in s.name else s.reduced(_CPU_OPERATIONS) for s in selected]
    return Request(
        shapes=selected,
        modes=_modes(dtype, list(cases.MODES), device),
        layouts=pick("layout", layout, list(cases.LAYOUTS), []),
        passes=pick("passes", passes, list(cases.PASSES), []),
        contenders=([contenders.OURS] if with_ours else []) + (chosen if with_peers else []),
        **settings,
    )


def _modes(given: str | None, known: list[str], device: str) -> list[str]:
    """The types to measure, of those that the device has."""
    modes = pick("dtype", given, known, [_first_mode(device)])
    if "tf32" in modes and not device.startswith("cuda"):
        fail(f"--dtype: {device} has no TF32; fp32 is what it computes")
    return modes


def _first_mode(device: str) -> str:
    """The type that is measured where none is asked for."""
    return "tf32" if device.startswith("cuda") else "fp32"


def _record(out: Path | None, resume: bool, commit: str | None) -> Record:
    """The record to measure into, with the rows of ``out`` to go on with; it is on disk."""
    from convt3d.bench.record import Record

    record = Record.create(out, sys.argv[1:], commit)
    if resume and out is not None and out.exists():
        try:
            record.resume(out)
        except ValueError as error:
            fail(str(error))
    try:
        record.save()  # before measuring, which takes long
    except OSError as error:
        fail(f"--out: {error}")
    return record


def plot(
    record: Annotated[Path, typer.Argument(help="A record, as bench --out writes it.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="A .png, .svg or .pdf; default RECORD.svg here."),
    ] = None,
) -> None:
    """Draw a record without measuring: speed-up bars and roofline (extra: plot)."""
    from convt3d.bench.record import NetworkRecord, Record

    if record.is_dir():
        fail(f"{record} is a folder")
    out = out or Path(record.with_suffix(".svg").name)
    draw = _drawer(out)
    try:
        found = Record.load(record)
    except OSError as error:
        fail(str(error))
    except ValueError as error:
        with contextlib.suppress(ValueError):
            if NetworkRecord.load(record).rows:
                fail(f"{record} is a record of networks, of which there is no plot")
        fail(str(error))
    try:
        draw(found, out)
    except (OSError, ValueError) as error:
        fail(str(error))
    except (AttributeError, KeyError, TypeError) as error:
        fail(f"{record} is not a benchmark record: {error!r}")
    print(out)


def _run(request: run.Request, record: Record) -> None:
    """Measure with a progress bar on stderr."""
    from convt3d.bench import run as runner

    with steps(request.rows()) as step:
        runner.run(
            request,
            record,
            lambda row: step(f"{row['contender']} {row['shape']} {row['mode']} {row['pass']}"),
        )


_LAYERS_ALONE = (
    *("shape", "quick", "passes", "peers", "no_peers", "no_ours", "no_check", "full_size"),
    "plot",
)
_NETWORKS_ALONE = (
    *("compiled", "cudnn_benchmark", "kinds", "optimiser", "fused", "graphs", "once", "cold"),
    "small",
)
_NEITHER = (  # option, value, option, value: what one asks for the other leaves out
    *(("fused", True, "compiled", False), ("graphs", True, "compiled", False)),
    *(("tuned", True, "cudnn_benchmark", False), ("optimiser", True, "kinds", "inference")),
)


def _check_options(context: typer.Context, networks: bool) -> None:
    """End the program where an option was given that would have no effect."""
    spelled = {p.name: p.opts[0] for p in context.command.params}
    given = {
        name: value
        for name, value in context.params.items()
        if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    }
    for name in _LAYERS_ALONE if networks else _NETWORKS_ALONE:
        if name in given:
            other = (
                "networks; leave it out" if networks else "layers; give --model, or leave it out"
            )
            option = _given(context, name, given[name]).split()[0]
            fail(f"{option} has no say where bench measures {other}")
    for name, value, other, excluded in _NEITHER:
        said = given.get(other)
        if isinstance(said, str):
            said = ",".join(dict.fromkeys(part.strip() for part in said.split(",")))
        if given.get(name) == value and said == excluded:
            fail(f"{spelled[name]} has no say with {_given(context, other, excluded)}")
    for name, other in (("quick", "shape"), ("peers", "no_peers")):
        if name in given and other in given:
            fail(f"{spelled[name]} and {spelled[other]} exclude each other: give one of them")


def _given(context: typer.Context, name: str, value: Any) -> str:
    """An option as it is given on the command line."""
    (option,) = (p for p in context.command.params if p.name == name)
    return option.secondary_opts[0] if value is False else f"{option.opts[0]} {value}"


def _check_record_options(out: Path | None, resume: bool, force: bool) -> None:
    """End the program where a record would be lost, or rows would not be found again."""
    if resume and out is None:
        fail("--resume needs --out, the record that it goes on with")
    if force and out is None:
        fail("--force needs --out, the record that it replaces")
    if resume and force:
        fail("--resume keeps the rows of --out, and --force replaces them: give one of them")
    if out is not None and out.is_dir():
        fail(f"--out: {out} is a folder")
    if out is not None and out.exists() and not (resume or force):
        fail(f"--out: {out} exists; --resume keeps its rows, --force replaces them")


def _drawer(path: Path) -> Callable[[Record, Path], None]:
    """What draws a record into a file; ends the program where it could not."""
    try:
        from convt3d.bench import plot
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        fail("plots need matplotlib: pip install 'convt3d[plot]'")
    if path.suffix.lower() not in plot.SUFFIXES:
        fail(f"{path}: plots are written as {', '.join(plot.SUFFIXES)}")
    return plot.draw
