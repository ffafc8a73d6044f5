"""Kernel text as a list of declarations: one namespace, an order, no remains of headers."""

from __future__ import annotations

import re
from dataclasses import dataclass

from convt3d.export.tidy.syntax import Node, of, parse, words

NAMESPACE = "convt3d"
_FILE = "// @file "  # marks where a header begins


@dataclass
class Chunk:
    """A declaration with the comments above it; comments alone have no ``names``."""

    text: str
    names: tuple[str, ...]
    tight: bool = False  # no blank line parts it from what stood before it


def marked(name: str, text: str) -> str:
    """The text of a header with a mark of where it begins."""
    return f"{_FILE}{name}\n\n{text}"


def introduced(chunks: list[Chunk]) -> list[Chunk]:
    """The declarations with what introduces their headers, where enough is left of these.

    An introduction goes above the header's first declaration, and goes away where it is longer
    than a third of the code that it introduces. Lines that only part the text go away.
    """
    made: list[Chunk] = []
    files: list[list[Chunk]] = [[]]
    for chunk in chunks:
        if chunk.text.startswith(_FILE):
            files.append([])
        else:
            files[-1].append(chunk)
    for number, file in enumerate(files):
        code = [c for c in file if c.names]
        loose = [c.text for c in file if not c.names]
        loose = [t for t in loose if not t.startswith("// -----")]
        lines = sum(c.text.count("\n") + 1 for c in code)
        first = loose[0] if loose and file and not file[0].names else ""
        if code and first and (3 * (first.count("\n") + 1) <= lines or number == 0):
            gap = "\n//\n" if code[0].text.startswith("//") else "\n"
            code[0].text = first + gap + code[0].text
        made += code
    return made


def introduce_once(chunks: list[Chunk]) -> None:
    """Takes away what introduces a header for the second time: programs have headers in common."""
    seen: set[str] = set()
    for chunk in chunks:
        match = re.match(r"(?://(?!/).*\n)+", chunk.text)
        if match is None:
            continue
        comment = match.group(0).removesuffix("//\n")
        if comment in seen:
            chunk.text = chunk.text[match.end() :]
        seen.add(comment)


def split(text: str) -> tuple[str, list[Chunk]]:
    """Directives at the top, then every declaration of the namespace and every entry point."""
    data = text.encode()
    head: list[str] = []
    chunks: list[Chunk] = []
    pending: list[str] = []  # comments whose declaration comes next
    line = last = -2  # the last lines of what came before, and of the last declaration

    def loose() -> None:
        if pending:
            chunks.append(Chunk("\n".join(pending), ()))
            pending.clear()

    def visit(nodes: list[Node]) -> None:
        nonlocal line, last
        for node in nodes:
            if node.type in ("{", "}", ";"):
                continue
            source = of(data, node).decode()
            if node.type == "comment":
                if source.startswith("// namespace"):
                    continue
                if source.startswith(_FILE):
                    loose()
                    chunks.append(Chunk(source, ()))
                    line = node.end_point[0]
                    continue
                if node.start_point[0] == line and chunks and not pending:
                    chunks[-1].text += "  " + source
                    continue
                if node.start_point[0] > line + 1:
                    loose()
                pending.append(source)
                line = node.end_point[0]
            elif node.type == "namespace_definition":
                loose()
                visit(node.child_by_field_name("body").children)
                loose()
                line = node.end_point[0]
            elif node.type.startswith("preproc"):
                loose()
                head.append(source.strip())
                line = node.end_point[0]
            else:
                if node.start_point[0] > line + 1:
                    loose()
                if node.type in ("struct_specifier", "class_specifier", "enum_specifier"):
                    source += ";"
                first = node.start_point[0] - sum(p.count("\n") + 1 for p in pending)
                tight = 0 <= first - last <= 1
                chunks.append(Chunk("\n".join([*pending, source]), names_of(source), tight))
                last = node.end_point[0]
                pending.clear()
                line = node.end_point[0]

    visit(parse(data).children)
    loose()
    return "\n".join(head), chunks


_STARTS = re.compile(r"^(?:\s|//[^\n]*\n|template\s*<[^{};]*?>\s*(?=\w))*", re.DOTALL)
_CALL = re.compile(r"(?<![\w.>:])(\w+)\s*[(<]")
_NAMES = (
    re.compile(r"(?:struct|class|enum)\s+(?:class\s+|alignas\([^()]*\)\s*)?(\w+)"),
    re.compile(r"using\s+(\w+)"),
)


def names_of(source: str) -> tuple[str, ...]:
    """The names that a declaration brings into the namespace."""
    return _declared(source)[0]


def _declared(source: str) -> tuple[tuple[str, ...], bool]:
    """The names that a declaration brings into the namespace, and whether that is a function's."""
    body = _STARTS.sub("", source, count=1)
    for pattern in _NAMES:
        match = pattern.match(body)
        if match:
            return (match.group(1),), False
    head = re.split(r"[{;]", body, maxsplit=1)[0]
    function = re.search(r"(\w+)\s*(?:<[^<>()]*>)?\s*\(&?", head.replace("__launch_bounds__", ""))
    if "=" in head and (function is None or head.index("=") < function.start()):
        names = re.findall(r"(\w+)\s*(?:<[^<>=]*>\s*)?(?:\[[^\]]*\]\s*)*=", head)
        return tuple(names), False
    candidates = re.findall(r"(\w+)\s*(?:<[^<>()]*>)?\s*\(", head)
    skip = {"__launch_bounds__", "__align__", "alignas", "float", "int", "bool", "void", "auto"}
    found = [c for c in candidates if c not in skip]
    return ((found[0],) if found else ()), True


def join(head: str, chunks: list[Chunk]) -> str:
    """The text of declarations, in one namespace."""
    body = ""
    for before, chunk in zip([None, *chunks], chunks, strict=False):
        tight = before is not None and before.tight and chunk.tight
        body += ("" if before is None else "\n" if tight else "\n\n") + chunk.text
    body = body.replace(f"{NAMESPACE}::", "")
    return f"{head}\n\nnamespace {NAMESPACE} {{\n\n{body}\n\n}}  // namespace {NAMESPACE}\n"


def ordered(chunks: list[Chunk]) -> list[Chunk]:
    """The declarations, each after those that it names; otherwise in their order."""
    defined: dict[str, list[int]] = {}
    functions: set[str] = set()
    for i, chunk in enumerate(chunks):
        for name in chunk.names:
            defined.setdefault(name, []).append(i)
        if _declared(chunk.text)[1]:
            functions.update(chunk.names)

    def named(text: str) -> set[str]:
        """Words of a declaration; of functions' names those that it calls, not its members."""
        found = set(words(text.encode()))
        called = set(_CALL.findall(text.replace(f"{NAMESPACE}::", "")))
        return (found - functions) | (found & called)

    needs = [
        sorted(
            {
                j
                for name in named(chunk.text)
                if name not in chunk.names
                for j in defined.get(name, ())
                if j != i
            }
        )
        for i, chunk in enumerate(chunks)
    ]
    # Comments alone stay above what follows them.
    order: list[int] = []
    state = [0] * len(chunks)

    def place(i: int) -> None:
        if state[i]:
            return
        state[i] = 1
        for j in needs[i]:
            place(j)
        if i > 0 and not chunks[i - 1].names:
            place(i - 1)
        order.append(i)

    for i in range(len(chunks)):
        if chunks[i].names or i + 1 == len(chunks):
            place(i)
    order += [i for i in range(len(chunks)) if not state[i]]
    return [chunks[i] for i in order]
