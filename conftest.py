"""What holds for every package's tests."""

from __future__ import annotations

import gc
import os

import pytest
from hypothesis import settings

from hocket.training.startup import defer_dynamo

# How long an example takes says nothing here: other processes share the machine.
settings.register_profile("hocket", deadline=None)
settings.load_profile("hocket")

# The tests' own processes start a second earlier, too.
defer_dynamo()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what takes long and says little more than the rest, but in `tools/test --full`."""
    if os.environ.get("HOCKET_CELLS") == "all":
        return
    for item in items:
        if item.get_closest_marker("full"):
            item.add_marker(pytest.mark.skip(reason="tools/test --full runs it"))


def pytest_collection_finish() -> None:
    """Leave torch's modules and the tests themselves, a million objects, out of every later garbage collection."""
    gc.collect()
    gc.freeze()
