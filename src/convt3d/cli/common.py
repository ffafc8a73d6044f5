"""What commands share: options, checks of what they name, and how they print and fail."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console

if TYPE_CHECKING:
    from convt3d.bench.shapes import Shape

Shapes = Annotated[
    list[str] | None,
    typer.Option(help="A named layer, or one as in=64,out=32,size=64,k=2,s=2. Repeatable."),
]
Dtypes = Annotated[str, typer.Option(help="Of tf32, fp32, bf16, fp16; comma-separated.")]
Layouts = Annotated[str, typer.Option(help="Of ncdhw, ndhwc; comma-separated.")]
Passes = Annotated[str, typer.Option(help="Of forward, grad_input, grad_weight; comma-separated.")]
ALL_PASSES = "forward,grad_input,grad_weight"
AsJson = Annotated[bool, typer.Option("--json")]


def selection(
    shape: list[str] | None, dtype: str, layout: str, passes: str
) -> tuple[list[Shape], list[str], list[str], list[str]]:
    """The layers, dtypes, layouts and passes that options name; ends the program if unknown."""
    from convt3d.bench import cases, shapes
    from convt3d.operations import OPERATIONS

    try:
        return (
            layers(shape or list(shapes.named())),
            pick("dtype", dtype, [m for m in cases.MODES if m != "fp64"], []),
            pick("layout", layout, list(cases.LAYOUTS), []),
            pick("passes", passes, list(OPERATIONS), []),
        )
    except ValueError as error:
        fail(str(error))


def layers(names: list[str]) -> list[Shape]:
    """Layers by name, several of which may be joined by commas, or described."""
    from convt3d.bench import shapes

    parts = (part for name in names for part in ([name] if "=" in name else name.split(",")))
    return [filled(shape) for shape in shapes.select(parts)]


def filled(shape: Shape) -> Shape:
    """The layer; ValueError if its batch is empty, which kernels neither run nor are timed on."""
    if shape.batch < 1:
        raise ValueError(f"--shape: the batch of {shape.name!r} is empty")
    return shape


def require_device(name: str) -> None:
    """ValueError if there is no such device here, or PyTorch knows no such name (RuntimeError)."""
    import torch

    device = torch.device(name)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device: {name!r} is neither cpu nor cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device: this machine has no usable GPU {name!r}")


def pick(option: str, text: str | None, known: list[str], default: list[str]) -> list[str]:
    """The names in a comma-separated text; ValueError if one is unknown, or none."""
    if text is None:
        return default
    wanted = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for name in wanted:
        if name not in known:
            raise ValueError(f"--{option}: unknown {name!r}; known are {', '.join(known)}")
    if not wanted:
        raise ValueError(f"--{option} names nothing; known are {', '.join(known)}")
    return wanted


def console() -> Console:
    """Where tables go."""
    # Piped output has no width of its own; a table must not be folded to 80 columns there.
    console = Console()
    return console if console.is_terminal else Console(width=180)


def escape(text: str) -> str:
    """A text as rich prints it to the letter."""
    from rich.markup import escape

    return escape(text)


def fail(message: str) -> NoReturn:
    """End the program with a message on stderr."""
    print(f"convt3d: {message}", file=sys.stderr)
    raise typer.Exit(1)
