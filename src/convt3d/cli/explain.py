"""``convt3d explain``."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from convt3d.cli.common import AsJson, console, fail


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
    as_json: AsJson = False,
) -> None:
    """Say what runs for a layer: phases, taps, kernel, tile, work, limit, and why."""
    import torch

    from convt3d.bench import shapes
    from convt3d.explanation import explain as explain_layer
    from convt3d.explanation import has_gpu

    try:
        selected = shapes.one(shape)
        if dtype not in ("float32", "bfloat16", "float16", "float64"):
            known = "float32, bfloat16, float16, float64"
            raise ValueError(f"--dtype: unknown {dtype!r}; known are {known}")
        kind = getattr(torch, dtype)
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except (ValueError, RuntimeError) as error:
        fail(str(error))
    limit = None
    if place.type == "cpu" or (place.type == "cuda" and has_gpu(place)):
        from convt3d.bench.limits import measure_limit

        limit = measure_limit(selected, kind, place)
    try:
        explanation = explain_layer(
            selected.geometry,
            selected.x_size,
            kind,
            device=place,
            channels_last=channels_last,
            limit=limit,
        )
    except (ValueError, OverflowError, RuntimeError) as error:  # sizes beyond all bounds
        fail(f"{shape}: {error}")
    if as_json:
        print(json.dumps(explanation.to_dict(), indent=1))
    else:
        console().print(str(explanation), highlight=False, markup=False, soft_wrap=True)
