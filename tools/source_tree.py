"""Modules, classes and imports of a Python source tree, read without importing any of it.

Imports within functions and those for type checkers count as all others do: they are what a reader has to follow.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path


@dataclass(frozen=True)
class Module:
    """A source file.

    Attributes:
        name: as it is imported, such as `hocket.transport.peer`; a package's name means its `__init__`.
        path: within the repository.
        text: its source.
    """

    name: str
    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, str(self.path))

    @cached_property
    def classes(self) -> tuple[ast.ClassDef, ...]:
        return tuple(node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef))

    @property
    def num_lines(self) -> int:
        return len(self.text.splitlines())

    @property
    def num_lines_of_code(self) -> int:
        """Lines that hold more than blanks, comments and docstrings."""
        lines: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type in (tokenize.NAME, tokenize.NUMBER, tokenize.OP, tokenize.STRING):
                lines.update(range(token.start[0], token.end[0] + 1))
        for docstring in _docstrings(self.tree):
            lines.difference_update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
        return len(lines)

    def num_lines_with(self, word: str) -> int:
        """The number of lines with the word, imports, comments and strings included."""
        return sum(bool(re.search(rf"\b{word}\b", line)) for line in self.text.splitlines())


class SourceTree:
    """The modules under some folders, each of which is on the import path."""

    def __init__(self, root: Path, folders: Iterable[Path]) -> None:
        """Read every Python file.

        Args:
            root: the repository.
            folders: the folders of top-level packages, such as `packages/core-runtime/src`.
        """
        self.modules = {module.name: module for folder in folders for module in _read(root, folder)}

    @cached_property
    def imports(self) -> Mapping[str, Set[str]]:
        """The modules of the tree that each module imports, by name."""
        return {name: frozenset(self._imported(module)) for name, module in self.modules.items()}

    def everything_imported(self, name: str) -> Set[str]:
        """Return all that a module imports, in the tree or not, as `package.module` or `package.module.name`."""
        return frozenset(full for full, _ in _import_statements(self.modules[name].tree))

    def folders(self, package: str) -> Mapping[str, Set[str]]:
        """Return the folders of a package that each folder imports.

        `hocket.transport.mpi` lies in `hocket.transport`.
        """
        graph: dict[str, set[str]] = {}
        for name, imported in self.imports.items():
            if name.startswith(f"{package}."):
                inside = {_folder(each) for each in imported if each.startswith(f"{package}.")}
                graph.setdefault(_folder(name), set()).update(inside - {_folder(name)})
        return graph

    def subclasses(self, base: str) -> set[str]:
        """Return the classes that derive from a class called `base`, directly or not, as `module.Class`."""
        return {
            name
            for name in self._classes
            if base in {each.rpartition(".")[2] for each in self._ancestors(name)}
        }

    def members(self, name: str) -> set[str] | None:
        """Return the public members of the class called `name`, inherited ones too; None where there is none.

        Methods, properties, annotated names and attributes assigned to `self` are members.
        """
        return self._members_of(name, _own_members)

    def methods(self, name: str) -> set[str] | None:
        """Return the public methods, properties and constants of a class, as `dir` shows them; None as `members`."""
        return self._members_of(name, _own_methods)

    def exports(self, module: str) -> set[str] | None:
        """Return the names that a module imports as themselves, to hand them on; None where there is no module."""
        if module not in self.modules:
            return None
        imports = [node for node in ast.walk(self.modules[module].tree) if isinstance(node, ast.ImportFrom)]
        return {alias.name for node in imports for alias in node.names if alias.asname == alias.name}

    def _members_of(self, name: str, own: Callable[[ast.ClassDef], Iterable[str]]) -> set[str] | None:
        full = next((each for each in self._classes if each.rpartition(".")[2] == name), None)
        if full is None:
            return None
        classes = [full, *self._ancestors(full)]
        return {member for each in classes for member in own(self._classes[each][1])}

    @cached_property
    def _classes(self) -> Mapping[str, tuple[Module, ast.ClassDef]]:
        return {
            f"{module.name}.{node.name}": (module, node)
            for module in self.modules.values()
            for node in module.classes
        }

    def _ancestors(self, name: str) -> Iterator[str]:
        """Yield the classes of the tree that a class derives from."""
        module, node = self._classes[name]
        for base in map(_last_name, node.bases):
            full = self._home(f"{module.name}.{base}")
            if full is not None and full != name:
                yield full
                yield from self._ancestors(full)

    def _home(self, name: str) -> str | None:
        """Return the class that `module.name` means, which the module may have imported from another."""
        if name in self._classes:
            return name
        module, _, attribute = name.rpartition(".")
        if module not in self.modules:
            return None
        for full, _ in _import_statements(self.modules[module].tree):
            if full.rpartition(".")[2] == attribute and full != name:
                return self._home(full)
        return None

    def _imported(self, module: Module) -> Iterator[str]:
        for full, source in _import_statements(module.tree):
            target = full if full in self.modules else source
            if target in self.modules and target != module.name:
                yield target


def circles(graph: Mapping[str, Set[str]]) -> list[list[str]]:
    """Return the sets of two or more nodes that reach each other, each sorted, the largest first."""
    reached = {node: _reachable(node, graph) for node in graph}
    found = {
        tuple(sorted(other for other in reached[node] if node in reached.get(other, ())))
        for node in graph
        if node in reached[node]
    }
    return sorted(
        (list(circle) for circle in found if len(circle) > 1), key=lambda circle: (-len(circle), circle)
    )


def _reachable(start: str, graph: Mapping[str, Set[str]]) -> set[str]:
    found: set[str] = set()
    ahead = [start]
    while ahead:
        new = graph.get(ahead.pop(), frozenset()) - found
        found |= new
        ahead += new
    return found


def _read(root: Path, folder: Path) -> Iterator[Module]:
    for path in sorted((root / folder).rglob("*.py")):
        parts = path.relative_to(root / folder).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        yield Module(name, path.relative_to(root), path.read_text(encoding="utf-8"))


def _import_statements(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield what is imported, with the last name where one is named, and the module that it is imported from."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            yield from ((f"{node.module}.{alias.name}", node.module) for alias in node.names)


def _folder(name: str) -> str:
    return ".".join(name.split(".")[:2])


def _docstrings(tree: ast.Module) -> Iterator[ast.Expr]:
    for node in ast.walk(tree):
        if (
            not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            or not node.body
        ):
            continue
        first = node.body[0]
        if (
            isinstance(first, ast.Expr)
            and isinstance(first.value, ast.Constant)
            and isinstance(first.value.value, str)
        ):
            yield first


def _last_name(base: ast.expr) -> str:
    if isinstance(base, ast.Subscript):
        base = base.value
    return base.attr if isinstance(base, ast.Attribute) else base.id if isinstance(base, ast.Name) else ""


def _own_methods(node: ast.ClassDef) -> Iterator[str]:
    for each in node.body:
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and not each.name.startswith("_"):
            yield each.name
        elif isinstance(each, ast.Assign) or (isinstance(each, ast.AnnAssign) and each.value is not None):
            targets = each.targets if isinstance(each, ast.Assign) else [each.target]
            yield from (t.id for t in targets if isinstance(t, ast.Name) and not t.id.startswith("_"))


def _own_members(node: ast.ClassDef) -> Iterator[str]:
    for each in ast.walk(node):
        name = ""
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each in node.body:
            name = each.name
        elif isinstance(each, ast.AnnAssign | ast.Assign) and each in node.body:
            targets = [each.target] if isinstance(each, ast.AnnAssign) else each.targets
            yield from (t.id for t in targets if isinstance(t, ast.Name) and not t.id.startswith("_"))
        elif isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
            name = each.attr if isinstance(each.value, ast.Name) and each.value.id == "self" else ""
        if name and not name.startswith("_"):
            yield name
