"""What holds for every package's tests."""

from __future__ import annotations

import gc

from hypothesis import settings

from hocket.training.startup import defer_dynamo

# How long an example takes says nothing here: other processes share the machine.
settings.register_profile("hocket", deadline=None)
settings.load_profile("hocket")

# The tests' own processes start a second earlier, too.
defer_dynamo()


def pytest_collection_finish() -> None:
    """Leave torch's modules and the tests themselves, a million objects, out of every later garbage collection."""
    gc.collect()
    gc.freeze()
