"""Registers of warpgroup products in flight, followed through machine code (``nvdisasm -c``).

A product with operand A in registers (HGMMA ..., R120, gdesc[...]) reads R120 to R123 when the
tensor core gets to it, which may be long after it was issued. Until a WARPGROUP.DEPBAR covers its
group, nothing else may write them. ptxas has to see to that, and across the end of a loop some
versions (CUDA 13.0) do not. The check follows groups in flight along every path to a fixpoint;
where paths meet, a group is as young as on any of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_INSTRUCTION = re.compile(
    r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;"
)
_LABEL = re.compile(r"^(\.L_\w+):")
_REGISTER = re.compile(r"^R(\d+)")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_OPERAND = 4  # registers of an A fragment
_MOST = 8  # groups that are told apart by age
# Instructions whose first register is read, or that have none.
_WRITES_NONE = (
    "ACQBULK", "BAR", "BPT", "BRA", "BSSY", "BSYNC", "CALL", "CCTL", "DEPBAR", "ERRBAR", "EXIT",
    "FENCE", "FSETP", "ISETP", "LDGDEPBAR", "LDGSTS", "MEMBAR", "NOP", "PLOP3", "PREEXIT", "RED",
    "RET", "ST", "STG", "STL", "STS", "STSM", "SYNCS.ARRIVE", "USETMAXREG", "WARPGROUP", "WARPSYNC",
)  # fmt: skip


@dataclass(frozen=True)
class Instruction:
    address: str
    guard: str | None
    operation: str
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.address}: {self.operation} {', '.join(self.arguments)}"


Line = Instruction | str  # or a label
State = tuple[tuple[frozenset[int], ...], frozenset[int]]
"""Registers of the groups in flight, the newest last, and of products that no group has yet."""


def functions(listing: str) -> Iterator[tuple[str, list[Line]]]:
    """Each function of a listing with its instructions and labels."""
    name, body = "", list[Line]()
    for line in listing.splitlines():
        if line.startswith(".text."):
            if body:
                yield name, body
            name, body = line.rstrip(":").removeprefix(".text."), []
        elif name:
            if label := _LABEL.match(line):
                body.append(label.group(1))
            elif found := _INSTRUCTION.match(line):
                address, guard, operation, text = found.groups()
                arguments = tuple(part.strip() for part in text.split(",")) if text else ()
                body.append(Instruction(address, guard, operation, arguments))
    if body:
        yield name, body


def hazards(body: list[Line]) -> list[str]:
    """Instructions that write a register which a product in flight may still read."""
    starts, follows = _blocks(body)
    states: dict[int, State] = {0: ((), frozenset())}
    found: dict[str, None] = {}
    work = [0]
    while work:
        start = work.pop()
        after = _run(body[start : starts[start]], states[start], found)
        for successor in follows[start]:
            merged = _merge(states.get(successor), after)
            if merged != states.get(successor):
                states[successor] = merged
                work.append(successor)
    return sorted(found)


def _blocks(body: list[Line]) -> tuple[dict[int, int], dict[int, list[int]]]:
    """Ends and successors of basic blocks by their starts."""
    places = {line: i for i, line in enumerate(body) if isinstance(line, str)}
    cuts = {0, *places.values()}
    for i, line in enumerate(body):
        if isinstance(line, Instruction) and line.operation.startswith(("BRA", "EXIT", "RET")):
            cuts.add(i + 1)
    ordered = sorted(cut for cut in cuts if cut < len(body))
    ends = dict(zip(ordered, [*ordered[1:], len(body)], strict=True))
    follows: dict[int, list[int]] = {}
    for start, end in ends.items():
        last = body[end - 1]
        successors = [end]
        if isinstance(last, Instruction) and last.operation.startswith(("BRA", "EXIT", "RET")):
            text = ", ".join(last.arguments)
            conditional = last.guard is not None or bool(re.match(r"^!?U?P|.*DIV", text))
            successors = [end] if conditional else []
            if target := _TARGET.search(text):
                successors.append(places[target.group(1)])
        follows[start] = [s for s in successors if s < len(body)]
    return ends, follows


def _run(block: list[Line], state: State, found: dict[str, None]) -> State:
    groups, loose = list(state[0]), state[1]
    for line in block:
        if isinstance(line, str):
            continue
        if line.operation.startswith("HGMMA"):
            loose |= _registers(line.arguments[1], _OPERAND)
            if "gsb0" in line.arguments:
                groups, loose = [*groups, loose][-_MOST:], frozenset()
        elif line.operation.startswith("WARPGROUP.DEPBAR"):
            left = int(line.arguments[1], 16)
            groups = groups[-left:] if left else []
        elif _written(line) & loose.union(*groups):
            found[str(line)] = None
    return tuple(groups), loose


def _merge(one: State | None, other: State) -> State:
    if one is None:
        return other
    length = max(len(one[0]), len(other[0]))
    padded = [(*[frozenset[int]()] * (length - len(s[0])), *s[0]) for s in (one, other)]
    return tuple(a | b for a, b in zip(*padded, strict=True)), one[1] | other[1]


def _registers(argument: str, count: int) -> frozenset[int]:
    match = _REGISTER.match(argument)
    return frozenset(range(int(match.group(1)), int(match.group(1)) + count) if match else ())


def _written(line: Instruction) -> frozenset[int]:
    """Registers that an instruction other than a product writes."""
    operation = line.operation
    if operation.startswith(("UTMA", "UBLKCP")) or any(
        operation == name or operation.startswith(f"{name}.") for name in _WRITES_NONE
    ):
        return frozenset()
    count = 4 if ".128" in operation else 2 if ".64" in operation or ".WIDE" in operation else 1
    if operation.startswith("LDSM"):
        count = 4 if ".4" in operation else 2 if ".2" in operation else 1
    first = [a for a in line.arguments[:2] if not re.match(r"^!?U?PT?\d*$", a)]
    return _registers(first[0], count) if first else frozenset()
