"""Settings of all tests of the package: Lightning warns, and advertises nothing."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("lightning") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let Lightning warn: of few workers, of a logger that is not there, of torch's own deprecations."""
    for item in (each for each in items if each.path.parent == Path(__file__).parent):
        item.add_marker(pytest.mark.filterwarnings("ignore"))
