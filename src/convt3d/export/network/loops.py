"""Kernels that compute values: which ones are stored on the way, and the text of the loops.

A value without reductions takes one kernel, a thread a position. Reductions over channels, or over
rows, take one kernel with all that follows, which holds channels or rows in registers. Other
reductions are stored before: by a kernel for chunks of slices, and one for their partial results.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from convt3d.export.formulas import literal
from convt3d.export.layer import ExportError
from convt3d.export.network.code import STATES, Code, Place, declared, indented
from convt3d.export.network.reading import Running
from convt3d.export.network.values import POSITIONS, Reduction, Stored, Value, Window, walk

THREADS = 256  # as loops.cuh has it
_WARPS = THREADS // 32
_ROWS = 4  # of a warp
_EACH = 8  # positions of a thread that loads at once
_PER_CHUNK = 32 * THREADS  # positions that a block reduces
_MOST_HELD = 128  # channels in the registers of a thread
_MOST_WINDOW = 8  # positions of a window that a thread computes for each channel
_FLOATS = {"Sum": 1, "Max": 1, "Min": 1, "LogSumExp": 2, "Moments": 3}


_COMMA = ",\n    "


@dataclass(frozen=True)
class Kernel:
    """One kernel, launched once: its last parameters are what it writes.

    Attributes:
        name: of its entry, without the prefix.
        tensors: what its parameters are, by the names of the launcher.
    """

    name: str
    text: str
    tensors: tuple[str, ...]
    grid: int


@dataclass
class Program:
    """Kernels in order, and how many float32 values each tensor has that they write."""

    kernels: list[Kernel] = field(default_factory=list)
    tensors: dict[str, int] = field(default_factory=dict)
    stored: dict[Value, Stored] = field(default_factory=dict)
    running: Sequence[Running] = ()

    def store(self, value: Value, name: str = "") -> Stored:
        """Add the kernels that write a value to memory, under its name if no other is given.

        Raises:
            ExportError: a reduction over more than a kernel can hold.
        """
        while value not in self.stored and not isinstance(value, Stored):
            found = list(walk(value, self.stored))
            reductions = [v for v in found if isinstance(v, Reduction) and v not in self.stored]
            if not reductions:
                self._map(value, name)
            elif _held_together(value, reductions, self.stored):
                windows = (v for v in found if isinstance(v, Window))
                wide = [v for v in windows if volume(v, self.stored) > _MOST_WINDOW]
                if wide:
                    self.store(wide[0])
                else:
                    self._hold([value], reductions, name)
            else:
                first = next(
                    r
                    for r in reductions
                    if not any(isinstance(v, Reduction) for v in _unstored(r.argument, self.stored))
                )
                same = [r for r in reductions if r.argument is first.argument]
                if first.axes in ("c", "w"):
                    together = [r for r in same if r.axes == first.axes]
                    self._hold(together, together)
                else:
                    states = _states(same)
                    self._reduce([r for r in same if states[r] == states[first]], states[first])
        return self.stored.get(value, value)  # type: ignore[arg-type]

    def _keep(self, value: Value, name: str = "") -> str:
        """The tensor of a value that is to be stored."""
        name = name or value.name
        while name in self.tensors:
            name += "_"
        kept = Stored(name, value.size)
        self.stored[value] = kept
        self.tensors[kept.name] = math.prod(value.size)
        if math.prod(value.size) >= 2**31:
            raise ExportError(f"{value.name} has more than 2^31 values")
        return kept.name

    def _add(self, label: str, code: Code, out: Sequence[str], grid: int, body: str) -> None:
        """A kernel that reads what ``code`` does and writes ``out``, declarations by tensors."""
        name = f"stage{len(self.kernels)}_{label}"
        ins = [tensor for tensor in code.tensors if tensor not in out]
        parameters = [f"const float* __restrict__ {tensor}" for tensor in ins]
        counters = {one.buffers[-1] for one in self.running}
        for tensor in out:
            kind = "long long" if tensor in counters else "float"
            parameters.append(f"{kind}* __restrict__ {tensor if len(out) > 1 else 'out'}")
        text = (
            f'extern "C" __global__ void __launch_bounds__(convt3d::threads)\n'
            f"convt3d_{name}(\n    {_COMMA.join(parameters)}) {{\n{body}}}\n"
        )
        self.kernels.append(Kernel(name, text, (*ins, *out), grid))

    # --- One value a thread ----------------------------------------------------------------------

    def _map(self, value: Value, name: str) -> None:
        positions = value.extent(POSITIONS)
        each = max(1, min(_EACH // volume(value, self.stored), positions // THREADS))
        chunks = -(-positions // (each * THREADS))
        code = Code(_place(value), self.stored)
        code.lines.append(f"return {code.use(value)};")
        body = indented([*declared(_position(value), code.lines), *code.lines])
        lines = [
            f"map<{positions}, {each}>(chunk, out + slice * {positions}, [&](int p) {{",
            *body.splitlines(),
            "});",
        ]
        slices = value.extent("nc")
        lines = [*declared(_slices(value, chunks), lines), *lines]
        self._add(value.name, code, [self._keep(value, name)], slices * chunks, indented(lines))

    # --- Channels or rows in registers -----------------------------------------------------------

    def _hold(
        self, values: Sequence[Value], reductions: Sequence[Reduction], name: str = ""
    ) -> None:
        """Values of one size, and the reductions in them."""
        value = values[0]
        axis, like = reductions[0].axes, reductions[0].argument
        extent = like.extent(axis)
        if extent > _MOST_HELD * (1 if axis == "c" else 32):
            raise ExportError(f"{reductions[0].name}: no kernel holds {extent} values of one axis")
        loop = _Channels(like) if axis == "c" else _Rows(like)
        top = Code(_place(like), self.stored)
        states: dict[tuple[Value, str], str] = {}
        held: dict[Value, str] = {}
        kinds = _states(reductions)
        for reduction in reversed(reductions):
            argument, state = reduction.argument, kinds[reduction]
            if argument not in held:
                inner = top.inside(loop.place, loop.above)
                inner.known.update(held)
                inner.lines.append(f"held_{argument.name}{loop.held} = {inner.use(argument)};")
                top.lines += [f"float held_{argument.name}{loop.shape};", *loop.over(inner.lines)]
                held[argument] = f"held_{argument.name}{loop.held}"
            if (argument, state) not in states:
                states[argument, state] = f"{state.lower()}_{argument.name}"
                top.lines += loop.state(state, states[argument, state], f"held_{argument.name}")
            text = _result(reduction, state, f"{states[argument, state]}{loop.row}")
            top.known[reduction] = f"({text})"
        last = top
        if value.extent(axis) > 1 or axis == "w":
            last = top.inside(loop.place, loop.above)
            last.known.update(held)
        results = [last.use(one) for one in values]
        outs = [self._keep(one, name) for one in values]
        for result, tensor in zip(results, outs, strict=True):
            out = tensor if len(outs) > 1 else "out"
            last.lines.append(f"{out}[{loop.offset(value)}] = {result};")
        if last is not top:
            top.lines += loop.over(last.lines, value.extent(axis) == 1)
        body = indented([*declared(loop.definitions, [*loop.first, *top.lines]), *loop.first])
        self._add(value.name, top, outs, loop.grid, body + indented(top.lines))

    # --- Slices by chunks ------------------------------------------------------------------------

    def _reduce(self, reductions: Sequence[Reduction], state: str) -> None:
        """Reductions of one value over all positions, by one state."""
        value = reductions[0].argument
        positions, slices = value.extent(POSITIONS), value.extent("nc")
        chunks = -(-positions // _PER_CHUNK)
        code = Code(_place(value), self.stored)
        code.lines.append(f"return {code.use(value)};")
        body = indented([*declared(_position(value), code.lines), *code.lines])
        batch = max(1, _EACH // volume(value, self.stored))
        lines = [
            f"const auto state = reduce<convt3d::{state}, {positions}, {_PER_CHUNK}, {batch}>("
            "chunk, [&](int p) {",
            *body.splitlines(),
            "});",
            f"if (threadIdx.x == 0) reinterpret_cast<convt3d::{state}*>(out)[blockIdx.x] = state;",
        ]
        lines = [*declared(_slices(value, chunks), lines), *lines]
        partial = f"partial_{value.name}"
        self.tensors[partial] = slices * chunks * _FLOATS[state]
        self._add(partial, code, [partial], slices * chunks, indented(lines))
        for size in dict.fromkeys((r.size, r.axes) for r in reductions):
            same = [r for r in reductions if (r.size, r.axes) == size]
            self._combine(same, state, partial, chunks)

    def _combine(
        self, reductions: Sequence[Reduction], state: str, partial: str, chunks: int
    ) -> None:
        """The same reduction's results of partial states, a block for each."""
        first = reductions[0]
        channels = first.argument.size[1]
        results = first.extent("nc")
        count = first.argument.extent("nc") // results
        if "n" in first.axes and "c" not in first.axes:
            slices = f"(i / {chunks} * {channels} + blockIdx.x)"
        else:
            slices = f"(blockIdx.x * {count} + i / {chunks})"
        running = [r for r in self.running if r.mean in reductions or r.deviation in reductions]
        lines = [
            f"const auto states = reinterpret_cast<const convt3d::{state}*>({partial});",
            f"const auto state = combine<convt3d::{state}>({count * chunks}, [&](int i) {{",
            f"  return states[{slices} * {chunks} + i % {chunks}];",
            "});",
            "if (threadIdx.x != 0) return;",
        ]
        outs = []
        for reduction in reductions:
            outs.append(self._keep(reduction))
            out = "out" if len(reductions) == 1 and not running else outs[-1]
            lines.append(f"{out}[blockIdx.x] = {_result(reduction, state, 'state')};")
        for one in running:
            mean, variance, counter = one.buffers
            outs += one.buffers
            new, old = literal(one.momentum), literal(1 - one.momentum)
            lines += [
                f"{mean}[blockIdx.x] = {old} * {mean}[blockIdx.x] + {new} * state.value;",
                f"{variance}[blockIdx.x] = {old} * {variance}[blockIdx.x] +",
                f"    {new} * (state.squares / {literal(one.count - 1)});",
                f"if (blockIdx.x == 0) *{counter} += 1;",
            ]
        code = Code(_place(first), self.stored, tensors={partial: None})
        self._add(first.name, code, outs, results, indented(lines))


