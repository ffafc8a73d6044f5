"""Registers that asynchronous warpgroup products still use, followed through a kernel's PTX.

``wgmma.mma_async`` reads its A operands, where they are registers, and its accumulators at any
time until a ``wgmma.wait_group`` covers its group. The PTX manual leaves undefined what a kernel
does that touches them before. C++ does not show it: a fragment may be a copy of words in the
source, and the words' own registers in the PTX.

:func:`hazards` reads the PTX of a kernel as a control-flow graph and follows, along all paths,
which registers products in flight use. A register has an age: 0 while its product is not
committed, then the number of groups committed since, its own among them. ``wait_group N`` retires
ages above N. Where paths meet, the youngest age counts. It reports

* ``operand``: an instruction writes a register that a product in flight reads as A;
* ``accumulator``: an instruction reads or writes an accumulator in flight, other than a product
  with the same accumulators, in the same order and shape.

Where the compiler keeps sums in local memory (in some kernels of ndhwc/kernel.cu), it may store
them, or copies of them, before the wait and once more behind it, where nothing loads them between.
Early stores and copies of registers that are stored again are no report.

Every path of the graph counts, whether a call can take it or not, and a guarded instruction both
happens and does not. A kernel without a report therefore has no hazard in this PTX. Another NVRTC
may write other PTX. ptxas, which is not checked, may add and remove copies, but has to keep what
defined PTX means. Neither memory nor ``wgmma.fence`` is followed: buffers of shared memory and
fences in the source are the emulator's to check, and moves of zeros behind a fence are ptxas's to
order.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from convt3d.cuda import compiler

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_FUNCTION = re.compile(r"\.(?:entry|func)\b[^;{]*?([\w$]+)\s*\([^)]*\)[^;{]*\{")
_LABEL = re.compile(r"([A-Za-z_$][\w$]*)\s*:(?!:)")
_GUARD = re.compile(r"@!?([%\w$]+)\s+")
_NAME = re.compile(r"%?[A-Za-z_$][\w$]*")
_DECLARED = re.compile(r"([%A-Za-z_$][\w$]*)(?:<(\d+)>)?")
#: Instructions whose first operand is no destination.
_NO_DESTINATION = (
    "bar",
    "barrier",
    "bra",
    "brx",
    "call",
    "cp",
    "discard",
    "exit",
    "fence",
    "griddepcontrol",
    "membar",
    "nanosleep",
    "prefetch",
    "prefetchu",
    "red",
    "ret",
    "setmaxnreg",
    "st",
    "stmatrix",
    "trap",
    "wgmma",
)


def compile_ptx(spec: compiler.KernelSpec, text: str | None = None, target: str = "90a") -> str:
    """A kernel's PTX, of its flattened text or another. Needs NVRTC, neither GPU nor driver."""
    from cuda.bindings import nvrtc

    source = compiler.flatten(spec.file) if text is None else text
    options = list(compiler._options(spec, f"compute_{target}").as_bytes("nvrtc"))
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), spec.file.encode(), 0, None, None)
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        succeeded = status == nvrtc.nvrtcResult.NVRTC_SUCCESS
        size, get = (
            (nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
            if succeeded
            else (nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
        )
        buffer = b" " * size(program)[1]
        get(program, buffer)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    found = buffer.decode().rstrip("\0")
    if not succeeded:
        raise RuntimeError(f"compiling {spec.file} failed: {found}")
    return found


@dataclass(frozen=True)
class Instruction:
    """One instruction; registers of inner scopes have the scope's number behind their name."""

    text: str
    opcode: str
    guarded: bool
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    targets: tuple[str, ...] = ()  # labels that it may go to
    operand: tuple[str, ...] = ()  # of a product: A's registers
    accumulators: tuple[str, ...] = ()  # of a product

    @property
    def falls_through(self) -> bool:
        ends = self.opcode.split(".")[0] in ("bra", "brx", "ret", "exit", "trap")
        return self.guarded or not ends

    @property
    def product(self) -> bool:
        return self.opcode.startswith("wgmma.mma_async")

    @property
    def pending(self) -> int:
        """Of a ``wgmma.wait_group``: how many groups may stay in flight."""
        return int(self.text.split()[-1], 0)


@dataclass(frozen=True)
class Hazard:
    """An instruction that touches a register of a product in flight."""

    kind: str  # operand or accumulator
    instruction: str
    registers: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind}: {', '.join(self.registers)} in {self.instruction}"


@dataclass
class _Scope:
    number: int
    parent: _Scope | None
    registers: set[str] = field(default_factory=set)
    families: dict[str, int] = field(default_factory=dict)  # %r<100>
    labels: set[str] = field(default_factory=set)

    def has_register(self, name: str) -> bool:
        if name in self.registers:
            return True
        stem = name.rstrip("0123456789")
        return stem in self.families and stem != name

    def resolve(self, name: str) -> str | None:
        """The register's name in the whole function; None where it is no register."""
        scope: _Scope | None = self
        while scope is not None:
            if scope.has_register(name):
                return f"{name}@{scope.number}" if scope.number else name
            scope = scope.parent
        return None

    def label(self, name: str) -> str:
        scope: _Scope | None = self
        while scope is not None and name not in scope.labels:
            scope = scope.parent
        return f"{name}@{scope.number if scope else 0}"


def _operands(text: str) -> list[str]:
    """Split at commas outside of brackets."""
    found, depth, begin = [], 0, 0
    for at, letter in enumerate(text):
        if letter in "{[(":
            depth += 1
        elif letter in "}])":
            depth -= 1
        elif letter == "," and depth == 0:
            found.append(text[begin:at].strip())
            begin = at + 1
    last = text[begin:].strip()
    return [*found, last] if last else found


def _statements(body: str) -> Iterator[tuple[str, str, _Scope]]:
    """Labels and statements of a function in order, each with its scope."""
    scope, scopes, at = _Scope(0, None), 1, 0
    while at < len(body):
        letter = body[at]
        if letter.isspace() or letter == ";":
            at += 1
        elif letter == "{":
            scope = _Scope(scopes, scope)
            scopes += 1
            at += 1
        elif letter == "}":
            assert scope.parent is not None, "an opening brace for each closing one"
            scope = scope.parent
            at += 1
        elif label := _LABEL.match(body, at):
            scope.labels.add(label.group(1))
            yield "label", label.group(1), scope
            at = label.end()
        else:
            end = body.index(";", at)
            yield "statement", " ".join(body[at:end].split()), scope
            at = end + 1


def _declare(statement: str, scope: _Scope) -> None:
    for name in statement.split(None, 2)[2].split(","):
        match = _DECLARED.fullmatch(name.strip())
        assert match, statement
        if match.group(2):
            scope.families[match.group(1)] = int(match.group(2))
        else:
            scope.registers.add(match.group(1))


def _instruction(statement: str, scope: _Scope, tables: Mapping[str, Sequence[str]]) -> Instruction:
    guard = _GUARD.match(statement)
    rest = statement[guard.end() :] if guard else statement
    opcode, _, text = rest.partition(" ")
    operands = _operands(text)

    def registers(parts: Iterable[str]) -> tuple[str, ...]:
        names = (name for part in parts for name in _NAME.findall(part))
        return tuple(found for name in names if (found := scope.resolve(name)))

    guards = registers([guard.group(1)]) if guard else ()
    family = opcode.split(".")[0]
    if opcode.startswith("wgmma.mma_async"):
        accumulators = registers(operands[:1])
        operand = registers(operands[1:2]) if operands[1].startswith("{") else ()
        reads = registers(operands[1:]) + guards
        return Instruction(statement, opcode, bool(guard), reads, (), (), operand, accumulators)
    if family in ("bra", "brx"):
        named = operands[-1]
        labels = tables[named] if family == "brx" else [named]
        targets = tuple(scope.label(label) for label in labels)
        return Instruction(
            statement, opcode, bool(guard), registers(operands[:-1]) + guards, (), targets
        )
    has = bool(operands) and family not in _NO_DESTINATION and not operands[0].startswith("[")
    return Instruction(
        statement,
        opcode,
        bool(guard),
        registers(operands[has:]) + guards,
        registers(operands[:1]) if has else (),
    )


@dataclass
class Function:
    """A function's instructions, and where labels are among them."""

    name: str
    instructions: list[Instruction]
    labels: dict[str, int]

    def blocks(self) -> list[tuple[range, list[int]]]:
        """Basic blocks: their instructions, and the blocks that may follow."""
        code = self.instructions
        leaders = {0, *self.labels.values()}
        leaders |= {i + 1 for i, it in enumerate(code) if it.targets or not it.falls_through}
        begins = sorted(i for i in leaders if i < len(code))
        number = {begin: n for n, begin in enumerate(begins)}
        found = []
        for begin, end in zip(begins, [*begins[1:], len(code)], strict=True):
            last = code[end - 1]
            after = [self.labels[label] for label in last.targets]
            after += [end] if last.falls_through else []
            found.append((range(begin, end), [number[i] for i in after if i < len(code)]))
        return found


def functions(ptx: str) -> list[Function]:
    """All functions with a body."""
    text = _COMMENT.sub("", ptx)
    found = []
    for match in _FUNCTION.finditer(text):
        depth, end = 1, match.end()
        while depth:
            end += 1
            depth += {"{": 1, "}": -1}.get(text[end - 1], 0)
        found.append(_function(match.group(1), text[match.end() : end - 1]))
    return found


def _function(name: str, body: str) -> Function:
    labels: dict[str, int] = {}
    tables: dict[str, list[str]] = {}
    kept: list[tuple[str, _Scope]] = []
    last = ""
    for kind, text, scope in _statements(body):
        if kind == "label":
            labels[f"{text}@{scope.number}"] = len(kept)
            last = text
        elif text.startswith(".reg"):
            _declare(text, scope)
        elif text.startswith(".branchtargets"):
            tables[last] = [label.strip() for label in text.split(None, 1)[1].split(",")]
        elif not text.startswith("."):
            kept.append((text, scope))
    return Function(name, [_instruction(text, scope, tables) for text, scope in kept], labels)


@dataclass(frozen=True)
class _Step:
    """What an instruction does to a state of :class:`_Flow`."""

    kind: str  # product, commit, wait or other
    touched: int = 0  # must not be in flight
    puts: int = 0  # of a product: is in flight from here on
    number: int = 0  # of a wait: groups that stay in flight


class _Flow:
    """What products in flight use, before and behind each instruction, as sets of bits.

    Entry ``a`` of a state has what is in flight with ages up to ``a``, so that paths meet by
    "or": bits of operand registers, above them those of lists of accumulators.
    """

    def __init__(self, function: Function) -> None:
        self.function = function
        code = function.instructions
        self.registers: dict[str, int] = {}
        self.lists: dict[tuple[str, ...], int] = {}
        for it in code:
            if it.product:
                for name in (*it.operand, *it.accumulators):
                    self.registers.setdefault(name, len(self.registers))
                self.lists.setdefault((it.opcode, *it.accumulators), len(self.lists))
        self.first_list = len(self.registers)
        waits = [it.pending for it in code if it.opcode.startswith("wgmma.wait_group")]
        self.ages = max(waits, default=0) + 2
        # Lists of accumulators that a register is in.
        self.lists_of: dict[str, int] = {}
        for (_, *names), n in self.lists.items():
            for name in names:
                bit = 1 << (self.first_list + n)
                self.lists_of[name] = self.lists_of.get(name, 0) | bit
        self.steps = [self._step(it) for it in code]

    def bits(self, names: Iterable[str]) -> int:
        return sum({1 << self.registers[name] for name in names if name in self.registers})

    def in_lists(self, names: Iterable[str]) -> int:
        found = 0
        for name in names:
            found |= self.lists_of.get(name, 0)
        return found

    def _step(self, it: Instruction) -> _Step | None:
        """What an instruction does to a state; None: nothing."""
        if it.product:
            own = 1 << (self.first_list + self.lists[(it.opcode, *it.accumulators)])
            touched = self.in_lists((*it.accumulators, *it.reads)) & ~own
            return _Step(
                "product", touched | self.bits(it.accumulators), self.bits(it.operand) | own
            )
        if it.opcode.startswith("wgmma.commit_group"):
            return _Step("commit")
        if it.opcode.startswith("wgmma.wait_group"):
            return _Step("wait", number=it.pending)
        touched = self.bits(it.writes) | self.in_lists((*it.reads, *it.writes))
        return _Step("other", touched) if touched else None

    def behind(self, state: tuple[int, ...], i: int) -> tuple[int, ...]:
        step = self.steps[i]
        if step is None:
            return state
        if step.kind == "product":
            new = tuple(ages | step.puts for ages in state)
        elif step.kind == "commit":
            # The eldest stay the eldest.
            new = (0, *state[:-2], state[-1])
        elif step.kind == "wait":
            n = step.number + 1
            new = (*state[:n], *[state[n - 1]] * (len(state) - n))
        else:
            return state
        guarded = self.function.instructions[i].guarded
        return tuple(map(int.__or__, state, new)) if guarded else new

    def states(self) -> list[tuple[int, ...] | None]:
        """Of each basic block at its beginning; None where nothing leads to it."""
        blocks = self.function.blocks()
        found: list[tuple[int, ...] | None] = [None] * len(blocks)
        if not blocks:
            return found
        found[0] = (0,) * self.ages
        todo = [0]
        while todo:
            n = todo.pop()
            state = found[n]
            assert state is not None
            for i in blocks[n][0]:
                state = self.behind(state, i)
            for after in blocks[n][1]:
                old = found[after]
                new = state if old is None else tuple(map(int.__or__, old, state))
                if new != old:
                    found[after] = new
                    todo.append(after)
        return found

    def names(self, bits: int) -> tuple[str, ...]:
        return tuple(name for name, n in self.registers.items() if bits >> n & 1)

    def hazards(self) -> Iterator[Hazard]:
        operands = (1 << self.first_list) - 1
        early: list[Hazard] = []
        late: set[str] = set()
        for (places, _), state in zip(self.function.blocks(), self.states(), strict=True):
            if state is None:
                continue
            for i in places:
                step, it = self.steps[i], self.function.instructions[i]
                if step is not None:
                    found = state[-1] & step.touched
                    if found & operands:
                        yield Hazard("operand", it.text, self.names(found & operands))
                    if found & ~operands:
                        touches = (*it.reads, *it.writes, *it.accumulators)
                        names = [name for name in touches if self.in_lists([name]) & found]
                        hazard = Hazard("accumulator", it.text, tuple(dict.fromkeys(names)))
                        if it.opcode.startswith(("st.local", "mov")) and not self.in_lists(
                            it.writes
                        ):
                            early.append(hazard)
                        else:
                            yield hazard
                    elif it.opcode.startswith("st.local"):
                        late.update(it.reads)
                state = self.behind(state, i)
        yield from (hazard for hazard in early if not late.issuperset(hazard.registers))


def hazards(ptx: str) -> list[Hazard]:
    """All that is found in the PTX of a file, see above."""
    return [hazard for function in functions(ptx) for hazard in _Flow(function).hazards()]


@functools.cache
def hazards_of(spec: compiler.KernelSpec) -> tuple[Hazard, ...]:
    """The same of a kernel, once per process."""
    return tuple(hazards(compile_ptx(spec)))
