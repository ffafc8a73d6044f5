"""Removes from a kernel's text what its machine code does not need.

Each pass proposes edits; those stay with which the compiler's PTX is the same, byte for byte. So a
pass may guess: what it must not do is leave text that is wrong for other compilers, and therefore
none touches pragmas, attributes, qualifiers or single statements.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from convt3d.export.tidy.chunks import introduced, join, names_of, ordered, split
from convt3d.export.tidy.constants import constants, enumerators, known_constants, values_of
from convt3d.export.tidy.coverage import arm_key, arms_of, coverage, is_if_constexpr, outer
from convt3d.export.tidy.oracle import CompileError, Oracle, error_lines
from convt3d.export.tidy.simplify import rewritings, substitutions
from convt3d.export.tidy.specialise import candidates, instances, selections, specialised
from convt3d.export.tidy.syntax import (
    SCOPES,
    Edit,
    Node,
    apply,
    arm_start,
    declared_name,
    enclosing,
    innermost,
    is_constexpr,
    of,
    outermost,
    parse,
    walk,
    with_comments,
    words,
)


class Shaker:
    """The text of some kernels in the course of its reduction."""

    def __init__(self, text: str, oracle: Oracle, log: Callable[[str], None]) -> None:
        self.text = text.encode()
        self.oracle = oracle
        self.log = log
        self.refused: set[tuple[bytes, bytes]] = set()  # edits that change the PTX

    def run(self) -> str:
        """All passes until none finds more."""
        passes = (
            self.drop_unreached,
            self.fold_conditions,
            self.drop_unreached,
            self.drop_uncovered,
            self.drop_asserts,
            self.drop_unnamed,
            self.drop_overloads,
            self.arrange,
            self.drop_forward,
            self.drop_selections,
            self.specialise,
            self.drop_usings,
            self.fold_constants,
            self.specialise,  # whose types have constants that functions of theirs computed
            self.substitute,
            self.simplify,
            self.make_constexpr,
            self.drop_unreferenced,
            self.drop_unread,
        )
        before = 2 * len(self.text)
        while len(self.text) < 0.97 * before:
            before = len(self.text)
            for step in passes:
                lines = self.text.count(b"\n")
                compiled, begin = self.oracle.compiled, time.perf_counter()
                self._checked(step)
                after, tried = self.text.count(b"\n"), self.oracle.compiled - compiled
                self.log(
                    f"{step.__name__}: {lines} to {after} lines, {tried} programs, "
                    f"{time.perf_counter() - begin:.1f} s"
                )
        return self.text.decode()

    def _checked(self, step: Callable[[], None]) -> None:
        """A pass that looks at one build first, and at all where that was too little."""
        before = self.text
        self.oracle.hasty = True
        step()
        self.oracle.hasty = False
        if self.text != before and not self.oracle.accepts(self.text.decode()):
            self.text = before
            self.refused.clear()
            step()

    # ---------------------------------------------------------------- edits

    def keep(self, edits: Iterable[Edit], budget: int = 40) -> int:
        """Make those of the edits with which the PTX stays; how many these are.

        Halves of what is not accepted are tried again, until ``budget`` programs were compiled.
        """
        proposed = [e for e in outermost(edits) if self._place(e) not in self.refused]
        kept: list[Edit] = []

        begin = self.oracle.compiled

        def attempt(some: Sequence[Edit]) -> None:
            if not some or self.oracle.compiled - begin > budget:
                return
            if self.oracle.accepts(apply(self.text, [*kept, *some]).decode()):
                kept.extend(some)
            elif len(some) > 1:
                half = len(some) // 2
                # What stands later needs what stands before it, so it goes first.
                attempt(some[half:])
                attempt(some[:half])
            else:
                self.refused.add(self._place(some[0]))

        attempt(proposed)
        self.text = apply(self.text, kept)
        return len(kept)

    def _place(self, edit: Edit) -> tuple[bytes, bytes]:
        """What an edit does, with the text around it."""
        around = self.text[max(0, edit.start - 80) : edit.end + 80]
        return around, edit.text

    # ---------------------------------------------------------------- declarations

    def drop_uncovered(self) -> None:
        """Functions and arms of conditions that nothing reaches."""
        covered, marks = coverage(self.text, self.oracle)
        edits = []
        for number, (_, node) in marks.items():
            if number in covered or node.type != "function_definition":
                continue
            edits.append(with_comments(self.text, outer(node)))
        self.keep(edits)

    def drop_unnamed(self) -> None:
        """Declarations whose names occur nowhere else."""
        while True:
            count = words(self.text)
            edits = []
            for node, name in self._named():
                own = words(of(self.text, node))
                function = enclosing(node, ("function_definition",))
                around = count
                if function is not None and node.parent.type == "compound_statement":
                    around = words(of(self.text, function))
                if around[name] == own[name]:
                    edits.append(with_comments(self.text, node))
            if not self.keep(edits):
                return

    def drop_unreferenced(self) -> None:
        """Variables of functions that the compiler knows of no use of."""
        while True:
            unused = self.oracle.unreferenced(self.text.decode())
            edits = []
            for node in walk(parse(self.text)):
                if node.type != "declaration" or node.parent.type != "compound_statement":
                    continue
                declarators = node.children_by_field_name("declarator")
                for i, declarator in enumerate(declarators):
                    name = next((n for n in walk(declarator) if n.type == "identifier"), None)
                    if name is None:
                        continue
                    line = name.start_point[0] + 1
                    if (line, of(self.text, name).decode()) not in unused:
                        continue
                    if len(declarators) == 1:
                        edits.append(with_comments(self.text, node))
                    elif i > 0:
                        edits.append(Edit(declarators[i - 1].end_byte, declarator.end_byte))
                    else:
                        edits.append(Edit(declarator.start_byte, declarators[1].start_byte))
            if not self.keep(edits):
                return

    def drop_unread(self) -> None:
        """Variables of functions that are set and never read, with what sets them."""
        for line, name in sorted(self.oracle.unread(self.text.decode()), reverse=True):
            for node in walk(parse(self.text)):
                names = [n for n in walk(node) if n.type == "identifier"]
                if node.type != "declaration" or node.parent.type != "compound_statement":
                    continue
                if [of(self.text, n).decode() for n in names] != [name]:
                    continue
                if names[0].start_point[0] + 1 == line:
                    edits = [
                        with_comments(self.text, n) for n in (node, *self._settings(node, name))
                    ]
                    text = apply(self.text, edits)
                    if self.oracle.accepts(text.decode()):
                        self.text = text
                    break

    def _settings(self, declaration: Node, name: str) -> Iterator[Node]:
        """Statements that set a variable to a constant."""
        for node in walk(declaration.parent):
            if node.type == "expression_statement" and re.fullmatch(
                rf"{name} = [\w.]+;", of(self.text, node).decode()
            ):
                yield node

    def drop_unreached(self) -> None:
        """Declarations that the entry points do not name, nor what those name, and so on."""
        nodes = [
            n
            for n in walk(parse(self.text))
            if n.parent is not None
            and n.parent.type in ("declaration_list", "translation_unit", "linkage_specification")
            and n.is_named
            and n.type not in ("comment", "namespace_definition", "linkage_specification")
            and not n.type.startswith("preproc")
        ]
        texts = [of(self.text, n) for n in nodes]
        named = [set(names_of(text.decode())) for text in texts]
        where: dict[str, list[int]] = {}
        for i, names in enumerate(named):
            for name in names:
                where.setdefault(name, []).append(i)
        pending = [i for i, text in enumerate(texts) if b"__global__" in text or not named[i]]
        reached = set(pending)
        while pending:
            for name in words(texts[pending.pop()]):
                for j in where.get(name, ()):
                    if j not in reached:
                        reached.add(j)
                        pending.append(j)
        self.keep(with_comments(self.text, n) for i, n in enumerate(nodes) if i not in reached)

    def drop_asserts(self) -> None:
        """Assertions about numbers, which are known here."""
        nodes = [n for n in walk(parse(self.text)) if n.type == "static_assert_declaration"]
        self.keep(with_comments(self.text, n) for n in nodes)

    def drop_forward(self) -> None:
        """Declarations of types that are defined in time."""
        types: dict[str, list[Node]] = {}
        for node in walk(parse(self.text)):
            name = node.child_by_field_name("name")
            if node.type in ("struct_specifier", "class_specifier") and name is not None:
                types.setdefault(of(self.text, name).decode(), []).append(node)
        edits = []
        for nodes in types.values():
            bodies = [node.child_by_field_name("body") is not None for node in nodes]
            for node, body in zip(nodes, bodies, strict=True):
                if not body and any(bodies) and outer(node).parent.type in SCOPES:
                    edits.append(with_comments(self.text, outer(node)))
        self.keep(edits)

    def drop_usings(self) -> None:
        """Names of bases that a type finds without being told."""
        nodes = [n for n in walk(parse(self.text)) if n.type == "using_declaration"]
        self.keep(with_comments(self.text, n) for n in nodes)

    def drop_overloads(self) -> None:
        """Functions of which several in one scope share a name, one by one."""
        names: dict[tuple[int, str], list[Node]] = {}
        for node in walk(parse(self.text)):
            inner = node.children[-1] if node.type == "template_declaration" else node
            if inner.type != "function_definition" or node.parent.type not in SCOPES:
                continue
            name = declared_name(self.text, node)
            if name is not None:
                names.setdefault((node.parent.id, name), []).append(node)
        nodes = [n for alike in names.values() if len(alike) > 1 for n in alike]
        for edit in reversed(outermost(with_comments(self.text, n) for n in nodes)):
            self.keep([edit])  # several of a name depend on each other: halves would not do

    def _named(self) -> Iterator[tuple[Node, str]]:
        """Declarations at the top, in types and in functions, with the names they declare."""
        for node in walk(parse(self.text)):
            if node.parent is None:
                continue
            if node.parent.type in SCOPES or (
                node.parent.type == "compound_statement"
                and node.type in ("declaration", "alias_declaration")
            ):
                name = declared_name(self.text, node)
                if name is not None:
                    yield node, name

    # ---------------------------------------------------------------- conditions

    def make_constexpr(self) -> None:
        """Turns `if` into `if constexpr` where the condition is a constant."""
        candidates = []
        for node in walk(parse(self.text)):
            if node.type != "if_statement" or is_if_constexpr(node):
                continue
            function = enclosing(node, ("function_definition",))
            if function is None:
                continue
            candidates.append(node)
        while candidates:
            text, lines = self._with_conditions(candidates)
            try:
                self.oracle.ptx(text.decode())
                break
            except CompileError as error:
                wrong = {lines[n] for n in error_lines(error) if n in lines}
                if not wrong:
                    return
                candidates = [c for i, c in enumerate(candidates) if i not in wrong]
        edits = []
        for node in candidates:
            at = node.start_byte + 2
            edits.append(Edit(at, at, b" constexpr"))
        self.keep(edits)

    def _with_conditions(self, nodes: Sequence[Node]) -> tuple[bytes, dict[int, int]]:
        """The text with these conditions constant, each on a line of its own; the lines."""
        edits = []
        for i, node in enumerate(nodes):
            condition = node.child_by_field_name("condition")
            inner = of(self.text, condition)[1:-1].replace(b"\n", b" ")
            edits.append(
                Edit(
                    node.start_byte + 2,
                    condition.end_byte,
                    b" constexpr (\n/*@@%d*/ (" % i + inner + b")\n)",
                )
            )
        # Edits of conditions never overlap: an `if` in another one's arm is behind its condition.
        text = apply(self.text, edits)
        lines = {}
        for number, line in enumerate(text.split(b"\n"), 1):
            match = re.match(rb"/\*@@(\d+)\*/", line)
            if match:
                lines[number] = int(match.group(1))
        return text, lines

    def fold_conditions(self) -> None:
        """Conditions known at compile time leave the arm that is compiled."""
        while True:
            covered, marks = coverage(self.text, self.oracle)
            number_of = {key: number for number, (key, _) in marks.items()}
            edits, single = [], []
            for node in self._conditions():
                arms = arms_of(node)
                function = enclosing(node, ("function_definition",))
                if function is not None and is_constexpr(self.text, function):
                    single.append((node, arms))
                    continue
                live = [number_of.get(arm_key(node, a)) in covered for a in arms]
                if all(live) or not any(live):
                    continue
                if live[0]:
                    edits.append(self._replaced(node, arms[0]))
                else:
                    edits.append(self._replaced(node, arms[1]))
            made = self.keep(edits)
            if not made:
                break
        for node, arms in reversed(single):
            for arm in arms:
                edit = self._replaced(node, arm)
                if self.oracle.accepts(apply(self.text, [edit]).decode()):
                    self.text = apply(self.text, [edit])
                    break

    def _conditions(self) -> list[Node]:
        nodes = (n for n in walk(parse(self.text)) if n.type == "if_statement")
        return [n for n in nodes if is_if_constexpr(n)]

    def _replaced(self, node: Node, arm: Node | None) -> Edit:
        """An edit that leaves one arm of a condition, or nothing."""
        parent = node.parent
        within = parent.type in ("compound_statement", "else_clause")
        if arm is None:
            if parent.type == "else_clause":
                return Edit(parent.start_byte, parent.end_byte)
            if parent.type == "compound_statement":
                return with_comments(self.text, node)
            return Edit(node.start_byte, node.end_byte, b"{}")
        inner = of(self.text, arm)
        if arm.type != "compound_statement":
            inner = self.text[arm_start(node, arm) : arm.end_byte].strip()
        if arm.type == "compound_statement" and parent.type == "compound_statement" and within:
            inner = inner[1:-1].strip()
        return Edit(node.start_byte, node.end_byte, inner)

    # ---------------------------------------------------------------- templates

    def drop_selections(self) -> None:
        """Types that a condition selects are the one or the other."""
        while True:
            before = self.text
            for choice in (1, 2):
                self.keep(selections(self.text, parse(self.text), choice))
            if self.text == before:
                return

    def arrange(self) -> None:
        """All declarations in one namespace, each after those that it needs."""
        head, chunks = split(self.text.decode())
        text = join(head, ordered(introduced(chunks)))
        if self.oracle.accepts(text):
            self.text = text.encode()

    def specialise(self) -> None:
        """Parameters of templates that have one value."""
        tried: set[str] = set()

        def attempt(only: str | None) -> bool:
            text = specialised(self.text, only)
            if text == self.text:
                return False
            head, chunks = split(text.decode())
            made = join(head, ordered(chunks))
            if not self.oracle.accepts(made):
                return False
            self.text = made.encode()
            return True

        if attempt(None):
            return
        while True:
            names = [n for n in candidates(self.text) if n not in tried]
            if not names:
                return
            tried.add(names[0])
            attempt(names[0])

    # ---------------------------------------------------------------- numbers

    def substitute(self) -> None:
        """Switches, zeros and ones stand where they are used; other numbers keep their names."""
        root = parse(self.text)
        self.keep(substitutions(self.text, root, known_constants(self.text, root)), budget=30)
        self.drop_unnamed()

    def simplify(self) -> None:
        """What is left of expressions with known parts."""
        while True:
            root = parse(self.text)
            edits = innermost(rewritings(self.text, root, known_constants(self.text, root)))
            if not self.keep(edits, budget=20):
                return

    def fold_constants(self) -> None:
        """Constants of types and namespaces become the numbers that they are."""
        root = parse(self.text)
        found = list(constants(self.text))
        # Of templates, those whose parameters have one value.
        named = instances(self.text, root)
        for node, path, is_bool in constants(self.text, templates=True):
            parts = path.split("::")
            if len(parts) == 3 and parts[1] in named:
                parts[1] = named[parts[1]]
                found.append((node, "::".join(parts), is_bool))
        enumerations = enumerators(self.text, root)
        values = values_of(self.text, self.oracle, [path for _, path, _ in found])
        edits = []
        for node, path, is_bool in found:
            value = values.get(path)
            scope, *name = of(self.text, node).decode().split("::")
            if value is None or (name and scope in enumerations):
                continue
            literal = ("true" if value else "false") if is_bool else str(value)
            if of(self.text, node).decode() != literal:
                edits.append(Edit(node.start_byte, node.end_byte, literal.encode()))
        self.keep(edits)
