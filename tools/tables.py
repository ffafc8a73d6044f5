"""Tables of what is measured on whole networks, for docs/benchmarks.md; called by figures.py."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from convt3d.bench import network_report, network_run
from convt3d.bench.report import conditions, geometric_mean

Values = Mapping[str, Any]

KINDS_OF_STEP = "inference", "training"


def sections(results: Path) -> list[str]:
    """A section for each record of networks, of training_check and of distributed_check."""
    made = []
    for kind, write in KINDS.items():
        for path in sorted(results.glob(f"{kind}-*.json")):
            record = json.loads(path.read_text())
            facts = record["environment"]
            device = facts["gpu"] or "CPU"
            made.append(
                f"## {device}: {write(record)}\n\n{conditions(facts)}. "
                f"Raw data: [results/{path.name}](results/{path.name})."
            )
    return made


NETWORKS_TEXT = (
    "The same network as it is built and after `convt3d.convert`, each setting in a process "
    "of its own; {parts}. Training is forward "
    "and backward. Shares are those of convolutions in all work of the GPU, peak memory is what "
    "tensors held, and the first step includes all compilation"
)
TWICE = "medians, of PyTorch over its processes before and after ours"
ONCE = "medians, with PyTorch's process before ours"
LIBRARIES = "MONAI", "nnU-Net"


def networks(record: Values) -> str:
    """Whole networks before and after conversion, as convt3d bench --model measured them."""
    lines = network_run.lines(record["rows"])
    text = NETWORKS_TEXT.format(parts=TWICE if any(len(x.before) > 1 for x in lines) else ONCE)
    known = dict.fromkeys(x.network.split()[0] for x in lines)
    libraries = " and ".join(name for name in known if name in LIBRARIES)
    title = f"whole networks of {libraries}" if libraries else "whole networks"
    if any(row["layout"] == "ndhwc" for row in record["rows"]):
        title += ", channels_last_3d"
    tool = " (`tools/model_bench.py`)" if libraries else ""
    return f"{title}\n\n{text}{tool}.\n\n{network_report.markdown(record['rows'])}"


def networks_in_readme(results: Path, name: str) -> str | None:
    """The table of networks that the README shows, with its source; None without the record."""
    path = results / f"{name}.json"
    if not path.exists():
        return None
    record = json.loads(path.read_text())
    upto = network_report.HEAD.index("speed-up") + 1
    return f"{network_report.markdown(record['rows'], upto)}\n\n{_source(record, path)}"


def libraries_in_readme(results: Path, pattern: str) -> str | None:
    """A table of what training steps of libraries' networks gain; None without records.

    ``pattern`` is that of their files' names; of one setting the last record counts.
    """
    gains: dict[str, dict[tuple[str, bool], str]] = {}
    machines, commits, files = [], [], []
    for path in sorted(results.glob(f"{pattern}.json"), key=_number):
        record = json.loads(path.read_text())
        facts = record["environment"]
        machines.append(conditions({**facts, "commit": None}))
        commits.append(str(facts["commit"])[:12])
        files.append(f"[{path.name}](docs/results/{path.name})")
        for line in network_run.lines(record["rows"]):
            if line.speedup is not None:
                setting = (line.mode, line.compiled)
                gains.setdefault(line.network, {})[setting] = f"{line.speedup:.2f}x"
    if not gains:
        return None
    settings = list(itertools.product(("tf32", "bf16"), (False, True)))
    titles = [f"{mode} {'compiled' if compiled else 'eager'}" for mode, compiled in settings]
    table = [
        f"| network | {' | '.join(titles)} |",
        f"|---|{'--:|' * len(settings)}",
        *(
            f"| {network} | {' | '.join(found.get(setting, '') for setting in settings)} |"
            for network, found in gains.items()
        ),
    ]
    text = "Speed-ups of training steps of other networks, measured likewise:"
    source = f"{'; '.join(dict.fromkeys(machines))}; commits {', '.join(commits)}"
    return "\n".join((text, "", *table, "", f"{source}. Raw data: {', '.join(files)}."))


def _number(path: Path) -> tuple[int, str]:
    """Records of one name in the order of their numbers; the first has none."""
    found = re.search(r"-(\d+)-", path.name)
    return int(found.group(1)) if found else 0, path.name


NOTABLE = 1.5
"""A network that gains more than this by its transposed layers is named in the README."""


def up_layers_in_readme(results: Path, name: str) -> str | None:
    """A sentence on what networks gain by their up layers alone; None without the record."""
    path = results / f"{name}.json"
    if not path.exists():
        return None
    record = json.loads(path.read_text())
    found: dict[str, tuple[list[float], list[float]]] = {}
    for row in record["rows"]:
        for kind, gains in zip(
            KINDS_OF_STEP, found.setdefault(row["network"], ([], [])), strict=True
        ):
            gains.append(row[kind]["before"] / row[kind]["after"])
    order = sorted(found.items(), key=lambda item: -geometric_mean([*item[1][0], *item[1][1]]))
    named = [(network, both) for network, both in order if max(map(max, both)) >= NOTABLE]
    others = [both for _, both in order if max(map(max, both)) < NOTABLE]
    if others:
        notable = {network for network, _ in named}
        rows = [row for row in record["rows"] if row["network"] not in notable]
        most = max(row[kind]["up_share_before"] for row in rows for kind in KINDS_OF_STEP)
        together = tuple([g for both in others for g in both[i]] for i in range(2))
        named.append(
            (
                f"the {len(others)} others, which spend up to {most:.0%} of the time in them,",
                together,
            )
        )
    parts = [
        f"{network} {_range(both[0])} in inference and {_range(both[1])} in training"
        for network, both in named
    ]
    return (
        "With the transposed layers alone converted (`kinds=torch.nn.ConvTranspose3d`), whole "
        f"networks gain little unless these dominate: {'; '.join(parts)}. Ranges are those over "
        "TF32 and bfloat16 and, where measured, `cudnn.benchmark` off and on. "
        f"{_source(record, path)}"
    )


def _range(values: Sequence[float]) -> str:
    low, high = (f"{v:.2f}x" if v < 10 else f"{v:.0f}x" for v in (min(values), max(values)))
    return f"{low} to {high}"


def _source(record: Values, path: Path) -> str:
    name = f"docs/results/{path.name}"
    return f"{conditions(record['environment'])}. Raw data: [{name}]({name})."


def up_layers(record: Values) -> str:
    """Networks and their up layers before and after conversion of these alone."""
    rows = []
    for row in record["rows"]:
        for kind in KINDS_OF_STEP:
            t = row[kind]
            rows.append(
                [
                    row["network"],
                    row["precision"],
                    "yes" if row["cudnn_benchmark"] else "no",
                    kind,
                    *_change(t["before"], t["after"]),
                    *_change(t["up_before"], t["up_after"]),
                    f"{100 * t['up_share_before']:.0f}%",
                ]
            )
    head = ["network", "type", "cudnn.benchmark", "mode", "PyTorch", "convt3d", "speed-up"]
    head += ["its up layers", "convt3d", "speed-up", "their share before"]
    return (
        "whole networks, transposed layers converted\n\n"
        "The same network before and after `convt3d.convert` of its transposed layers alone, and "
        "the sum over these up layers on their inputs inside the network. Training is forward and "
        "backward, without the optimiser (`tools/model_bench.py`).\n\n" + _table(head, rows, left=4)
    )


def training(record: Values) -> str:
    """Loss curves and steps with and without."""
    # Records in which the up layers alone were converted know nothing of cuDNN's plans.
    both = "conv_share" in record["rows"][0]
    share = "conv_share" if both else "up_share"
    distances = ("convt3d", "noise", "plans") if both else ("convt3d", "noise")
    rows = [
        [
            row["network"],
            row["precision"],
            *_change(row["step_ms"]["pytorch"], row["step_ms"]["convt3d"]),
            f"{100 * row[share]['pytorch']:.0f}%",
            *(f"{row['distance'][name]:.1e}" for name in distances),
        ]
        for row in record["rows"]
    ]
    head = ["network", "type", "PyTorch", "convt3d", "speed-up"]
    head += ["share of convolutions" if both else "share of up layers"]
    head += ["distance of the losses", "of rounding alone", "of cuDNN's plans alone"]
    plans = ", and that of PyTorch's curves with other plans of cuDNN from each other"
    return (
        "training\n\n"
        f"{record['steps']} steps from the same seeds; mean distance of the loss curve from "
        "PyTorch's, and that of PyTorch's own layers after a rounding error in the initial weights"
        f"{plans if both else ''} (`tools/training_check.py`).\n\n"
        + _table(head[: 6 + len(distances)], rows, left=2)
    )


def scaling(record: Values) -> str:
    """Weak scaling of a training step."""
    ranks = record["ranks"]
    rows = [
        [
            row["wrapper"],
            row["run"],
            _ms(row["ms_on_one"]),
            _ms(row["ms_on_all"]),
            f"{100 * row['efficiency']:.1f}%",
        ]
        for row in record["rows"]
    ]
    return (
        f"weak scaling to {ranks} GPUs\n\n"
        "A training step of a 3D U-Net of nnU-Net's shape, bfloat16 autocast, two volumes of "
        f"{record['patch']}^3 a GPU (`tools/distributed_check.py`).\n\n"
        + _table(["wrapper", "layers", "on one", f"on {ranks}", "efficiency"], rows, left=2)
    )


KINDS: dict[str, Callable[[Values], str]] = {
    "networks": networks,
    "models": up_layers,
    "training": training,
    "distributed": scaling,
}


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    rule = ["---"] * left + ["--:"] * (len(head) - left)
    return "\n".join(
        [
            f"| {' | '.join(head)} |",
            f"|{'|'.join(rule)}|",
            *(f"| {' | '.join(row)} |" for row in rows),
        ]
    )


def _change(before: float, after: float) -> list[str]:
    return [_ms(before), _ms(after), f"**{before / after:.2f}x**"]


def _ms(value: float) -> str:
    return f"{value:.3g} ms" if value < 100 else f"{value:.0f} ms"
