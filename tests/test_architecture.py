"""The structure that docs/architecture.md draws: folders, layers, no circles, sizes that a reader can hold."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "sakiyomi"
LAYERS = (
    ("cli",),
    ("scale",),
    ("server", "evaluation"),
    ("train",),
    ("engine",),
    ("drafters",),
    ("model_executor",),
    ("cache", "sampling"),
    ("kernels", "theory"),
    ("core",),
)
"""The top one first; folders of one layer do not know each other."""
FUNCTION, CLASS, ATTRIBUTES, SETTINGS = 80, 300, 25, 15


@functools.cache
def modules() -> dict[str, ast.Module]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def imported(tree: ast.Module) -> Iterator[str]:
    """Modules of the package that a module names in an import, whenever that runs, or in `import_module("...")`."""
    known = modules()
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where something is from"
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
            names = [node.args[0].value] if isinstance(node.args[0], ast.Constant) else []
        longest = [name for name in names if name in known]
        yield from [name for name in longest if not any(other.startswith(f"{name}.") for other in longest)]


@functools.cache
def edges() -> dict[str, set[str]]:
    """What each module imports of the package."""
    return {name: set(imported(tree)) - {name} for name, tree in modules().items()}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that reach each other (Tarjan 1972, doi 10.1137/0201010)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in graph.get(name, ()):
            if other not in order:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], order[other])
        if low[name] == order[name]:
            at = stack.index(name)
            found.append(stack[at:])
            del stack[at:]

    for name in graph:
        if name not in order:
            visit(name)
    return [sorted(group) for group in found if len(group) > 1]


def upward(graph: dict[str, set[str]]) -> list[str]:
    """Imports of a folder above, or beside, the importer's own."""
    rank = {folder: i for i, layer in enumerate(LAYERS) for folder in layer}
    found = []
    for name, others in graph.items():
        for other in others:
            here, there = (part.split(".")[1] if "." in part else "" for part in (name, other))
            if here != there and here in rank and there in rank and rank[there] <= rank[here]:
                found.append(f"{name} -> {other}")
    return found


def test_the_package_root_holds_the_folders_and_nothing_else() -> None:
    files = {"__init__.py", "__main__.py", "py.typed", "models"}
    there = {path.name for path in PACKAGE.iterdir() if path.name != "__pycache__"}
    assert there == files | {folder for layer in LAYERS for folder in layer}


@pytest.mark.thorough
def test_imports_run_downwards() -> None:
    assert upward(edges()) == []


def test_there_are_no_circles() -> None:
    assert circles(edges()) == []


def test_circles_and_upward_imports_are_seen() -> None:
    graph = {"p.core.a": {"p.core.b"}, "p.core.b": {"p.core.c"}, "p.core.c": {"p.core.a", "p.engine.d"}}
    assert circles(graph) == [["p.core.a", "p.core.b", "p.core.c"]]
    assert upward(graph) == ["p.core.c -> p.engine.d"]


def test_tests_mirror_the_package() -> None:
    folders = {folder for layer in LAYERS for folder in layer}
    beside = {"golden", "property", "statistical", "recipes", "__pycache__", "no-profiles"}
    there = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()}
    assert there - beside <= folders
    assert folders - there == set()


def lengths(kind: type[ast.AST] | tuple[type[ast.AST], ...]) -> Iterator[tuple[str, ast.AST, int]]:
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, kind):
                yield f"{name}.{node.name}", node, node.end_lineno - node.lineno + 1  # type: ignore[attr-defined]


def test_functions_fit_on_a_screen() -> None:
    found = [(name, size) for name, _, size in lengths((ast.FunctionDef, ast.AsyncFunctionDef)) if size > FUNCTION]
    assert found == []


def attributes(node: ast.ClassDef) -> set[str]:
    """What a class and its methods set on `self`, and its fields."""
    found = {
        item.target.id for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    for part in ast.walk(node):
        stored = isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)
        if stored and isinstance(part.value, ast.Name) and part.value.id == "self":  # type: ignore[attr-defined]
            found.add(part.attr)  # type: ignore[attr-defined]
    return found - {"_"}  # dataclasses.KW_ONLY is no field


@pytest.mark.thorough
def test_classes_fit_in_a_head() -> None:
    """Lines; and attributes, those of bases in the package included."""
    # The server's bodies have the fields of another's API.
    listed = {
        name: node
        for name, node, _ in lengths(ast.ClassDef)
        if isinstance(node, ast.ClassDef) and name.split(".")[:3] != ["sakiyomi", "server", "schema"]
    }
    classes = {node.name: node for node in listed.values()}

    def everything(node: ast.ClassDef) -> set[str]:
        bases = [classes[base.id] for base in node.bases if isinstance(base, ast.Name) and base.id in classes]
        return attributes(node).union(*(everything(base) for base in bases if base is not node))

    long = [(name, size) for name, _, size in lengths(ast.ClassDef) if size > CLASS]
    sizes = {name: len(everything(node)) for name, node in listed.items()}
    wide = [(name, size) for name, size in sizes.items() if size > ATTRIBUTES]
    assert (long, wide) == ([], [])


def test_settings_are_few() -> None:
    """What two commands share are groups of settings; a class of settings is a command's own, or a base of several."""
    folders = ("sakiyomi.evaluation.", "sakiyomi.train.")
    named = [name for name, *_ in lengths(ast.ClassDef) if name.startswith(folders) and name.endswith("Config")]
    assert len(named) <= SETTINGS, named


@functools.cache
def unparsed() -> dict[str, str]:
    """The code of every module, without its comments."""
    return {name: ast.unparse(tree) for name, tree in modules().items()}


@pytest.mark.parametrize("word", ["PackedModel", "OwnAttention", "DevicePass", "Undrafted", "Surroundings", "Guesser"])
def test_retired_names_do_not_come_back(word: str) -> None:
    assert [name for name, code in unparsed().items() if word in code] == []
