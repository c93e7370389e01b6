"""The names that plugins may import: the same for type checkers and for Python, each imported when it is used."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from hocket import api


def names_for_type_checkers() -> dict[str, str]:
    tree = ast.parse(Path(api.__file__).read_text())
    [block] = [
        node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    names = {alias.asname or "": str(node.module) for node in imports for alias in node.names}
    # What Python resolves may be a module itself.
    return {
        name: full if (full := f"{module}.{name}") in sys.modules else module
        for name, module in names.items()
    }


def test_type_checkers_and_python_have_the_same_names() -> None:
    for name in api._HOMES:
        getattr(api, name)
    assert names_for_type_checkers() == api._HOMES


@pytest.mark.parametrize("name", sorted(api._HOMES))
def test_every_name_is_there(name: str) -> None:
    assert getattr(api, name) is getattr(api, name)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'hocket\.api' has no attribute 'Nothing'"):
        api.Nothing  # type: ignore[attr-defined]  # noqa: B018


def test_what_registers_a_plugin_imports_no_torch() -> None:
    check = "import sys; from hocket.api import draws, hookimpl; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)
