"""Tables of whole networks, of training and of several GPUs, for the pages that tables.py fills."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from tables import TYPES, Results, table

from convt3d.bench import network_run
from convt3d.bench.network_run import Line
from convt3d.bench.network_worker import SIDES
from convt3d.bench.report import milliseconds, percent, times

NETWORKS = "networks-h200", "networks-libraries-h200"
CHANNELS_LAST = "networks-ndhwc-h200"
FUSED = "networks-fused"
TIMED = "networks-timed"
GRAPHS = "networks-graphs"
CURVES = "training-conv-h200", "training-conv-bf16-h200", "training-h200"
SCALING = "distributed-h200"


def blocks(results: Results) -> dict[str, str]:
    """The blocks of docs/benchmarks.md about whole networks."""
    return {
        "networks": f"{networks(results, NETWORKS)}\n\n{notes(results, NETWORKS)}",
        "channels-last": in_channels_last(results),
        "memory": by_network(_lines(results, NETWORKS, "ncdhw"), _memory),
        "timed": f"{networks(results, [TIMED])} {waits(results, [TIMED])} "
        f"{repeated(results, [TIMED])}",
        "curves": curves(results),
        "scaling": scaling(results),
    }


def in_readme(results: Results) -> str:
    """The README's table of networks and what is to be said with it."""
    return "\n\n".join(
        [
            networks(results, NETWORKS, machine=True),
            f"In channels_last_3d: {in_channels_last(results)}",
            f'Compiled, as built -> converted, and the same by `backend="convt3d"`: '
            f"{'; '.join(fused(results))}. {results.source(FUSED)}",
            "Small networks, eager, both sides timed at their first call by "
            f"`torch.backends.cudnn.benchmark`: {in_a_sentence(results, [TIMED])}",
            'Compiled steps of small networks as CUDA graphs (`mode="reduce-overhead"`), where the '
            f"host has no say: {'; '.join(graphs(results))}. {results.source(GRAPHS)}",
        ]
    )


def in_channels_last(results: Results) -> str:
    """Training steps of networks in that format, in a sentence."""
    found = "; ".join(
        f"{line.network} {_setting(line.mode, line.compiled)} {_change(line)}"
        for line in _lines(results, [CHANNELS_LAST], "ndhwc")
    )
    return f"{found}. {results.source(CHANNELS_LAST)}"


def fused(results: Results) -> Iterator[str]:
    """Networks as built, converted, and with the backend that fuses epilogues."""
    for line in _lines(results, [FUSED], "ncdhw"):
        if line.fused is not None and line.pytorch is not None:
            gain = f"{milliseconds(line.fused, '')}, {times(line.pytorch / line.fused)}"
            yield f"{_step(line)}, and {gain}"


def graphs(results: Results) -> Iterator[str]:
    """Networks as CUDA graphs, beside the same without where that was measured."""
    found = _lines(results, [GRAPHS], "ncdhw")
    others = {(e.network, e.mode, e.kind): e for e in found if e.compiled and not e.graphs}
    for line in (line for line in found if line.graphs):
        other = others.get((line.network, line.mode, line.kind))
        yield _step(line) + (f" (without {_change(other)})" if other else "")


def _lines(results: Results, names: Sequence[str], layout: str) -> list[Line]:
    found = [line for name in names for line in network_run.lines(results.values[name]["rows"])]
    return [line for line in found if line.layout == layout and not line.failed]


def _setting(mode: str, compiled: bool) -> str:
    return f"{TYPES[mode]} {'compiled' if compiled else 'eager'}"


def by_network(found: Sequence[Line], cell: Callable[[Line], str]) -> str:
    """A row a network, a column a setting."""
    order = list(TYPES)
    settings = sorted(
        {(line.mode, line.compiled) for line in found}, key=lambda s: (order.index(s[0]), s[1])
    )
    cells: dict[str, dict[tuple[str, bool], str]] = {}
    for line in found:
        name = line.network if line.kind == "training" else f"{line.network}, {line.kind}"
        cells.setdefault(name, {})[line.mode, line.compiled] = cell(line)
    return table(
        ["network", *(_setting(*setting) for setting in settings)],
        [[name, *(known.get(s, "") for s in settings)] for name, known in cells.items()],
    )


def networks(results: Results, names: Sequence[str], machine: bool = False) -> str:
    """Steps as built and converted."""
    found = by_network(_lines(results, names, "ncdhw"), _change)
    return f"{found}\n\n{results.source(*names, machine=machine)}"


def _step(line: Line) -> str:
    return f"{line.network} {TYPES[line.mode]} {line.kind} {_change(line)}"


def _change(line: Line) -> str:
    return _arrow(line.pytorch, line.after)


def _arrow(before: float | None, after: float | None) -> str:
    if not before or not after:
        return ""
    gain = times(before / after)
    gain = f"**{gain}**" if round(before / after, 2) < 1 else gain
    return f"{milliseconds(before, '')} -> {milliseconds(after, '')}, {gain}"


