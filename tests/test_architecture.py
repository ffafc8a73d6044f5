"""The package's structure: what imports what, and how long a file may be."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
PACKAGE = SOURCE / "convt3d"

LAYERS = {
    "foundations": (
        *("_version", "log", "progress", "environment", "operations", "geometry", "polyphase"),
        *("precision", "decisions", "dispatch", "guards", "arguments", "layout", "fusion"),
    ),
    "layers of PyTorch": ("native", "layer", "steps", "forms", "portable", "reference"),
    "kernels": ("cuda",),
    "calls": (
        *(
            "backends",
            "operands",
            "ops",
            "aten",
            "eager",
            "recipes",
            "fused_ops",
            "distributed",
            "functional",
        ),
        *("modules", "inference", "conversion", "warming", "compile"),
    ),
    "tools": ("", "drawing", "explanation", "doctor", "bench", "export"),
    "command line": ("cli", "__main__"),
}
"""Modules and subpackages from low to high: each imports from its own layer and those below."""

PYTHON_LINES, CUDA_LINES = 500, 600

Graph = dict[str, dict[str, int]]
"""Modules that each module imports, with the line of the first import."""


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, root: Path) -> Iterator[tuple[str, int]]:
    """Names that a file imports, at its top, inside functions and for type checkers, with lines.

    ``from a import b`` gives ``a.b``, which may be a module or a name in ``a``.
    """
    package = module_name(path, root).split(".")
    if path.name != "__init__.py":
        package.pop()

    def visit(node: ast.AST) -> Iterator[tuple[str, int]]:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((f"{start}.{alias.name}", node.lineno) for alias in node.names)
        for child in ast.iter_child_nodes(node):
            yield from visit(child)

    return visit(ast.parse(path.read_text()))


def import_graph(folder: Path) -> Graph:
    """The imports between the modules of a package.

    To import a module of a subpackage from outside is to import the subpackage, too. The package
    itself is left out of this: whatever is imported of it, it comes first.
    """
    paths = {module_name(path, folder.parent): path for path in sorted(folder.rglob("*.py"))}
    graph: Graph = {name: {} for name in paths}
    for name, path in paths.items():
        for imported, line in imports(path, folder.parent):
            target = imported if imported in paths else imported.rpartition(".")[0]
            if target not in paths or target == name:
                continue
            graph[name].setdefault(target, line)
            parts = target.split(".")
            for length in range(2, len(parts)):
                above = ".".join(parts[:length])
                if not f"{name}.".startswith(f"{above}."):
                    graph[name].setdefault(above, line)
    return graph


def circle(graph: Mapping[str, Mapping[str, int]]) -> list[str]:
    """The shortest way from a module back to itself, edge by edge; empty if there is none."""
    best: list[str] = []
    for start in graph:
        before: dict[str, str] = {}
        reached = [start]
        while reached and start not in before:
            further = []
            for module in reached:
                for target in graph[module]:
                    if target not in before:
                        before[target] = module
                        further.append(target)
            reached = further
        if start not in before:
            continue
        edges, at = [], start
        while not edges or at != start:
            edges.insert(0, f"{before[at]} imports {at} in line {graph[before[at]][at]}")
            at = before[at]
        if not best or len(edges) < len(best):
            best = edges
    return best


def layer_of(module: str) -> str | None:
    """The layer of a module, by its name below the package."""
    first = module.split(".")[1] if "." in module else ""
    return next((name for name, members in LAYERS.items() if first in members), None)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return import_graph(PACKAGE)


def test_no_module_imports_itself_through_others(graph: Graph) -> None:
    found = circle(graph)
    assert not found, "\n".join(["modules import each other in a circle:", *found])


def test_modules_import_from_their_own_layer_and_those_below(graph: Graph) -> None:
    order = list(LAYERS)
    upward = []
    for module, targets in graph.items():
        layer = layer_of(module)
        assert layer is not None, f"{module} is in no layer of tests/test_architecture.py"
        for target, line in targets.items():
            above = layer_of(target)
            assert above is not None
            if order.index(above) > order.index(layer):
                upward.append(f"{module} ({layer}) imports {target} ({above}) in line {line}")
    assert not upward, "\n".join(upward)


def test_a_file_is_read_in_one_sitting() -> None:
    limits = {".py": PYTHON_LINES, ".cu": CUDA_LINES, ".cuh": CUDA_LINES}
    long = {
        path.relative_to(PACKAGE).as_posix(): lines
        for path in sorted(PACKAGE.rglob("*"))
        if path.suffix in limits
        for lines in [len(path.read_text().splitlines())]
        if lines > limits[path.suffix]
    }
    assert not long, f"too long, split by idea: {long}"


def package_of(folder: Path, **files: str) -> Path:
    package = folder / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    for name, text in files.items():
        (package / f"{name}.py").write_text(textwrap.dedent(text))
    return package


def test_a_circle_through_a_function_is_seen(tmp_path: Path) -> None:
    package = package_of(
        tmp_path,
        a="from package import b\n",
        b="""
            def late():
                from . import c
                from .c import thing
        """,
        c="import package.a\nthing = 1\n",
    )
    graph = import_graph(package)
    assert graph == {
        "package": {},
        "package.a": {"package.b": 1},
        "package.b": {"package.c": 3},
        "package.c": {"package.a": 1},
    }
    assert circle(graph) == [
        "package.a imports package.b in line 1",
        "package.b imports package.c in line 3",
        "package.c imports package.a in line 1",
    ]


def test_a_circle_through_a_subpackage_is_seen(tmp_path: Path) -> None:
    package = package_of(tmp_path, a="from package.sub.b import thing\n")
    (package / "sub").mkdir()
    (package / "sub" / "__init__.py").write_text("from package.sub import b, c\n")
    (package / "sub" / "b.py").write_text("from package.sub.c import thing\n")
    (package / "sub" / "c.py").write_text("thing = 1\n")
    assert circle(import_graph(package)) == []
    (package / "sub" / "c.py").write_text("import package.a\nthing = 1\n")
    assert len(circle(import_graph(package))) == 3


def test_a_circle_through_a_type_is_seen(tmp_path: Path) -> None:
    package = package_of(
        tmp_path,
        a="from package.b import thing\n",
        b="""
            from typing import TYPE_CHECKING

            if TYPE_CHECKING:
                from package import a
            thing = 1
        """,
    )
    assert circle(import_graph(package)) == [
        "package.a imports package.b in line 1",
        "package.b imports package.a in line 5",
    ]
