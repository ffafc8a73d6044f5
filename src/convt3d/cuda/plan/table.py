"""Measured winners: for layers that were timed, the plan that was the fastest of all that ran.

``table/h200.jsonl`` has a line for each problem and its very extents, which
``convt3d tune --table`` writes after timing candidates of every family. What a line says holds as
long as its plan launches what was timed; the ``launches`` digest of a line tells (see
:func:`digest`).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any

from convt3d.cuda import codec, records
from convt3d.cuda.schedule import Gpu, Plan, Problem
from convt3d.log import log_once
from convt3d.precision import Arithmetic

_TABLES = {((9, 0), 132): "h200.jsonl"}  # by compute capability and number of multiprocessors
GPU = "NVIDIA H200"  # where lines do not name another


@dataclasses.dataclass(frozen=True)
class Winner:
    """A plan that was the fastest of those ``timed`` on a GPU, or as fast; times in milliseconds.

    ``next_ms`` is the time of the best of the others, None where there was none; ``arithmetic``
    that of the plans that were timed.
    """

    plan: Plan
    ms: float
    next_ms: float | None
    timed: int
    arithmetic: Arithmetic
    gpu: str = GPU

    def __str__(self) -> str:
        same = self.arithmetic is self.plan.problem.arithmetic
        kind = "" if same else f" in {self.arithmetic.value}"
        where = f"timed{kind} on an {self.gpu.removeprefix('NVIDIA ')}: {self.ms:.3g} ms"
        if self.next_ms is None:
            return where
        fastest = f"the fastest of {self.timed}"
        if self.next_ms < self.ms:  # timed again, in turn, where several are alike
            fastest = f"within {100 * (self.ms / self.next_ms - 1):.1f}% of {fastest}"
        return f"{fastest} {where}, the next one {self.next_ms:.3g} ms"


def recall(problem: Problem, batch: int, input_size: Sequence[int], gpu: Gpu) -> Winner | None:
    """The plan that was the fastest for these very extents on such a GPU, or None.

    What was timed for a problem that is :attr:`~Problem.alike` serves this one, too.
    """
    lines = _lines(_TABLES.get((gpu.capability, gpu.multiprocessors)))
    if not lines:
        return None
    keys = ((key_of(one, batch, input_size), one) for one in (problem, *problem.alike))
    key, timed = next((item for item in keys if item[0] in lines), (None, problem))
    if key is None:
        return None
    try:
        row = json.loads(lines[key])
        plan = plan_of(row["plan"], problem, gpu)
        times = row["ms"], row["next_ms"], row["timed"]
        winner = Winner(plan, *times, timed.arithmetic, row.get("gpu", GPU))
        launches = plan.schedule(batch, input_size).launches
    except (ValueError, KeyError, TypeError) as error:
        log_once(f"the table of plans has a line that is ignored: {error!r} ({key})")
        return None
    fits = all(launch.shared_bytes <= gpu.shared_per_block for launch in launches)
    return winner if fits else None


@functools.cache
def _lines(name: str | None) -> dict[str, str]:
    """Lines of a table by their keys, which they begin with; they are parsed when asked for."""
    if name is None:
        return {}
    text = (resources.files("convt3d.cuda.plan") / "table" / name).read_text()
    return {line.split('"', 4)[3]: line for line in text.splitlines()}


def rows(name: str = "h200.jsonl") -> list[dict[str, Any]]:
    """All lines of a table."""
    return [json.loads(line) for line in _lines(name).values()]


# --- What a line has -----------------------------------------------------------------------------


def key_of(problem: Problem, batch: int, input_size: Sequence[int]) -> str:
    """A problem and its extents in one line of text."""
    g = problem.geometry
    layouts = "-".join(
        "ndhwc" if last else "ncdhw"
        for last in (problem.source_channels_last, problem.target_channels_last)
    )
    words = [
        problem.operation,
        problem.arithmetic.value,
        layouts + (" bias" if problem.bias else ""),
        f"{g.in_channels}-{g.out_channels}",
        *(
            f"{name}{_by(getattr(g, field))}"
            for name, field in (
                *(("k", "kernel_size"), ("s", "stride"), ("p", "padding")),
                *(("op", "output_padding"), ("d", "dilation")),
            )
        ),
        f"g{g.groups}",
        f"n{batch}",
        _by(input_size),
    ]
    return " ".join(words)


def _by(numbers: Sequence[int]) -> str:
    return "x".join(map(str, numbers))


def record_of(plan: Plan) -> dict[str, Any]:
    """A plan without its problem and its GPU, which a line's key tells.

    Raises:
        TypeError: a value of another type than plans are made of.
    """
    encoded = codec.encode(plan)
    fields = {k: v for k, v in encoded["fields"].items() if k not in ("problem", "gpu")}
    return {"type": encoded["type"], "fields": fields}


def plan_of(record: dict[str, Any], problem: Problem, gpu: Gpu) -> Plan:
    """The plan of :func:`record_of` for a problem; raises as :func:`codec.decode`."""
    known: dict[str, Any] = {"problem": problem}
    if any(field.name == "gpu" for field in dataclasses.fields(codec.class_of(record["type"]))):
        known["gpu"] = gpu
    return codec.make(record["type"], {**codec.decode_fields(record["fields"]), **known})


def line_of(
    problem: Problem,
    batch: int,
    input_size: Sequence[int],
    layer: str,
    plan: Plan,
    times: dict[str, Any],
    gpu: str = GPU,
) -> dict[str, Any]:
    """A line of the table.

    Args:
        problem, batch, input_size: what was timed, in its canonical form.
        layer: a name of it for readers.
        plan: the winner.
        times: ``ms`` of the winner, ``model_ms`` of what would have run untuned, ``next_ms`` of the
            fastest other plan (or None), and how many were ``timed``.
        gpu: the name of the GPU that timed it.
    """
    return {
        "key": key_of(problem, batch, input_size),
        "layer": layer,
        **{k: round(v, 5) if isinstance(v, float) else v for k, v in times.items()},
        **({} if gpu == GPU else {"gpu": gpu}),
        "launches": digest(plan, batch, input_size),
        "plan": record_of(plan),
    }


def update(path: pathlib.Path, found: Iterable[dict[str, Any]]) -> None:
    """Put lines into a table, in place of those of the same keys; a new file if there is none."""
    text = path.read_text() if path.exists() else ""
    lines = {line["key"]: line for line in map(json.loads, text.splitlines())}
    lines |= {line["key"]: line for line in found}
    path.write_text("".join(json.dumps(lines[key]) + "\n" for key in sorted(lines)))


def digest(plan: Plan, batch: int, input_size: Sequence[int]) -> str:
    """A short digest of what a plan launches: kernels, macros, grids and shared memory."""
    launches = plan.schedule(batch, input_size).launches
    facts = [(one.kernel, one.grid, one.block, one.shared_bytes) for one in launches]
    return records.digest(repr(facts))[:12]