def _memory(line: Line) -> str:
    shares = " -> ".join(percent(share) for share in line.conv_share)
    peaks = " -> ".join(f"{size / 1e3:.2f}" for size in line.peak_mbytes if size)
    return f"{shares}, {peaks}"


WAITS = 0.8
"""A step waits for the host where its kernels take a smaller share of its time."""


def notes(results: Results, names: Sequence[str]) -> str:
    """What a reader of the networks' times must know, each from the rows."""
    found = _lines(results, names, "ncdhw")
    first = []
    for compiled in (False, True):
        both = zip(*(line.first_s for line in found if line.compiled == compiled), strict=True)
        before, after = (_range(seconds, "s") for seconds in both)
        first.append(f"{'compiled' if compiled else 'eager'} {before}, converted {after}")
    texts = [
        f"First steps, which include all compilation, took {'; '.join(first)}.",
        waits(results, names),
        repeated(results, names),
    ]
    runs = [run for name in names for run in results.values[name].get("runs", [])]
    texts += [f"Rows of commit {r['commit'][:12]}: {r['how']}." for r in runs if "how" in r]
    return "\n".join(f"- {text}" for text in texts)


def waits(results: Results, names: Sequence[str]) -> str:
    """Which steps the GPU does not fill, in a sentence."""
    found = []
    for row in (row for name in names for row in results.values[name]["rows"]):
        kernels = row["conv_ms"] / row["conv_share"] if row.get("conv_ms") else None
        if kernels is not None and kernels < WAITS * row["ms"]:
            text = f"{milliseconds(kernels, '')} of {milliseconds(row['ms'])}"
            found.append((row["network"], f"{_side(row)} {text}"))
    if not found:
        return ""
    return (
        f"Steps that wait for the host, since the GPU works for less than {percent(WAITS)} of the "
        f"time: {_grouped(found)}."
    )


def repeated(results: Results, names: Sequence[str]) -> str:
    """Which times are medians of several processes, in a sentence."""
    found = [
        (row["network"], f"{_side(row)} {_range(row['ms_of_processes'], 'ms')}")
        for name in names
        for row in results.values[name]["rows"]
        if "ms_of_processes" in row
    ]
    if not found:
        return ""
    return f"Medians of several processes in turn, with this range: {_grouped(found)}."


def _side(row: dict[str, Any]) -> str:
    side = "" if row["side"] == SIDES[0] else " converted"
    kind = "" if row["kind"] == "training" else f" {row['kind']}"
    return f"{_setting(row['mode'], row['compiled'])}{side}{kind}"


def _grouped(told: Sequence[tuple[str, str]]) -> str:
    groups: dict[str, list[str]] = {}
    for name, text in told:
        groups.setdefault(name, []).append(text)
    return "; ".join(f"{name}: {', '.join(texts)}" for name, texts in groups.items())


def _range(values: Iterable[float | None], unit: str) -> str:
    known = [value for value in values if value is not None]
    return f"{min(known):.1f} to {max(known):.1f} {unit}"


# --- Small networks ------------------------------------------------------------------------------


def in_a_sentence(results: Results, names: Sequence[str]) -> str:
    """Each step as built and converted, one after the other."""
    found = "; ".join(map(_step, _lines(results, names, "ncdhw")))
    return f"{found}. {results.source(*names)}"


# --- Training ------------------------------------------------------------------------------------


def curves(results: Results) -> str:
    """Distances of loss curves, and steps with and without."""
    rows = []
    for name in CURVES:
        values = results.values[name]
        for row in values["rows"]:
            of = "conv" if "conv_share" in row else "up"
            distance = row["distance"]
            rows.append(
                [
                    row["network"],
                    TYPES[row["precision"]],
                    "all" if of == "conv" else "transposed",
                    "timed" if values["tuned"] else "planned",
                    _arrow(row["step_ms"]["pytorch"], row["step_ms"]["convt3d"]),
                    percent(row[f"{of}_share"]["pytorch"]),
                    *(
                        f"{distance[kind]:.1e}" if kind in distance else ""
                        for kind in ("convt3d", "noise", "plans")
                    ),
                ]
            )
    (steps,) = {results.values[name]["steps"] for name in CURVES}
    head = ["network", "type", "converted", "our plans", "step", "share of these"]
    head += ["distance of the losses", "of rounding alone", "of cuDNN's plans alone"]
    source = results.source(*CURVES)
    return f"{table(head, rows, left=4)}\n\n{steps} steps from the same seeds. {source}"


def scaling(results: Results) -> str:
    """Weak scaling of a training step."""
    values = results.values[SCALING]
    ranks = values["ranks"]
    rows = [
        [
            row["wrapper"],
            row["run"],
            milliseconds(row["ms_on_one"]),
            milliseconds(row["ms_on_all"]),
            f"{100 * row['efficiency']:.1f}%",
        ]
        for row in values["rows"]
    ]
    found = table(["wrapper", "layers", "on one", f"on {ranks}", "efficiency"], rows, left=2)
    text = f"Two volumes of {values['patch']}^3 a GPU."
    return f"{found}\n\n{text} {results.source(SCALING)}"