def volume(value: Value, stored: dict[Value, Stored]) -> int:
    """Positions that are computed for one of a value, window in window."""
    if value in stored:
        return 1
    inner = max((volume(part, stored) for part in value.parts), default=1)
    return inner * math.prod(value.window) if isinstance(value, Window) else inner


def _unstored(value: Value, stored: dict[Value, Stored]) -> Iterable[Value]:
    return (v for v in walk(value, stored) if v not in stored)


def _held_together(
    value: Value, reductions: Sequence[Reduction], stored: dict[Value, Stored]
) -> bool:
    """Whether one kernel computes reductions over channels, or rows, and the value from them."""
    axes = {r.axes for r in reductions}
    if len(axes) > 1 or not axes <= {"c", "w"}:
        return False
    sizes = {r.argument.size for r in reductions}
    (axis,) = axes
    others = [a for a in "ncdhw" if a != axis]
    like = reductions[0].argument
    windows = (v for v in _unstored(value, stored) if isinstance(v, Window))
    return (
        len(sizes) == 1
        and all(value.extent(a) == like.extent(a) for a in others)
        and value.extent(axis) in (1, like.extent(axis))
        and not any(r in set(walk(v, stored)) for v in windows for r in reductions)
    )


def _states(reductions: Sequence[Reduction]) -> dict[Reduction, str]:
    """The state of each reduction: a mean beside a deviation of the same value shares its state."""
    deviating = {r.argument for r in reductions if r.kind == "rstd"}
    return {
        r: "Moments" if r.kind in ("mean", "rstd") and r.argument in deviating else STATES[r.kind]
        for r in reductions
    }


