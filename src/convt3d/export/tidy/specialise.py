"""Template parameters that have one value in the whole text are replaced by it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from convt3d.export.tidy.constants import known_constants
from convt3d.export.tidy.simplify import Known, constant_of
from convt3d.export.tidy.syntax import SCOPES, Edit, Node, ancestors, apply, of, parse, walk

_LITERAL = re.compile(r"-?\d+|true|false")
_ANY, _DEDUCED = object(), object()


@dataclass
class Parameter:
    name: str
    default: str | None
    node: Node
    value: object = None  # None: no use found yet; _ANY: several; else the text of the one value


@dataclass
class Template:
    """A template declared once: its parameters, and every use with arguments."""

    name: str
    node: Node
    is_function: bool
    parameters: list[Parameter]
    uses: list[Node] = field(default_factory=list)


_USES = ("template_type", "template_function", "template_method")


def find(text: bytes, root: Node) -> dict[str, Template]:
    """The templates of a text by name; those with overloads or specialisations are left out."""
    found: dict[str, Template] = {}
    several = set()
    for node in walk(root):
        if node.type != "template_declaration":
            continue
        inner = next(
            (c for c in reversed(node.children) if c.is_named and c.type != "comment"), None
        )
        listed = node.child_by_field_name("parameters")
        if inner is None or listed is None:
            continue
        name = _name(text, inner)
        if name is None or name in _holders(text, node):
            continue  # a constructor
        if name in found or name in several:
            several.add(name)
            continue
        parameters = []
        for child in listed.named_children:
            parameter = _parameter(text, child)
            if parameter is None:
                several.add(name)
                break
            parameters.append(parameter)
        found[name] = Template(
            name, node, inner.type in ("function_definition", "declaration"), parameters
        )
    plain = {
        name
        for n in walk(root)
        if n.type == "function_definition" and n.parent.type != "template_declaration"
        if (name := _name(text, n)) not in _holders(text, n)
    }
    return {n: t for n, t in found.items() if n not in several and n not in plain}


def _name(text: bytes, node: Node) -> str | None:
    if node.type == "alias_declaration":
        return of(text, node.child_by_field_name("name")).decode()
    if node.type in ("struct_specifier", "class_specifier"):
        name = node.child_by_field_name("name")
        return (
            of(text, name).decode() if name is not None and name.type == "type_identifier" else None
        )
    if node.type in ("function_definition", "declaration", "field_declaration"):
        inner = node.child_by_field_name("declarator")
        while inner is not None and inner.type not in ("identifier", "field_identifier"):
            after = inner.child_by_field_name("declarator")
            if after is None and inner.type in ("reference_declarator", "pointer_declarator"):
                after = inner.named_children[-1]
            inner = after
        return None if inner is None else of(text, inner).decode()
    return None


def _holders(text: bytes, node: Node) -> set[str]:
    """Names of the types that a node is a member of."""
    types = [a for a in ancestors(node) if a.type in ("struct_specifier", "class_specifier")]
    names = [t.child_by_field_name("name") for t in types]
    return {of(text, name).decode() for name in names if name is not None}


def _parameter(text: bytes, node: Node) -> Parameter | None:
    source = of(text, node).decode()
    match = re.fullmatch(
        r"(?:typename|class|bool|int|unsigned|uint32_t|int64_t)\s+(\w+)(?:\s*=\s*(.+))?",
        source,
        re.S,
    )
    return None if match is None else Parameter(match.group(1), match.group(2), node)


def _scope(text: bytes, templates: dict[str, Template], node: Node) -> Iterator[Template]:
    """The templates that a node lies in, innermost first."""
    for ancestor in ancestors(node):
        if ancestor.type == "template_declaration":
            for template in templates.values():
                if template.node.id == ancestor.id:
                    yield template


def _arguments(text: bytes, use: Node) -> list[Node]:
    listed = use.child_by_field_name("arguments")
    return [] if listed is None else [c for c in listed.named_children if c.type != "comment"]


def analyse(text: bytes, root: Node) -> dict[str, Template]:
    """The templates with the values of their parameters."""
    templates = find(text, root)
    types = {
        of(text, n.child_by_field_name("name")).decode()
        for n in walk(root)
        if n.type == "struct_specifier"
        and n.child_by_field_name("name") is not None
        and n.parent.type != "template_declaration"
        and not _holders(text, n)
    } | {"float", "int"}
    known = known_constants(text, root)
    bare: set[str] = set()
    for node in walk(root):
        if node.type in _USES:
            name = of(text, node.child_by_field_name("name")).decode()
            if name in templates:
                templates[name].uses.append(node)
        elif node.type in ("identifier", "type_identifier", "field_identifier"):
            name = of(text, node).decode()
            if name in templates and node.parent.type not in _USES:
                template = templates[name]
                inside = any(a.id == template.node.id for a in ancestors(node))
                if template.is_function:
                    declares = inside and any(
                        a.type in ("function_declarator",)
                        and node.start_byte < a.start_byte + 80
                        and a.child_by_field_name("declarator").id == node.id
                        for a in ancestors(node)
                    )
                    if not declares:
                        bare.add(name)
                elif not inside:
                    bare.add(name)
    for name in bare:
        for parameter in templates[name].parameters:
            parameter.value = _DEDUCED
    _propagate(text, templates, types, known)
    if _guess(templates):
        _propagate(text, templates, types, known)
    for template in templates.values():
        for parameter in template.parameters:
            if parameter.value is _DEDUCED:
                parameter.value = _ANY
    return templates


def _propagate(text: bytes, templates: dict[str, Template], types: set[str], known: Known) -> None:
    """Collects the values of parameters from all uses, until no more is found."""
    changed = True
    while changed:
        changed = False
        for template in templates.values():
            for use in template.uses:
                arguments = _arguments(text, use)
                for i, parameter in enumerate(template.parameters):
                    if parameter.value in (_ANY, _DEDUCED):
                        continue
                    if i < len(arguments):
                        value = _resolve(text, templates, types, known, arguments[i])
                    elif parameter.default is not None and not template.is_function:
                        plain = parameter.default
                        value = plain if _LITERAL.fullmatch(plain) else _ANY
                    else:
                        value = _ANY
                    if value is None or value == parameter.value:
                        continue
                    parameter.value = value if parameter.value is None else _ANY
                    changed = True


def _guess(templates: dict[str, Template]) -> bool:
    """A deduced type is taken for the one that parameters of its name have elsewhere."""
    found = False
    parameters = [p for t in templates.values() for p in t.parameters]
    for parameter in parameters:
        if parameter.value is _DEDUCED:
            named = [p.value for p in parameters if p.name == parameter.name]
            known = {value for value in named if isinstance(value, str)}
            only = known.pop() if len(known) == 1 else None
            if isinstance(only, str):
                parameter.value = only
                found = True
    return found


def _alias(text: bytes, node: Node, name: str) -> Node | None:
    """What an alias of this name stands for, in the scopes around a node."""
    for ancestor in ancestors(node):
        if ancestor.type not in ("compound_statement", *SCOPES):
            continue
        for child in ancestor.children:
            if child.type != "alias_declaration" or child.end_byte > node.start_byte:
                continue
            if of(text, child.child_by_field_name("name")).decode() == name:
                return child.child_by_field_name("type")
    return None


def _resolve(
    text: bytes, templates: dict[str, Template], types: set[str], known: Known, argument: Node
) -> object:
    source = of(text, argument).decode()
    for template in _scope(text, templates, argument):
        for parameter in template.parameters:
            if parameter.name == source:
                return None if parameter.value is _DEDUCED else parameter.value
    alias = _alias(text, argument, source)
    if alias is not None:
        return _resolve(text, templates, types, known, alias)
    if source in _others(text, templates, argument):
        return None  # whatever it is, the compiler tells
    if _LITERAL.fullmatch(source) or source in types:
        return source
    if source.startswith("typename "):
        return None  # whatever it is, the compiler tells
    value = constant_of(text, known, argument)
    return _ANY if value is None else str(value).lower()


def _others(text: bytes, templates: dict[str, Template], node: Node) -> set[str]:
    """Parameters that are types, of the templates around a node that are not in ``templates``."""
    known = {t.node.id for t in templates.values()}
    return {
        of(text, name).decode()
        for ancestor in ancestors(node)
        if ancestor.type == "template_declaration" and ancestor.id not in known
        for parameter in ancestor.child_by_field_name("parameters").named_children
        if parameter.type == "type_parameter_declaration"
        for name in parameter.named_children
    }


def selections(text: bytes, root: Node, choice: int) -> Iterator[Edit]:
    """Each ``Select<condition, type, type>::Type`` by its argument of that number."""
    for node in walk(root):
        scope = node.child_by_field_name("scope") if node.type == "qualified_identifier" else None
        if scope is None or scope.type != "template_type":
            continue
        arguments = _arguments(text, scope)
        names = [of(text, n.child_by_field_name("name")) for n in (scope, node)]
        if names == [b"Select", b"Type"] and len(arguments) == 3:
            whole = node.parent if node.parent.type == "dependent_type" else node
            yield Edit(whole.start_byte, whole.end_byte, of(text, arguments[choice]))


def specialised(text: bytes, only: str | None = None) -> bytes:
    """The text without the parameters that have one value, of all templates or of one."""
    root = parse(text)
    templates = analyse(text, root)
    edits: list[Edit] = []
    for template in templates.values():
        if only is not None and template.name != only:
            continue
        fixed = {i for i, p in enumerate(template.parameters) if isinstance(p.value, str)}
        if not fixed:
            continue
        listed = template.node.child_by_field_name("parameters")
        left = [p for i, p in enumerate(template.parameters) if i not in fixed]
        if left:
            kept = b", ".join(of(text, p.node) for p in left)
            edits.append(Edit(listed.start_byte, listed.end_byte, b"<" + kept + b">"))
        else:
            inner = next(
                c for c in reversed(template.node.children) if c.is_named and c.type != "comment"
            )
            edits.append(Edit(template.node.start_byte, inner.start_byte))
        for use in template.uses:
            arguments = _arguments(text, use)
            rest = [a for i, a in enumerate(arguments) if i not in fixed]
            if not rest and left:
                at = use.child_by_field_name("arguments")
                if template.is_function:
                    edits.append(Edit(at.start_byte, at.end_byte))
                else:
                    edits.append(Edit(at.start_byte + 1, at.end_byte - 1))
            elif not rest:
                at = use.child_by_field_name("arguments")
                edits.append(Edit(at.start_byte, at.end_byte))
            else:
                for i, argument in enumerate(arguments):
                    if i in fixed:
                        end = argument.end_byte
                        start = argument.start_byte
                        if i + 1 < len(arguments):
                            end = arguments[i + 1].start_byte
                        else:
                            before = [j for j in range(i) if j not in fixed]
                            start = arguments[before[-1]].end_byte if before else start
                            end = argument.end_byte
                        edits.append(Edit(start, end))
        values = {p.name: p.value for i, p in enumerate(template.parameters) if i in fixed}
        for node in walk(template.node):
            if node.type == "preproc_call":
                line = of(text, node).decode()
                for name, value in values.items():
                    line = re.sub(rf"\b{name}\b", str(value), line)
                edits.append(Edit(node.start_byte, node.end_byte, line.encode()))
            if node.type not in ("identifier", "type_identifier", "namespace_identifier"):
                continue
            source = of(text, node).decode()
            if source in values and node.start_byte >= listed.end_byte:
                edits.append(Edit(node.start_byte, node.end_byte, str(values[source]).encode()))
    edits.sort(key=lambda e: (e.start, -e.end))
    kept_edits: list[Edit] = []
    for edit in edits:
        if not kept_edits or edit.start >= kept_edits[-1].end:
            kept_edits.append(edit)
    return apply(text, kept_edits)


def candidates(text: bytes) -> list[str]:
    """Templates that have a parameter of one value."""
    return [
        t.name
        for t in analyse(text, parse(text)).values()
        if any(isinstance(p.value, str) for p in t.parameters)
    ]


def instances(text: bytes, root: Node) -> dict[str, str]:
    """The types of templates whose parameters all have one value, by the templates' names."""
    found = {}
    for template in analyse(text, root).values():
        values = [p.value for p in template.parameters if isinstance(p.value, str)]
        if len(values) == len(template.parameters) and not template.is_function:
            found[template.name] = f"{template.name}<{', '.join(values)}>"
    return found
