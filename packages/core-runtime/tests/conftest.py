"""Fixtures of all tests of the package."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def interruptible() -> Iterator[None]:
    """Let Ctrl-C be heard by what tests start: whoever runs them in the background of a shell has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def with_muon() -> None:
    """Skip a test of torch's Muon where torch is older."""
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")


def pytest_collection_finish() -> None:
    """Notice tests that compose while they are collected: plugins are not hidden yet, and stay known.

    Raises:
        UsageError: there is one.
    """
    from hocket.plugin import default_registry

    if default_registry()._find.cache_info().currsize:
        raise pytest.UsageError("a test composes a strategy while it is collected: do so within the test")


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


class Ended(NamedTuple):
    """How a command ended."""

    status: int
    out: str
    err: str


@pytest.fixture(scope="session")
def hocket() -> Callable[..., Ended]:
    """Return a function that carries out a command in this process, on a terminal of 80 columns."""
    from hocket.cli.main import main

    def carry_out(*arguments: str) -> Ended:
        out, err = io.StringIO(), io.StringIO()
        status = 0
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            patch.setenv("COLUMNS", "80")
            patch.setattr(sys, "argv", ["hocket", *arguments])
            try:
                main()
            except SystemExit as ended:
                status = int(ended.code or 0)
        return Ended(status, out.getvalue(), err.getvalue())

    return carry_out
