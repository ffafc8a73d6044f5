"""Tables of measured layers in README.md and docs/benchmarks.md; those of networks: network_tables.

A page has blocks between markers, <!-- NAME: begin --> and <!-- NAME: end -->. What stands in a
block comes from the records of docs/results, what stands around it is written by hand.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from convt3d.bench.contenders import DEFAULT, OURS
from convt3d.bench.record import Record
from convt3d.bench.report import (
    Line,
    conditions,
    geometric_mean,
    lines,
    milliseconds,
    percent,
    times,
)

TYPES = {"tf32": "TF32", "fp32": "IEEE float32", "bf16": "bfloat16", "fp16": "float16"}
LAYOUTS = {"ncdhw": "NCDHW", "ndhwc": "channels_last"}
OPERATIONS = {
    "forward": "forward",
    "grad_input": "by input",
    "grad_weight": "by weight",
    "train": "training step",
}

CONV = {mode: (f"h200-conv-{mode}",) for mode in ("tf32", "bf16")}
TRANSPOSED = {
    ("tf32",): ("h200-forward-tf32", "h200-gradients-tf32", "h200-train"),
    ("bf16", "fp16"): (
        *("h200-forward-bf16", "h200-forward-fp16"),
        *("h200-gradients-bf16", "h200-train"),
    ),
    ("fp32",): ("h200-forward-fp32", "h200-gradients-fp32"),
}
OTHERS = {mode: (f"h200-others-{mode}",) for mode in ("tf32", "bf16", "fp32")}
CPU = ("cpu-quick",)
TUNED = {"Conv3d": "conv-tuned", "transposed": "transposed-tuned"}
IN_README = "h200-forward-tf32"

SETTINGS = {
    (DEFAULT, "ncdhw"): "default",
    (DEFAULT, "ndhwc"): "default cl",
    ("cudnn_benchmark", "ncdhw"): "bench",
    ("cudnn_channels_last", "ndhwc"): "cl",
    ("flipconv", "ncdhw"): "flip",
    ("flipconv_cl", "ndhwc"): "flip cl",
    ("polyphase", "ncdhw"): "polyphase",
    ("gemm_shuffle", "ncdhw"): "gemm eager",
    ("gemm_shuffle_compiled", "ncdhw"): "gemm",
}
"""Short names of PyTorch's settings; docs/benchmarks.md explains them."""

IN_ONE_FORMAT = {
    (DEFAULT, "ncdhw"): "",
    ("cudnn_benchmark", "ncdhw"): "bench",
    (DEFAULT, "ndhwc"): "",
    ("cudnn_channels_last", "ndhwc"): "bench",
}
"""Those of a Conv3d layer, which is compared in the memory format that it runs in."""

NATIVE = "PyTorch's operator"
MUCH = 2  # times PyTorch's error
NOISE = 0.03  # of its time, between two measurements of one operator
USUAL = r"^conv | (s1|p0|d1|g1)(?=[ ,])"  # what a geometry need not say


class Results:
    """The records of a folder by the names of their files; ``links`` leads there from a page."""

    def __init__(self, folder: Path, links: str) -> None:
        self.folder, self.links = folder, links
        self.values: dict[str, Any] = {
            path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))
        }

    def layers(self, *names: str, same_layout: bool = False) -> list[Line]:
        """The cases of records of layers."""
        return [line for name in names for line in lines(self.record(name), same_layout)]

    def record(self, name: str) -> Record:
        return Record.load(self.folder / f"{name}.json")

    def records(self) -> Iterator[tuple[str, Record]]:
        """Every record of layers, in the order of their names."""
        for name in self.values:
            with suppress(ValueError):
                yield name, self.record(name)

    @property
    def machine(self) -> str:
        """Machine and versions of most records."""
        counts = Counter(_machine(v) for v in self.values.values() if "rows" in v)
        return counts.most_common(1)[0][0]

    def source(self, *names: str, machine: bool = False) -> str:
        """Where figures come from; ``machine`` says whether to name that of most records, too."""
        machines, commits, files = [], [], []
        for name in names:
            values = self.values[name]
            machines.append(_machine(values))
            known = values["environment"]["commit"]
            commits += [str(row.get("commit", known))[:12] for row in values["rows"]]
            plot = self.folder.parent / "figures" / f"{name}.svg"
            of = f" ([plot]({self.links.removesuffix('results')}figures/{plot.name}))"
            file = f"[{name}]({self.links}/{name}.json)"
            files.append(file + (of if plot.exists() else ""))
        commits = list(dict.fromkeys(commits))
        parts = [text for text in dict.fromkeys(machines) if machine or text != self.machine]
        parts.append(f"commit{'s' if len(commits) > 1 else ''} {', '.join(commits)}")
        text = "; ".join(parts)
        return f"{text[0].upper()}{text[1:]}. Raw data: {', '.join(files)}."


