"""Which functions and arms of conditions reach the PTX."""

from __future__ import annotations

import re

from convt3d.export.tidy.oracle import Oracle
from convt3d.export.tidy.syntax import (
    SCOPES,
    Edit,
    Node,
    ancestors,
    apply,
    arm_start,
    enclosing,
    is_constexpr,
    parse,
    walk,
)

_MARK = re.compile(r"// @@(\d+)")
Key = tuple[int, int, bool]
"""An arm of a condition in every parse of one text: its bytes, and whether it is not written."""


def coverage(text: bytes, oracle: Oracle) -> tuple[set[int], dict[int, tuple[Key, Node]]]:
    """Numbers of the functions and arms that reach the PTX, and the nodes of all numbers."""
    marks: dict[int, tuple[Key, Node]] = {}
    # Place, rank among those at one place, text: ends from the innermost out, then begins.
    inserts: list[tuple[int, float, bytes]] = []

    def mark(node: Node, body: Node, start: int = -1) -> None:
        number = len(marks)
        marks[number] = (arm_key(node, node), node)
        marker = b' asm volatile("// @@%d");' % number
        if body.type == "compound_statement":
            inserts.append((body.start_byte + 1, 0, marker))
        else:
            depth = sum(1 for _ in ancestors(body))
            inserts.append((start, depth, b"{" + marker))
            inserts.append((body.end_byte, -depth, b"}"))

    for node in walk(parse(text)):
        if node.type == "function_definition":
            body = node.child_by_field_name("body")
            if body is None or body.type != "compound_statement":
                continue
            if outer(node).parent.type not in (*SCOPES, "linkage_specification"):
                continue
            if not is_constexpr(text, node):
                mark(node, body)
        elif node.type == "if_statement" and is_if_constexpr(node):
            function = enclosing(node, ("function_definition",))
            if function is None or is_constexpr(text, function):
                continue
            for arm in arms_of(node):
                if arm is not None:
                    mark(arm, arm, arm_start(node, arm))
            if arms_of(node)[1] is None:
                depth = sum(1 for _ in ancestors(node))
                inserts.append((node.end_byte, -depth - 0.5, _absent(node, marks)))
    inserts.sort(key=lambda i: (i[0], i[1]))
    marked = apply(text, (Edit(at, at, what) for at, _, what in inserts))
    found = [_MARK.findall(ptx) for ptx in oracle.ptx(marked.decode())]
    return {int(number) for numbers in found for number in numbers}, marks


def _absent(node: Node, marks: dict[int, tuple[Key, Node]]) -> bytes:
    """Marks the arm of a condition that is not written."""
    marks[len(marks)] = (arm_key(node, None), node)
    return b' else { asm volatile("// @@%d"); }' % (len(marks) - 1)


def arm_key(node: Node, arm: Node | None) -> Key:
    """Names an arm of a condition, written or not, in every parse of one text."""
    of = node if arm is None else arm
    return (of.start_byte, of.end_byte, arm is None)


def outer(node: Node) -> Node:
    """A declaration with its template head."""
    while node.parent is not None and node.parent.type == "template_declaration":
        node = node.parent
    return node


def is_if_constexpr(node: Node) -> bool:
    return any(child.type == "constexpr" for child in node.children)


def arms_of(node: Node) -> tuple[Node, Node | None]:
    """Both statements of a condition."""
    other = node.child_by_field_name("alternative")
    if other is not None:
        other = next(c for c in other.children if c.is_named and c.type != "comment")
    return node.child_by_field_name("consequence"), other
