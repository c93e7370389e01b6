"""The names that plugins may import: few, all there, and each imported when it is used."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

from hocket import api

#: An author reads all of them before the first line.
MOST_NAMES = 75


def test_every_name_of_the_table_is_found() -> None:
    defined = {name for name in dir(api) if hasattr(import_module(api._HOMES[name]), name)}
    found = {name for name in dir(api) if getattr(api, name)}
    assert found - defined <= {
        "draws",
        "messages",
        "schedule",
        "sync",
    }  # modules that nobody has imported before
    assert len(found) <= MOST_NAMES


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'hocket\.api' has no attribute 'Nothing'"):
        api.Nothing  # type: ignore[attr-defined]  # noqa: B018


def test_what_registers_a_plugin_imports_no_torch() -> None:
    check = "import sys; from hocket.api import draws, hookimpl; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)
