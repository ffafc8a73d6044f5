"""Expressions and statements with known parts: what is left of them.

Every rewriting is right by the rules of C++ for integers and booleans. Types may become narrower
(`int64_t(1) * n` is not touched, but `1 * n` is `n`); the PTX decides whether that matters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from convt3d.export.tidy.chunks import NAMESPACE
from convt3d.export.tidy.syntax import (
    Edit,
    Node,
    ancestors,
    apply,
    arm_start,
    enclosing,
    loop_start,
    of,
    walk,
)

_INTEGER = re.compile(r"-?\d+")
_SIMPLE = (
    "identifier", "field_expression", "call_expression", "qualified_identifier", "number_literal",
    "parenthesized_expression", "subscript_expression", "true", "false",
)  # fmt: skip


_EFFECTS = (
    "call_expression",
    "assignment_expression",
    "update_expression",
    "lambda_expression",
)
_HOLDERS = ("argument_list", "init_declarator", "return_statement", "parenthesized_expression")
_GRAMMAR = ("if_statement", "while_statement", "do_statement", "decltype")  # keep parentheses

Known = Mapping[str, Mapping[str, int]]
"""Constants: by the last name of their scope, then by their own name; booleans are ``bool``."""


def value_of(text: bytes, node: Node | None) -> int | None:
    """The number that a node is, as written."""
    while node is not None and node.type == "parenthesized_expression":
        node = node.named_children[0] if len(node.named_children) == 1 else None
    if node is None:
        return None
    source = of(text, node).decode()
    if source in ("true", "false"):
        return source == "true"
    return int(source) if _INTEGER.fullmatch(source) else None


def evaluate(text: bytes, known: Known, node: Node | None) -> int | None:
    """The value of an expression of constants; a ``bool`` where its type is bool."""
    if node is None:
        return None
    written = value_of(text, node)
    if written is not None:
        return written
    if node.type in ("parenthesized_expression", "condition_clause"):
        inner = node.named_children
        return evaluate(text, known, inner[0]) if len(inner) == 1 else None
    if node.type in ("identifier", "qualified_identifier"):
        return constant_of(text, known, node)
    if node.type == "unary_expression":
        value = evaluate(text, known, node.child_by_field_name("argument"))
        sign = of(text, node.child_by_field_name("operator"))
        if value is None or sign not in (b"!", b"-"):
            return None
        return not value if sign == b"!" else -value
    if node.type == "binary_expression":
        operator = of(text, node.child_by_field_name("operator")).decode()
        left = evaluate(text, known, node.child_by_field_name("left"))
        right = evaluate(text, known, node.child_by_field_name("right"))
        if operator == "&&" and (left == 0 or right == 0):
            return False
        if operator == "||" and (left or right):
            return True
        if left is None or right is None or operator not in _FOLDED:
            return None
        return _FOLDED[operator](left, right)
    if node.type == "conditional_expression":
        value = evaluate(text, known, node.child_by_field_name("condition"))
        if value is None:
            return None
        return evaluate(
            text, known, node.child_by_field_name("consequence" if value else "alternative")
        )
    return None


def constant_of(text: bytes, known: Known, node: Node) -> int | None:
    """The value of a name, where it stands."""
    parts = of(text, node).decode().replace("typename ", "").split("::")
    if len(parts) > 1:
        return known.get(parts[-2].split("<")[0], {}).get(parts[-1])
    name, before = parts[0], node
    for scope in ancestors(node):
        if scope.type in ("compound_statement", "for_statement", "condition_clause"):
            for child in scope.children:
                if child.start_byte >= before.start_byte:
                    break
                if child.type == "declaration" and name in _declared(text, child):
                    return _local(text, known, child, name)
        elif scope.type in ("function_definition", "lambda_expression", "template_declaration"):
            parameters = _parameters(scope)
            listed = "" if parameters is None else of(text, parameters).decode()
            if re.search(rf"\b{name}\b", listed):
                return None
        elif scope.type in ("struct_specifier", "class_specifier"):
            own = scope.child_by_field_name("name")
            if own is not None:
                value = known.get(of(text, own).decode(), {}).get(name)
                if value is not None:
                    return value
        before = scope
    return known.get(NAMESPACE, {}).get(name)


def _parameters(scope: Node) -> Node | None:
    """The list of parameters of a function, lambda or template."""
    if scope.type == "template_declaration":
        return scope.child_by_field_name("parameters")
    inner = scope.child_by_field_name("declarator")
    while inner is not None:
        parameters = inner.child_by_field_name("parameters")
        if parameters is not None:
            return parameters
        after = inner.child_by_field_name("declarator")
        if after is None and inner.type in ("reference_declarator", "pointer_declarator"):
            after = inner.named_children[-1]
        inner = after
    return None


def _declared(text: bytes, declaration: Node) -> dict[str, Node]:
    found = {}
    for declarator in declaration.children_by_field_name("declarator"):
        inner = declarator
        while inner is not None and inner.type not in ("identifier",):
            after = inner.child_by_field_name("declarator")
            if after is None and inner.type == "reference_declarator":
                after = inner.named_children[-1]
            inner = after
        if inner is not None:
            found[of(text, inner).decode()] = declarator
    return found


def _local(text: bytes, known: Known, declaration: Node, name: str) -> int | None:
    """The value of a constant that a function declares."""
    head = of(text, declaration).split(b"=")[0].decode()
    match = re.match(r"(?:constexpr|const) (int|bool) ", head)
    declarator = _declared(text, declaration)[name]
    if match is None or declarator.type != "init_declarator":
        return None
    value = evaluate(text, known, declarator.child_by_field_name("value"))
    if value is None:
        return None
    return bool(value) if match.group(1) == "bool" else int(value)


def _pure(text: bytes, node: Node) -> bool:
    """Whether an expression may be dropped: it calls nothing and assigns nothing."""
    return not any(n.type in _EFFECTS for n in walk(node))


def rewritings(text: bytes, root: Node, known: Known) -> Iterator[Edit]:
    """One rewriting for each expression or statement that has one; they may nest."""
    for node in walk(root):
        made = None
        if node.type == "binary_expression":
            made = _binary(text, known, node)
        elif node.type == "conditional_expression":
            made = _conditional(text, known, node)
        elif node.type == "unary_expression":
            made = _unary(text, node)
        elif node.type == "parenthesized_expression":
            made = _parentheses(text, node)
        elif node.type == "for_statement":
            made = _loop(text, known, node)
        elif node.type == "if_statement":
            made = _condition(text, known, node)
        elif node.type == "field_declaration":
            made = _initialiser(text, known, node)
        elif node.type == "call_expression":
            made = _cast(text, node)
        elif node.type == "compound_statement":
            made = _unreachable(node)
        if made is not None:
            yield made


def _initialiser(text: bytes, known: Known, node: Node) -> Edit | None:
    """The number that a constant of a type is."""
    value = node.child_by_field_name("default_value")
    kind = node.child_by_field_name("type")
    if value is None or kind is None or of(text, kind) not in (b"int", b"bool"):
        return None
    if b"constexpr" not in of(text, node).split(b"=")[0] or value_of(text, value) is not None:
        return None
    number = evaluate(text, known, value)
    if number is None:
        return None
    return _whole(value, _literal(bool(number) if of(text, kind) == b"bool" else int(number)))


def _unreachable(node: Node) -> Edit | None:
    """What stands behind a return."""
    ended = None
    for child in node.children:
        if ended is not None and child.is_named and child.type != "comment":
            return Edit(ended.end_byte, node.end_byte - 1, b"\n")
        if child.type == "return_statement":
            ended = child
    return None


def _cast(text: bytes, node: Node) -> Edit | None:
    """A literal as int is the literal."""
    arguments = node.child_by_field_name("arguments").named_children
    if of(text, node.child_by_field_name("function")) != b"int" or len(arguments) != 1:
        return None
    value = value_of(text, arguments[0])
    return None if value is None else _whole(node, str(int(value)).encode())


def _whole(node: Node, by: bytes) -> Edit:
    return Edit(node.start_byte, node.end_byte, by)


_FOLDED = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a // b if b > 0 and a >= 0 else None,
    "%": lambda a, b: a % b if b > 0 and a >= 0 else None,
    "<": lambda a, b: a < b,
    ">": lambda a, b: a > b,
    "<=": lambda a, b: a <= b,
    ">=": lambda a, b: a >= b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "&&": lambda a, b: bool(a and b),
    "||": lambda a, b: bool(a or b),
}


def _literal(value: int | bool) -> bytes:
    return (str(value).lower() if isinstance(value, bool) else str(value)).encode()


def _binary(text: bytes, known: Known, node: Node) -> Edit | None:
    left, right = node.child_by_field_name("left"), node.child_by_field_name("right")
    operator = of(text, node.child_by_field_name("operator")).decode()
    a, b = value_of(text, left), value_of(text, right)
    if a is not None and b is not None and operator in _FOLDED:
        value = _FOLDED[operator](a, b)
        if value is not None and value >= 0:
            return _whole(node, _literal(value))
    if operator in ("<", ">", "<=", ">=", "==", "!=", "&&", "||"):
        value = evaluate(text, known, node)
        if value is not None and _pure(text, node):
            return _whole(node, _literal(bool(value)))
    a, b = evaluate(text, known, left), evaluate(text, known, right)
    if operator == "&&":
        if a == 1:
            return _whole(node, of(text, right))
        if b == 1:
            return _whole(node, of(text, left))
        if a == 0 or (b == 0 and _pure(text, left)):
            return _whole(node, b"false")
    if operator == "||":
        if a == 0:
            return _whole(node, of(text, right))
        if b == 0:
            return _whole(node, of(text, left))
        if a or (b and _pure(text, left)):
            return _whole(node, b"true")
    if operator in ("*", "/") and b == 1:
        return _whole(node, of(text, left))
    if operator == "*" and a == 1:
        return _whole(node, of(text, right))
    if operator == "%" and b == 1 and _pure(text, left):
        return _whole(node, b"0")
    if operator == "*" and ((a == 0 and _pure(text, right)) or (b == 0 and _pure(text, left))):
        return _whole(node, b"0")
    if operator == "/" and a == 0 and _pure(text, right):
        return _whole(node, b"0")
    if operator in ("+", "-") and b == 0:
        return _whole(node, of(text, left))
    if operator == "+" and a == 0:
        return _whole(node, of(text, right))
    return None


def _conditional(text: bytes, known: Known, node: Node) -> Edit | None:
    value = evaluate(text, known, node.child_by_field_name("condition"))
    arms = [of(text, node.child_by_field_name(f)) for f in ("consequence", "alternative")]
    if value is None and arms[0] == arms[1] and _pure(text, node):
        value = True
    if value is None:
        return None
    arm = node.child_by_field_name("consequence" if value else "alternative")
    return _whole(node, of(text, arm))


def _unary(text: bytes, node: Node) -> Edit | None:
    operator = of(text, node.child_by_field_name("operator"))
    value = value_of(text, node.child_by_field_name("argument"))
    if operator == b"!" and value is not None:
        return _whole(node, _literal(not value))
    return None


def _parentheses(text: bytes, node: Node) -> Edit | None:
    if len(node.named_children) != 1 or node.parent.type in _GRAMMAR:
        return None
    inner = node.named_children[0]
    if inner.type in _SIMPLE:
        return _whole(node, of(text, inner))
    if node.parent.type in _HOLDERS:
        return _whole(node, of(text, inner)) if inner.type != "comma_expression" else None
    return None


def _loop(text: bytes, known: Known, node: Node) -> Edit | None:
    """A loop of one iteration is its body with the number of that, one of none is nothing."""
    if value_of(text, node.child_by_field_name("condition")) is False:
        return Edit(node.start_byte, node.end_byte, b"{}")
    begin = node.child_by_field_name("initializer")
    condition, update = node.child_by_field_name("condition"), node.child_by_field_name("update")
    body = node.child_by_field_name("body")
    if (
        begin is None
        or condition is None
        or update is None
        or condition.type != "binary_expression"
    ):
        return None
    match = re.fullmatch(r"int (\w+) = (\d+);", of(text, begin).decode())
    end = evaluate(text, known, condition.child_by_field_name("right"))
    if match is None or end is None:
        return None
    name, first = match.group(1), int(match.group(2))
    if of(text, condition.child_by_field_name("left")).decode() != name:
        return None
    if of(text, condition.child_by_field_name("operator")) != b"<":
        return None
    step = re.fullmatch(rf"(?:\+\+{name}|{name} \+= (\w+))", of(text, update).decode())
    if step is None:
        return None
    size = 1 if step.group(1) is None else int(step.group(1)) if step.group(1).isdigit() else None
    if end > first and (size is None or first + size < end):
        return None
    if any(n.type in ("break_statement", "continue_statement") for n in walk(body)):
        return None
    start = loop_start(text, node)
    if end <= first:
        return Edit(
            start, node.end_byte, b"" if node.parent.type == "compound_statement" else b"{}"
        )
    replaced = [
        Edit(n.start_byte - body.start_byte, n.end_byte - body.start_byte, str(first).encode())
        for n in walk(body)
        if n.type == "identifier" and of(text, n).decode() == name
    ]
    inner = apply(of(text, body), replaced)
    if body.type != "compound_statement":
        close = text.rfind(b")", node.start_byte, body.start_byte) + 1
        inner = text[close : body.start_byte].lstrip() + inner
    if body.type == "compound_statement" and node.parent.type == "compound_statement":
        declares = any(c.type in ("declaration", "alias_declaration") for c in body.children)
        if not declares or _alone(text, node, body):
            inner = inner[1:-1].strip()
    return Edit(start, node.end_byte, inner)


def _alone(text: bytes, node: Node, body: Node) -> bool:
    """Whether names that a body declares are free where the body would stand."""
    function = enclosing(node, ("function_definition", "lambda_expression"))
    if function is None:
        return False
    for child in body.children:
        if child.type == "declaration":
            for name in re.findall(rb"(\w+)\s*(?:=|;|\{|\[)", of(text, child)):
                outside = of(text, function).count(name) - of(text, body).count(name)
                if outside:
                    return False
    return True


def _condition(text: bytes, known: Known, node: Node) -> Edit | None:
    clause = node.child_by_field_name("condition")
    value = evaluate(text, known, clause.child_by_field_name("value"))
    if value is None:
        return None
    arm = node.child_by_field_name("consequence")
    if not value:
        arm = node.child_by_field_name("alternative")
        if arm is not None:
            arm = next(c for c in arm.children if c.is_named and c.type != "comment")
    parent = node.parent
    if arm is None:
        if parent.type == "else_clause":
            return Edit(parent.start_byte, parent.end_byte)
        return _whole(node, b"" if parent.type == "compound_statement" else b"{}")
    inner = of(text, arm)
    if arm.type != "compound_statement":
        inner = text[arm_start(node, arm) : arm.end_byte].strip()
    if (
        arm.type == "compound_statement"
        and parent.type == "compound_statement"
        and _alone(text, node, arm)
    ):
        inner = inner[1:-1].strip()
    return _whole(node, inner)


def substitutions(text: bytes, root: Node, known: Known) -> Iterator[Edit]:
    """Uses of constants that are switches, zeros or ones, by their literals."""
    for node in walk(root):
        if node.parent is None or node.parent.type == "qualified_identifier":
            continue
        if node.type == "identifier":
            parent = node.parent
            if parent.type in ("init_declarator", "function_declarator", "array_declarator"):
                declarator = parent.child_by_field_name("declarator")
                if declarator is not None and declarator.id == node.id:
                    continue
            if parent.type in ("parameter_declaration", "declaration", "field_initializer"):
                continue
        elif node.type == "type_identifier":
            # The grammar takes a name among template arguments for a type.
            if node.parent.parent is None or node.parent.parent.type != "template_argument_list":
                continue
        elif node.type != "qualified_identifier":
            continue
        value = constant_of(text, known, node)
        if value is not None and value in (0, 1):
            yield Edit(node.start_byte, node.end_byte, _literal(value))
