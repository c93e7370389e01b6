"""Fixtures of all tests of the package: one thread, as two give other bits, and Lightning without advertisements."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

# With --import-mode=importlib the modules beside the tests are not found by themselves.
sys.path.insert(0, str(Path(__file__).parent))

if find_spec("lightning") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let Lightning warn: of few workers, of a logger that is not there, of torch's own deprecations."""
    for item in (each for each in items if each.path.parent == Path(__file__).parent):
        item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
