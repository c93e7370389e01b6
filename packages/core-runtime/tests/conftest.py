"""Fixtures of all tests of the package."""

from __future__ import annotations

import importlib.metadata
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(autouse=True, scope="session")
def interruptible() -> Iterator[None]:
    """Let Ctrl-C be heard by what tests start: whoever runs them in the background of a shell has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True, scope="package")
def no_plugins() -> Iterator[None]:
    """Hide the plugins of this environment: core's tests are the same with and without them."""
    find = importlib.metadata.entry_points

    def entry_points(**selection: Any) -> Any:
        if selection.get("group") != "hocket":
            return find(**selection)
        return [
            entry
            for entry in find(group="hocket")
            if entry.dist is None or not str(entry.dist.locate_file("")).startswith(sys.prefix)
        ]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.metadata, "entry_points", entry_points)
        yield
