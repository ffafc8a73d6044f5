"""Mutations of kernels and planners: small changes of a source text that its tests should notice.

A mutation replaces one place of a file: an operator, a bound, a constant, or a barrier, wait or
fence that it drops. Places are found by the text alone. In CUDA C++, comments, strings,
preprocessor lines, ``static_assert`` and template headers are left out; binary operators have
blanks around them there, as template brackets, pointers and references have not. In Python, only
the bodies of functions that mirror a kernel's layout count: a cost model or a ranking chooses among
plans that are all right.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import io
import itertools
import random
import re
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

KINDS = ("operator", "bound", "constant", "barrier")

_ARITHMETIC = {"+": "-", "-": "+", "*": "+", "/": "*", "//": "*", "%": "/", "<<": ">>", ">>": "<<"}
_ARITHMETIC |= {"&&": "||", "||": "&&", "and": "or", "or": "and", "==": "!=", "!=": "=="}
_ARITHMETIC |= {"+=": "-=", "-=": "+=", "&": "|", "|": "&", "^": "|"}
_BOUNDS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "min": "max", "max": "min"}

# Longest first: a pattern takes the first alternative that fits.
_CUDA_OPERATOR = re.compile(r"(?<=\s)(&&|\|\||<<|>>|==|!=|<=|>=|\+=|-=|[-+*/%<>&|^])(?=\s)")
_CUDA_MINIMUM = re.compile(r"\b(min|max)(?=\()")
_CUDA_NUMBER = re.compile(r"(?<![\w.])(\d+)(?=u?(?![\w.]))")
_BARRIER_NAMES = (
    r"__sync(?:threads|warp)|cluster_sync|named_barrier_(?:sync|arrive)"
    r"|mbarrier_(?:arrive|arrive_if|wait|init_fence|expect|arrive_after_copies)"
    r"|wait_full|wait_empty|wait|release|fence|fence_async_proxy|grid_dependency_wait"
    r"|async_(?:wait|commit)|bulk_(?:wait|wait_read|commit)|wgmma_(?:fence|wait|commit)"
)
_CUDA_BARRIER = re.compile(
    rf"(?<![\w:.>])((?:convt3d::)?(?:\w+(?:\[[^\];]*\])?(?:\.|->))*(?:{_BARRIER_NAMES})"
    r"(?:<[^;(){}]*>)?\((?:[^;(){}]|\((?:[^;(){}]|\([^;(){}]*\))*\))*\));"
)
_HIDDEN = re.compile(
    r"//[^\n]*|/\*.*?\*/"  # comments
    r'|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\''
    r"|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*"  # preprocessor lines, with those that continue them
    r"|\bstatic_assert\s*\([^;]*\);"
    r"|\btemplate\s*<[^;{}]*?>(?=\s*\n|\s+(?:struct|class|CONVT3D|__))",
    re.MULTILINE | re.DOTALL,
)

#: Functions of planners that choose or tell and lay nothing out; those that return a float, too.
_NO_LAYOUT = re.compile(
    r"cost|cycles|choose|rank|cheap|candidate|best|base|describe|refus|suits|serves|prefer|otherwise"
)


@dataclass(frozen=True)
class Mutation:
    """Characters ``begin`` to ``end`` of a file, replaced by ``new``."""

    file: str
    kind: str
    begin: int
    end: int
    old: str
    new: str

    def apply(self, text: str) -> str:
        """The file's text with the mutation.

        Raises:
            ValueError: another text stands at its place.
        """
        if text[self.begin : self.end] != self.old:
            raise ValueError(f"{self.file} has no {self.old!r} at {self.begin}")
        return text[: self.begin] + self.new + text[self.end :]

    def line(self, text: str) -> int:
        """The number of the line that the place begins in, from 1."""
        return text.count("\n", 0, self.begin) + 1

    def diff(self, text: str) -> str:
        """The mutated lines, as a unified diff without context."""
        lines = difflib.unified_diff(
            text.splitlines(), self.apply(text).splitlines(), self.file, self.file, n=0, lineterm=""
        )
        return "\n".join(itertools.islice(lines, 2, None))

    def key(self, text: str) -> str:
        """What tells the mutation apart in a report: another text of the file is another one."""
        return hashlib.sha256(repr((asdict(self), text)).encode()).hexdigest()[:16]


def draw(texts: Mapping[str, str], seed: int) -> Iterator[Mutation]:
    """Mutations of files, in an order that depends on the texts and the seed alone.

    Files take turns in a new order each round. Of a file, a kind is drawn among those that it has
    left, then a place of that kind, so that rare barriers are met as often as numbers are. No place
    comes twice. Ends once every place was drawn.
    """
    generator = random.Random(seed)
    left = {}
    for file in sorted(texts):
        kinds: dict[str, list[Mutation]] = {}
        for mutation in mutations(file, texts[file], generator):
            kinds.setdefault(mutation.kind, []).append(mutation)
        left[file] = kinds
    while left := {file: kinds for file, kinds in left.items() if kinds}:
        for file in generator.sample(sorted(left), len(left)):
            kinds = left[file]
            kind = generator.choice(sorted(kinds))
            yield kinds[kind].pop(generator.randrange(len(kinds[kind])))
            if not kinds[kind]:
                del kinds[kind]


def mutations(file: str, text: str, generator: random.Random) -> list[Mutation]:
    """One mutation of every place of a file; numbers become one more or one less, as drawn."""
    places = _python(text) if file.endswith(".py") else _cuda(text)
    found = []
    for kind, begin, end in places:
        old = text[begin:end]
        if kind == "barrier":
            new = ""
        elif kind == "constant":
            number = int(old)
            new = str(number + (1 if number == 0 else generator.choice((-1, 1))))
        else:
            new = (_ARITHMETIC | _BOUNDS)[old]
        found.append(Mutation(file, kind, begin, end, old, new))
    return found


Place = tuple[str, int, int]


def _of(operator: str) -> str:
    return "bound" if operator in _BOUNDS else "operator"


def _cuda(text: str) -> list[Place]:
    visible = _HIDDEN.sub(lambda hidden: re.sub(r"[^\n]", " ", hidden[0]), text)
    places: list[Place] = []
    for found in itertools.chain(_CUDA_OPERATOR.finditer(visible), _CUDA_MINIMUM.finditer(visible)):
        # Blanks of hidden text are none of the source's.
        if text[found.start() - 1] == visible[found.start() - 1]:
            places.append((_of(found[1]), *found.span(1)))
    places += (("constant", *found.span(1)) for found in _CUDA_NUMBER.finditer(visible))
    places += (("barrier", *found.span(1)) for found in _CUDA_BARRIER.finditer(visible))
    return sorted(places, key=lambda place: place[1:])


def _python(text: str) -> list[Place]:
    starts = [0, *itertools.accumulate(len(line) for line in text.splitlines(keepends=True))]
    bodies = list(_layout_lines(ast.parse(text)))
    places: list[Place] = []
    before: tokenize.TokenInfo | None = None
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        row, column = token.start
        begin = starts[row - 1] + column
        place = (begin, begin + len(token.string))
        if any(first <= row <= last for first, last in bodies):
            if token.type == tokenize.NUMBER and token.string.isdigit():
                places.append(("constant", *place))
            elif token.string in _ARITHMETIC | _BOUNDS and _is_binary(token, before, text, place):
                places.append((_of(token.string), *place))
        before = token
    return places


def _is_binary(
    token: tokenize.TokenInfo, before: tokenize.TokenInfo | None, text: str, place: tuple[int, int]
) -> bool:
    if token.string in ("min", "max"):
        return text.startswith("(", place[1])
    if token.type == tokenize.NAME:  # and, or
        return True
    return before is not None and (
        before.type in (tokenize.NAME, tokenize.NUMBER) or before.string in (")", "]")
    )


def _layout_lines(tree: ast.Module) -> Iterator[tuple[int, int]]:
    """First and last lines of the bodies of functions that lay out what a kernel is given."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for function in functions:
        returns = ast.unparse(function.returns) if function.returns else ""
        if _NO_LAYOUT.search(function.name) or "float" in returns:
            continue
        body = [node for node in function.body if not isinstance(node, ast.Raise)]
        if body:
            yield body[0].lineno, max(node.end_lineno or node.lineno for node in body)


def evenly(groups: Sequence[Sequence[str]]) -> list[str]:
    """The items of all groups, taken in turns."""
    turns = itertools.zip_longest(*groups)
    return [item for turn in turns for item in turn if item is not None]