def _machine(values: Mapping[str, Any]) -> str:
    return conditions({**values["environment"], "commit": None})


def filled(text: str, blocks: Mapping[str, str]) -> str:
    """A page with each block between its markers.

    Raises:
        ValueError: the page has other markers than there are blocks.
    """
    known = re.findall(r"<!-- (\S+): begin -->\n.*?<!-- \1: end -->", text, re.DOTALL)
    if sorted(known) != sorted(blocks):
        raise ValueError(f"the page has markers of {known}, and there are blocks {[*blocks]}")
    return re.sub(
        r"(<!-- (\S+): begin -->\n).*?(<!-- \2: end -->)",
        lambda found: f"{found[1]}{blocks[found[2]].strip()}\n{found[3]}",
        text,
        flags=re.DOTALL,
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A Markdown table with ``left`` columns of words before those of figures."""
    rule = ["---"] * left + ["--:"] * (len(head) - left)
    return "\n".join(
        [f"| {' | '.join(head)} |", f"|{'|'.join(rule)}|"]
        + [f"| {' | '.join(row)} |" for row in rows]
    )


# --- Layers --------------------------------------------------------------------------------------


def blocks(results: Results) -> dict[str, str]:
    """The blocks of docs/benchmarks.md about single layers."""
    return {
        "machine": f"{results.machine}.",
        "conv": "\n\n".join(
            f"### Conv3d layers in {TYPES[mode]}\n\n{in_one_format(results, mode, names)}"
            for mode, names in CONV.items()
        ),
        "tuned": tuned(results),
        "transposed": "\n\n".join(
            f"### Transposed layers in {' and '.join(TYPES[mode] for mode in modes)}\n\n"
            f"{section(results, modes, names, SETTINGS)}"
            for modes, names in TRANSPOSED.items()
        ),
        "others": others(results),
        "slower": slower(results),
        "cpu": section(results, ["fp32"], CPU),
        "shapes": shapes(results),
    }


Settings = Mapping[tuple[str, str], str]
"""Names of PyTorch's settings by contender and format."""


def section(
    results: Results, modes: Sequence[str], names: Sequence[str], settings: Settings | None = None
) -> str:
    """The table of one type or several, and what is to be said of its records."""
    found = [line for line in results.layers(*names) if line.mode in modes]
    text = [_gaps(results.record(name), mode) for name in names for mode in modes]
    for mode in modes:
        where = f" in {TYPES[mode]}" if len(modes) > 1 else ""
        text.append(_errors([line for line in found if line.mode == mode], where))
    return f"{layer_table(found, settings)}\n\n{_words(*text, results.source(*names))}"


def in_one_format(results: Results, mode: str, names: Sequence[str]) -> str:
    """A table for each memory format, whose speed-ups are over PyTorch in that format."""
    found = [line for line in results.layers(*names, same_layout=True) if line.mode == mode]
    by_format = [
        layer_table([line for line in found if line.layout == layout], IN_ONE_FORMAT, title)
        for layout, title in LAYOUTS.items()
    ]
    text = [_gaps(results.record(name), mode, same_layout=True) for name in names]
    return "\n\n".join([*by_format, _words(*text, _errors(found), results.source(*names))])


def layer_table(
    found: Sequence[Line], settings: Settings | None = None, title: str = "layer"
) -> str:
    """A row a layer; for each operation PyTorch's best setting, then ours in each format."""
    operations: dict[tuple[str, str], dict[str, dict[str, Line]]] = {}
    for line in found:
        layouts = operations.setdefault((line.mode, line.operation), {})
        layouts.setdefault(line.layout, {})[line.shape] = line
    one = len({line.layout for line in found}) == 1
    several = len({line.mode for line in found}) > 1
    head = [title]
    rows = [[shape] for shape in dict.fromkeys(line.shape for line in found)]
    means, over_default = ["geometric mean"], ["over PyTorch as it comes"]
    for (mode, operation), layouts in operations.items():
        head.append(f"{_words(TYPES[mode] if several else '', OPERATIONS[operation])}: PyTorch")
        head += ["convt3d" if one else LAYOUTS[layout] for layout in layouts]
        for row in rows:
            cases = [known.get(row[0]) for known in layouts.values()]
            row += [_best(next(filter(None, cases), None), settings), *map(_ours, cases)]
        means.append("")
        over_default.append("")
        for known in layouts.values():
            fastest = geometric_mean(line.speedup_best for line in known.values())
            share = geometric_mean(line.share for line in known.values())
            means.append(_words(times(fastest), percent(share)))
            over_default.append(times(geometric_mean(line.speedup for line in known.values())))
    others = {line.best_name for line in found} - {DEFAULT, ""}
    return table(head, [*rows, means, over_default] if others else [*rows, means])


def _best(line: Line | None, settings: Settings | None) -> str:
    if line is None or line.best is None:
        return ""
    setting = settings[line.best_name, line.best_layout] if settings else ""
    return _words(milliseconds(line.best, ""), setting)


def _ours(line: Line | None) -> str:
    if line is None:
        return ""
    gain = times(line.speedup_best)
    gain = f"**{gain}**" if is_slower(line) else gain
    return _words(milliseconds(line.ours, ""), gain, percent(line.share))


def is_slower(line: Line) -> bool:
    """Whether PyTorch's best setting is faster, to the two decimals that tables have."""
    return line.speedup_best is not None and round(line.speedup_best, 2) < 1


def is_native(line: Line) -> bool:
    """Whether our layer runs PyTorch's operator."""
    return line.runs_as == NATIVE


def is_noise(line: Line) -> bool:
    """Whether both are PyTorch's operator and take as long, so that only noise is between them."""
    return is_native(line) and bool(line.ours and line.best and line.ours < (1 + NOISE) * line.best)


def _words(*words: str) -> str:
    return " ".join(filter(None, words))


def _gaps(record: Record, mode: str, same_layout: bool = False) -> str:
    """How many cases of a record lack a setting of cuDNN's, or any of their own format's."""
    cases: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for row in record.rows.values():
        if row["mode"] == mode and "ms" in row:
            known = cases.setdefault((row["contender"], row["layout"]), set())
            known.add((row["shape"], row["pass"]))
    lacking = []
    for (name, layout), short in IN_ONE_FORMAT.items():
        formats = [layout] if same_layout else [*LAYOUTS]
        ours = {case for own in formats for case in cases.get((OURS, own), set())}
        missing = ours - cases.get((name, layout), set())
        if missing and (short or same_layout):
            where = f"`{name}`" if short else f"`{name}` in {LAYOUTS[layout]}"
            lacking.append(f"{where} in {len(missing)} of {len(ours)} cases")
    return f"Not measured: {', '.join(lacking)}." if lacking and record.environment["gpu"] else ""


def _errors(found: Sequence[Line], where: str = "") -> str:
    """The largest error, and the cases in which it is much larger than PyTorch's."""
    known = [(line, line.error) for line in found if line.error is not None]
    if not known:
        return f"Errors{where} were not measured in this run."
    text = f"Errors{where} are at most {max(error['relative'] for _, error in known):.1e}"
    above = [
        f"{line.shape} {OPERATIONS[line.operation]} "
        f"({error['relative']:.1e}, PyTorch's {error['pytorch_relative']:.1e})"
        for line, error in known
        if _is_much(error)
    ]
    more = f", more than {MUCH} times PyTorch's in {', '.join(above)}" if above else ""
    return f"{text}{more}."


def _is_much(error: Mapping[str, Any]) -> bool:
    return bool(error["relative"] > MUCH * error["pytorch_relative"])


def tuned(results: Results) -> str:
    """Geometric means of layers that are timed at their first call, and what loses."""
    body: list[list[str]] = []
    words: list[str] = []
    for kind, name in TUNED.items():
        rows = results.values[name]["rows"]
        lines, text = _tuned(kind, rows)
        body += lines
        words += [*text, results.source(name)]
    return f"{table(['type', *OPERATIONS.values()], body)}\n\n{_words(*words)}"


def _tuned(kind: str, rows: Sequence[Mapping[str, Any]]) -> tuple[list[list[str]], list[str]]:
    """Lines and sentences of one record; cells: mean and least gain, mean share of the limit."""
    gains: dict[tuple[str, str], dict[str, list[float]]] = {}
    shares: dict[tuple[str, str], dict[str, list[float]]] = {}
    slower, inexact, judged, unknown = [], [], 0, 0
    for row in rows:
        bench = row["cudnn_benchmark_ms"]
        unknown += bench is None
        gain = min(row["default_ms"], bench or row["default_ms"]) / row["ms"]
        of_type = row["mode"], row["layout"]
        gains.setdefault(of_type, {}).setdefault(row["pass"], []).append(gain)
        if "share" in row:
            shares.setdefault(of_type, {}).setdefault(row["pass"], []).append(row["share"])
        name = f"{row['shape']} {OPERATIONS[row['pass']]} in {_type(*of_type)}"
        if "relative_error" in row:
            judged += 1
            error = {e: row[f"{e}_error"] for e in ("relative", "pytorch_relative")}
            if _is_much(error):
                inexact.append(name)
        if gain < 1 - NOISE:
            slower.append((row.get("runs_as") == NATIVE, f"{name} {times(gain)}"))
    body = []
    for of_type, known in gains.items():
        cells = []
        for operation in OPERATIONS:
            cell = ""
            if operation in known:
                found = known[operation]
                cell = f"{times(geometric_mean(found))}, least {times(min(found))}"
            share = shares.get(of_type, {}).get(operation)
            cells.append(f"{cell}, {percent(sum(share) / len(share))}" if share else cell)
        body.append([f"{kind}, {_type(*of_type)}", *cells])
    left = sum(row.get("runs_as") == NATIVE for row in rows)
    words = [
        f"{kind}: PyTorch's operator is the faster one in {left} of {len(rows)} cases, and runs "
        "there."
    ]
    for native, text in ((True, "Slower although it runs on both sides"), (False, "Slower")):
        names = [name for same, name in slower if same is native]
        words += [f"{text}: {', '.join(names)}."] if names else []
    if unknown:
        words.append(
            f"PyTorch's was not timed with `cudnn.benchmark` in {unknown} of {len(rows)} cases."
        )
    if inexact:
        words.append(
            f"Errors are more than {MUCH} times PyTorch's in {len(inexact)} of {judged} cases "
            f"([numerics](numerics.md)): {', '.join(inexact)}."
        )
    return body, words


def _type(mode: str, layout: str) -> str:
    return f"{TYPES[mode]}, {LAYOUTS[layout]}"


def others(results: Results) -> str:
    """A line for each type of the layers that no plan was fitted to."""
    rows = []
    for mode, names in OTHERS.items():
        found = results.layers(*names)
        worst = min(found, key=lambda line: line.speedup_best or 0)
        above = [e for e in (line.error for line in found) if e and _is_much(e)]
        rows.append(
            [
                TYPES[mode],
                str(len(found)),
                times(geometric_mean(line.speedup for line in found)),
                times(geometric_mean(line.speedup_best for line in found)),
                percent(geometric_mean(line.share for line in found)),
                str(len(above)),
                f"{times(worst.speedup_best)} `{worst.shape}`",
            ]
        )
    head = ["type", "layers", "over PyTorch as it comes", "over its best setting", "of limit"]
    head += [f"errors above {MUCH} times PyTorch's", "worst layer"]
    names = [name for several in OTHERS.values() for name in several]
    source = results.source(*names)
    return f"{table(head, rows)}\n\nForward, NCDHW, geometric means. {source}"


def slower(results: Results) -> str:
    """Every case in which PyTorch's best setting is faster, but for noise of one operator."""
    rows, text, noise = [], [], []
    for kind, records in (
        ("Conv3d", CONV.values()),
        ("transposed", TRANSPOSED.values()),
        ("transposed, other layers", OTHERS.values()),
        ("transposed, CPU", [CPU]),
    ):
        names = dict.fromkeys(itertools.chain.from_iterable(records))
        found = results.layers(*names, same_layout=kind == "Conv3d")
        below = [line for line in found if is_slower(line) and not is_noise(line)]
        text.append(f"{kind} {len(below)} of {len(found)}")
        noise += [line for line in found if is_slower(line) and is_noise(line)]
        for mode, layout in itertools.product(TYPES, LAYOUTS):
            cells: dict[str, list[str]] = {operation: [] for operation in OPERATIONS}
            for line in below:
                if (line.mode, line.layout) == (mode, layout):
                    case = f"{line.shape} {times(line.speedup_best)}"
                    cells[line.operation].append(f"*{case}*" if is_native(line) else case)
            if not any(cells.values()):
                continue
            where = f"{kind}, {TYPES[mode]}, {LAYOUTS[layout]}"
            rows.append([where, *(", ".join(cases) for cases in cells.values())])
    used = [i for i in range(1 + len(OPERATIONS)) if any(row[i] for row in rows)]
    rows = [[row[i] for i in used] for row in rows]
    head = [["layers", *OPERATIONS.values()][i] for i in used]
    more = (
        f"Not listed, as noise of one operator: {len(noise)} cases in which our layer runs "
        f"PyTorch's operator and takes less than {percent(NOISE)} longer."
    )
    return f"{'; '.join(text)}. {more}\n\n{table(head, rows, left=len(head))}"


def shapes(results: Results) -> str:
    """Geometry and input of the named layers, two layers a row."""
    found = results.layers(IN_README, CONV["tf32"][0])
    known = {line.shape: re.sub(USUAL, "", line.problem) for line in found}
    cells = [*known.items(), ("", "")]
    half = len(cells) // 2
    rows = [[*a, *b] for a, b in zip(cells[:half], cells[half:], strict=False)]
    return table(["layer", "geometry, batch and input"] * 2, rows, left=4)


def in_readme(results: Results) -> str:
    """The README's table of single layers."""
    rows = [
        [
            line.shape,
            line.problem,
            milliseconds(line.ours),
            milliseconds(line.default),
            f"**{times(line.speedup)}**",
            f"{line.best_name} {milliseconds(line.best)}",
            times(line.speedup_best),
            percent(line.share),
        ]
        for line in results.layers(IN_README)
    ]
    head = ["layer", "geometry, batch and input", "convt3d", "PyTorch", "speed-up"]
    head += ["best peer", "speed-up", "of limit"]
    (mode,) = {TYPES[line.mode] for line in results.layers(IN_README)}
    mean = geometric_mean(line.speedup for line in results.layers(IN_README))
    text = f"{mode}; geometric mean of the speed-ups {times(mean)}."
    return f"{table(head, rows, left=2)}\n\n{text} {results.source(IN_README, machine=True)}"
