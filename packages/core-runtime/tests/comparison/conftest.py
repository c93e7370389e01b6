"""Runs on virtual ranks, and the command line in this process."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from hocket.cli.main import main


class Ended(NamedTuple):
    """How a command ended."""

    status: int
    out: str
    err: str


def call(*arguments: str) -> Ended:
    """Carry out a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.setattr(sys, "argv", ["hocket", *arguments])
        try:
            main()
        except SystemExit as ended:
            return Ended(int(ended.code or 0), out.getvalue(), err.getvalue())
    return Ended(0, out.getvalue(), err.getvalue())


@pytest.fixture
def hocket(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ended]:
    """Return a function that carries out a command on a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    return call


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of runs: two strategies, three seeds, a rank that is late; 30 steps of 10 ms."""
    folder = tmp_path_factory.mktemp("runs")
    late = "delays={name: random_subset, count: 1, seconds: 0.01}"
    for recipe in ("sgd", "dpsgd"):
        for seed in range(3):
            arguments = ("epochs=3", f"seed={seed}", "compute={step_s: 0.01}", late, "--transport", "virtual")
            ended = call("run", recipe, "-n", "4", *arguments, "--out", str(folder / f"{recipe}-{seed}"))
            assert ended.status == 0, ended.err
    return folder
