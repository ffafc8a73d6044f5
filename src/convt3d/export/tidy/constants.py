"""The constants of kernel text: where they are, and what they are."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from convt3d.export.tidy.chunks import NAMESPACE
from convt3d.export.tidy.oracle import CompileError, Oracle, error_lines
from convt3d.export.tidy.simplify import value_of
from convt3d.export.tidy.syntax import Node, ancestors, of, parse, walk

_VALUE = re.compile(r"// @@(\d+) (-?\d+)")


def known_constants(text: bytes, root: Node) -> dict[str, dict[str, int]]:
    """The constants that are written as numbers, by scope and name, those of bases included."""
    known: dict[str, dict[str, int]] = {}
    declared: dict[str, set[str]] = {}
    enumerations = enumerators(text, root)
    for node, path, is_bool in constants(text, templates=True):
        *_, scope, name = path.split("::")
        declared.setdefault(scope, set()).add(name)
        value = value_of(text, node)
        literal = of(text, node).decode().split("::")
        if value is None and len(literal) == 2:
            value = enumerations.get(literal[0], {}).get(literal[1])
        if value is not None:
            known.setdefault(scope, {})[name] = bool(value) if is_bool else value
    for scope, base in bases(text, root):  # a base stands before what derives from it
        own = declared.get(scope, set())
        inherited = {n: v for n, v in known.get(base, {}).items() if n not in own}
        if inherited:
            known[scope] = inherited | known.get(scope, {})
    for alias, scope in aliases(text, root):
        if scope in known:
            known.setdefault(alias, {}).update(known[scope])
    return known | enumerations


def enumerators(text: bytes, root: Node) -> dict[str, dict[str, int]]:
    """Enumerators without values of their own, by the name of their type."""
    found: dict[str, dict[str, int]] = {}
    for node in walk(root):
        if node.type == "enum_specifier" and node.child_by_field_name("name") is not None:
            name = of(text, node.child_by_field_name("name")).decode()
            names = [of(text, n).decode() for n in walk(node) if n.type == "enumerator"]
            if not any("=" in n for n in names):
                found[name] = {n: i for i, n in enumerate(names)}
    return found


def bases(text: bytes, root: Node) -> Iterator[tuple[str, str]]:
    """Types and what they derive from, by name and in the order of the text."""
    for node in walk(root):
        if node.type not in ("struct_specifier", "class_specifier"):
            continue
        name = node.child_by_field_name("name")
        for clause in node.children:
            if clause.type == "base_class_clause" and name is not None:
                for base in clause.named_children:
                    if base.type == "type_identifier":
                        yield of(text, name).decode(), of(text, base).decode()


def aliases(text: bytes, root: Node) -> Iterator[tuple[str, str]]:
    """Names of types by another name, if each is of one type alone."""
    found: dict[str, set[str]] = {}
    for node in walk(root):
        if node.type == "alias_declaration":
            name = of(text, node.child_by_field_name("name")).decode()
            target = of(text, node.child_by_field_name("type")).decode()
            last = target.replace("typename ", "").split("::")[-1]
            if last != name:
                found.setdefault(name, set()).add(last)
    return ((name, targets.pop()) for name, targets in found.items() if len(targets) == 1)


def constants(text: bytes, templates: bool = False) -> Iterator[tuple[Node, str, bool]]:
    """Initialisers of constants: node, path of the constant, whether it is a bool.

    Those of templates alone if they are asked for.
    """
    root = parse(text)
    enumerations = enumerators(text, root)
    for node in walk(root):
        if node.type not in ("field_declaration", "declaration"):
            continue
        if node.parent.type not in ("field_declaration_list", "declaration_list"):
            continue
        around = {a.type for a in ancestors(node)}
        if "function_definition" in around:
            continue
        if "template_declaration" in around and not templates:
            continue
        kind = node.child_by_field_name("type")
        head = of(text, node).split(b"=")[0]
        if kind is None or b"constexpr" not in head or b"(" in head or b"[" in head:
            continue
        type_name = of(text, kind).decode()
        enumeration = type_name in enumerations
        numbers = ("int", "bool", "unsigned", "int64_t", "uint32_t", "uint64_t")
        if type_name not in numbers and not enumeration:
            continue
        scope = []
        for ancestor in ancestors(node):
            if ancestor.type in ("struct_specifier", "class_specifier", "namespace_definition"):
                scope.append(of(text, ancestor.child_by_field_name("name")).decode())
        path = "::".join(reversed(scope))
        if node.type == "field_declaration":
            names = node.children_by_field_name("declarator")
            initial = node.children_by_field_name("default_value")
            pairs = list(zip(names, initial, strict=False))
        else:
            pairs = [
                (d.child_by_field_name("declarator"), d.child_by_field_name("value"))
                for d in node.children_by_field_name("declarator")
                if d.type == "init_declarator"
            ]
        for name, value in pairs:
            yield value, f"{path}::{of(text, name).decode()}", type_name == "bool"


def values_of(text: bytes, oracle: Oracle, paths: Sequence[str]) -> dict[str, int]:
    """The values of constants, by their paths."""
    wanted = list(dict.fromkeys(paths))
    while wanted:
        lines = [
            f'asm volatile("// @@{i} %0" :: "n"((long long)({path})));'
            for i, path in enumerate(wanted)
        ]
        head = text.decode() + '\nextern "C" __global__ void values_of_constants() {'
        head += f" using namespace {NAMESPACE};\n"  # arguments of templates are named without it
        first = head.count("\n") + 1
        try:
            program = head + "\n".join(lines) + "\n}\n"
            found = [_VALUE.findall(ptx) for ptx in oracle.ptx(program)]
        except CompileError as error:
            wrong = {n - first for n in error_lines(error)}
            left = [p for i, p in enumerate(wanted) if i not in wrong]
            if len(left) == len(wanted):
                return {}
            wanted = left
            continue
        # Builds that differ in a constant leave it as it is.
        same = set(found[0]).intersection(*found[1:])
        return {wanted[int(i)]: int(value) for i, value in same}
    return {}
