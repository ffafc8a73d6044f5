"""Kernel text as a syntax tree, and edits of it by ranges of bytes."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Node = Any  # tree_sitter.Node

_PADDED = {"CONVT3D_DEVICE": "inline", "CONVT3D_CONSTEXPR": "constexpr"}
# What the grammar does not know: typename before a braced value, alignment of variables.
_UNREADABLE = re.compile(rb"\btypename(?=\s+[\w:]+\s*\{)|\b__align__\([^()]*\)")
# A pragma between the head of a statement and its body; elsewhere the grammar knows it.
_INNER_PRAGMA = re.compile(rb"((?:\)|\belse)\s*\n\s*)(#pragma unroll[^\n]*)")
_COMMENT_OR_TEXT = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)
_WORD = re.compile(r"[A-Za-z_]\w*")


SCOPES = ("declaration_list", "field_declaration_list", "translation_unit")
"""Nodes whose children are declarations."""


@dataclass(frozen=True)
class Edit:
    """Replaces the bytes ``[start, end)``."""

    start: int
    end: int
    text: bytes = b""


@functools.cache
def _parser() -> Any:
    import tree_sitter
    import tree_sitter_cuda

    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_cuda.language()))


def parse(text: bytes) -> Node:
    """The root of a text's syntax tree. Names of qualifiers are read as what they stand for."""
    for name, word in _PADDED.items():
        text = text.replace(name.encode(), word.ljust(len(name)).encode())
    text = _UNREADABLE.sub(lambda m: b" " * len(m.group(0)), text)
    text = _INNER_PRAGMA.sub(lambda m: m.group(1) + b" " * len(m.group(2)), text)
    return _parser().parse(text).root_node


def arm_start(node: Node, arm: Node) -> int:
    """Where an arm of a condition begins, pragmas included."""
    other = node.child_by_field_name("alternative")
    if other is not None and arm.start_byte >= other.start_byte:
        return int(other.children[0].end_byte)
    return int(node.child_by_field_name("condition").end_byte)


def loop_start(text: bytes, node: Node) -> int:
    """Where a loop begins, its pragma included."""
    match = re.search(
        rb"#pragma unroll[^\n]*\n\s*$", text[max(0, node.start_byte - 200) : node.start_byte]
    )
    return int(node.start_byte) - (len(match.group(0)) if match else 0)


def apply(text: bytes, edits: Iterable[Edit]) -> bytes:
    """The text after edits, of which none may overlap another."""
    out, at = [], 0
    for edit in sorted(edits, key=lambda e: (e.start, e.end)):
        assert edit.start >= at, "edits overlap"
        out += [text[at : edit.start], edit.text]
        at = edit.end
    return b"".join([*out, text[at:]])


def outermost(edits: Iterable[Edit]) -> list[Edit]:
    """The edits that lie in no other one."""
    kept: list[Edit] = []
    for edit in sorted(edits, key=lambda e: (e.start, -e.end)):
        if not kept or edit.start >= kept[-1].end:
            kept.append(edit)
    return kept


def innermost(edits: Iterable[Edit]) -> list[Edit]:
    """The edits in which no other one lies."""
    kept: list[Edit] = []
    for edit in sorted(edits, key=lambda e: (e.end, -e.start)):
        if not kept or edit.start >= kept[-1].end:
            kept.append(edit)
    return kept


def walk(node: Node) -> Iterator[Node]:
    """A node and all below it, parents first."""
    pending = [node]
    while pending:
        node = pending.pop()
        yield node
        pending += reversed(node.children)


def words(text: bytes) -> Counter[str]:
    """How often each identifier occurs outside comments and strings."""
    return Counter(_WORD.findall(_COMMENT_OR_TEXT.sub(" ", text.decode())))


def of(text: bytes, node: Node) -> bytes:
    """The text of a node."""
    return text[node.start_byte : node.end_byte]


def with_comments(text: bytes, node: Node) -> Edit:
    """What to delete with a node: whole lines, comments right above and behind it.

    A comment belongs to the node below it where no blank line is between them.
    """
    first = node
    while (before := first.prev_sibling) is not None and before.type == "comment":
        gap = text[before.end_byte : first.start_byte]
        # A comment behind other code on its line belongs to that code.
        line = text[text.rfind(b"\n", 0, before.start_byte) + 1 : before.start_byte]
        if gap.count(b"\n") != 1 or line.strip():
            break
        first = before
    start, end = first.start_byte, node.end_byte
    after = node.next_sibling
    if after is not None and after.type == ";":
        end, after = after.end_byte, after.next_sibling
    if after is not None and after.type == "comment" and b"\n" not in text[end : after.start_byte]:
        end = after.end_byte
    line_start = text.rfind(b"\n", 0, start) + 1
    line_end = text.find(b"\n", end)
    if not text[line_start:start].strip() and not text[end:line_end].strip():
        start, end = line_start, line_end + 1
    return Edit(start, end)


def ancestors(node: Node) -> Iterator[Node]:
    """The nodes that a node lies in, from the next one on."""
    while (node := node.parent) is not None:
        yield node


def enclosing(node: Node, types: Sequence[str]) -> Node | None:
    """The innermost node of these types that a node lies in."""
    return next((n for n in ancestors(node) if n.type in types), None)


def is_constexpr(text: bytes, function: Node) -> bool:
    """Whether a function is constexpr, so that no assembly may stand in it."""
    head = text[function.start_byte : function.child_by_field_name("body").start_byte]
    return b"constexpr" in head or b"CONVT3D_CONSTEXPR" in head


def declared_name(text: bytes, node: Node) -> str | None:
    """The one name that a declaration declares, if deleting it could be right."""
    if node.type == "template_declaration":
        inner = node.children[-1]
        if inner.type == ";":
            inner = node.children[-2]
        return declared_name(text, inner)
    if node.type in ("struct_specifier", "class_specifier", "enum_specifier", "alias_declaration"):
        name = node.child_by_field_name("name")
        while name is not None and name.type == "template_type":
            name = name.child_by_field_name("name")
        return None if name is None else of(text, name).decode()
    if node.type not in ("function_definition", "field_declaration", "declaration"):
        return None
    declarators = node.children_by_field_name("declarator")
    if node.type == "field_declaration" and not declarators:
        inner = node.child_by_field_name("type")
        nested = inner is not None and inner.type in ("struct_specifier", "class_specifier")
        return declared_name(text, inner) if nested else None
    if len(declarators) != 1:
        return None
    declarator = declarators[0]
    while declarator.type not in ("identifier", "field_identifier"):
        inner = declarator.child_by_field_name("declarator")
        if inner is None and declarator.type in ("reference_declarator", "pointer_declarator"):
            inner = declarator.children[-1]
        if inner is None and declarator.type in ("template_function", "template_method"):
            inner = declarator.child_by_field_name("name")
        if inner is None:
            return None
        declarator = inner
    name = of(text, declarator).decode()
    holder = enclosing(node, ("struct_specifier", "class_specifier"))
    if holder is not None and node.type == "function_definition":
        own = holder.child_by_field_name("name")
        if own is not None and of(text, own).decode() == name:
            return None  # a constructor
    if b"__global__" in of(text, node)[:200]:
        return None
    return name