def _result(reduction: Reduction, state: str, name: str) -> str:
    """A reduction's value, from a state of this name."""
    if reduction.kind == "rstd":
        return f"{name}.reciprocal_deviation({literal(reduction.eps)})"
    if reduction.kind == "mean" and state == "Sum":
        count = math.prod(reduction.argument.size) // math.prod(reduction.size)
        return f"{name}.value * {literal(1 / count)}"
    return f"{name}.result()" if reduction.kind == "logsumexp" else f"{name}.value"


def _position(value: Value) -> dict[str, str]:
    """D, H and W of the position p."""
    _, _, _, h, w = value.size
    return {"d": f"p / {h * w}", "h": f"p / {w} % {h}", "w": f"p % {w}"}


def _place(value: Value) -> Place:
    _, c, d, h, w = value.size
    return Place({axis: axis for axis in "ncdhw"}, (d, h, w), c)


def _slices(value: Value, chunks: int) -> dict[str, str]:
    """Sample and channel of a block, and which chunk of that slice."""
    c = value.size[1]
    return {
        "slice": f"blockIdx.x / {chunks}",
        "chunk": f"blockIdx.x % {chunks}",
        "n": f"slice / {c}",
        "c": f"slice % {c}",
    }


class _Channels:
    """A thread for each position, which holds all channels."""

    row, held, above = "", "[c]", "c"

    def __init__(self, value: Value) -> None:
        self.channels, self.positions = value.size[1], value.extent(POSITIONS)
        self.shape = f"[{self.channels}]"
        self.place = _place(value)
        chunks = -(-self.positions // THREADS)
        self.grid = value.size[0] * chunks
        at = f"blockIdx.x % {chunks} * convt3d::threads + threadIdx.x"
        self.definitions = {"n": f"blockIdx.x / {chunks}", "p": at, **_position(value)}
        self.first = [f"if (p >= {self.positions}) return;"]

    def over(self, lines: Sequence[str], once: bool = False) -> list[str]:
        head = f"for (int c = 0; c < {self.channels}; ++c) {{"
        return ["#pragma unroll", head, *indented(lines).splitlines(), "}"]

    def state(self, state: str, name: str, held: str) -> list[str]:
        return [f"const auto {name} = convt3d::{state}::of({held}, {self.channels});"]

    def offset(self, value: Value) -> str:
        slices = f"n * {self.channels} + c" if value.size[1] > 1 else "n"
        return f"({slices}) * {self.positions} + p"


class _Rows:
    """A warp for each few rows, whose lanes hold every 32nd value."""

    row, held, above = "[r]", "[r][i]", ""

    def __init__(self, value: Value) -> None:
        *_, d, h, w = value.size
        self.rows, self.width = d * h, w
        self.lanes = -(-w // 32)
        self.shape = f"[{_ROWS}][{self.lanes}]"
        self.place = _place(value)
        chunks = -(-self.rows // (_WARPS * _ROWS))
        self.grid = value.extent("nc") * chunks
        first = f"(blockIdx.x % {chunks} * {_WARPS} + threadIdx.x / 32) * {_ROWS}"
        self.definitions = {
            **_slices(value, chunks),
            "lane": "threadIdx.x % 32",
            "first": first,
        }
        self.inner = {
            "row": "first + r",
            "d": f"row / {h}",
            "h": f"row % {h}",
            "w": "lane + 32 * i",
            "p": f"row * {w} + w",
        }
        self.first: list[str] = []
        self.all = self.rows % (_WARPS * _ROWS) == 0 and w % 32 == 0

    def over(self, lines: Sequence[str], once: bool = False) -> list[str]:
        guard = [] if self.all else [f"if (row >= {self.rows} || w >= {self.width}) continue;"]
        guard += ["if (w > 0) continue;"] if once else []
        body = [*declared(self.inner, [*guard, *lines]), *guard, *lines]
        return [
            "#pragma unroll",
            f"for (int r = 0; r < {_ROWS}; ++r) {{",
            "#pragma unroll",
            f"  for (int i = 0; i < {self.lanes}; ++i) {{",
            *(f"    {line}" for line in body),
            "  }",
            "}",
        ]

    def state(self, state: str, name: str, held: str) -> list[str]:
        count = f"({self.width + 31} - lane) / 32" if self.width % 32 else str(self.lanes)
        of = f"across_lanes(convt3d::{state}::of({held}[r], {count}))"
        return [
            f"convt3d::{state} {name}[{_ROWS}];",
            "#pragma unroll",
            f"for (int r = 0; r < {_ROWS}; ++r) {name}[r] = {of};",
        ]

    def offset(self, value: Value) -> str:
        return (
            f"slice * {self.rows * self.width} + p"
            if value.size[4] > 1
            else (f"slice * {self.rows} + row")
        )
