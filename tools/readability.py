"""Measures of what a reader has to carry: sentences that are read twice, names that mean two things, sizes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from source_tree import Module, SourceTree

LONG_FILE, LONG_FUNCTION = 400, 40

#: Parts that override one contract, which may share its name.
OVERRIDES = frozenset({"Clock", "Memory", "Threads", "Status"})

PAGES = ("docs/architecture.md", "README.md")

_RIDDLE = re.compile(r"(What|How|Who|Whose|Which|Whether|Where|When)\b")
_TOLD = re.compile(r"^\s*told\s*(?::[^=]+)?=[^=]|\bfor told in\b|\bas told\b", re.MULTILINE)
_Documented = ast.ClassDef | ast.Module | ast.FunctionDef
_KINDS = {ast.ClassDef: "classes", ast.Module: "modules", ast.FunctionDef: "functions"}


def readability(root: Path, source: SourceTree) -> dict[str, int | str]:
    """Return each measure of a repository by its name; docstrings as `riddles/all`."""
    modules = source.modules.values()
    counts: dict[str, int | str] = {
        f"files over {LONG_FILE} lines": sum(module.num_lines > LONG_FILE for module in modules),
        f"functions over {LONG_FUNCTION} lines": sum(map(_num_long_functions, modules)),
        "names of several classes": len(double_names(modules)),
        "assignments to told": sum(len(_TOLD.findall(module.text)) for module in modules),
    }
    documented = [node for module in modules for node in _documented(module)]
    for node_type, kind in _KINDS.items():
        found = [_is_riddle(node) for node in documented if isinstance(node, node_type)]
        counts[f"riddles of {kind}"] = f"{sum(found)}/{len(found)}"
    methods, names = source.methods("Session"), source.exports("hocket.api")
    counts["methods of Session"] = "-" if methods is None else len(methods)
    counts["names of hocket.api"] = "-" if names is None else len(names)
    for page in PAGES:
        path = root / page
        counts[f"words of {path.name}"] = len(path.read_text("utf-8").split()) if path.exists() else "-"
    return counts


def double_names(modules: Iterable[Module]) -> Mapping[str, list[str]]:
    """Return the places of the classes that share a name, by name; a leading underscore makes no other name."""
    places: dict[str, list[str]] = {}
    for module in modules:
        for node in module.classes:
            places.setdefault(node.name.strip("_"), []).append(f"{module.path}:{node.lineno}")
    return {name: where for name, where in sorted(places.items()) if len(where) > 1 and name not in OVERRIDES}


def riddles(modules: Iterable[Module]) -> Iterator[str]:
    """Yield the place and the first line of each docstring that begins as a question."""
    for module in modules:
        for node in _documented(module):
            if _is_riddle(node):
                first = (ast.get_docstring(node) or "").splitlines()[0]
                yield f"{module.path}:{getattr(node, 'lineno', 1)} {first}"


def _documented(module: Module) -> Iterator[_Documented]:
    for node in ast.walk(module.tree):
        if isinstance(node, _Documented) and ast.get_docstring(node):
            yield node


def _is_riddle(node: _Documented) -> bool:
    return bool(_RIDDLE.match(ast.get_docstring(node) or ""))


def _num_long_functions(module: Module) -> int:
    return sum(
        isinstance(node, ast.FunctionDef) and (node.end_lineno or node.lineno) - node.lineno >= LONG_FUNCTION
        for node in ast.walk(module.tree)
    )
