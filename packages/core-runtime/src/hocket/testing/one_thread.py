"""A pytest plugin with which tests compute with one thread, as two give other bits.

The topmost `conftest.py` loads it:

    pytest_plugins = ["hocket.testing.one_thread"]
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Set torch's number of threads to 1 for the time of a test."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
