"""Runs on virtual ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def runs(hocket: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of runs: two strategies, three seeds, a rank that is late; 30 steps of 10 ms."""
    folder = tmp_path_factory.mktemp("runs")
    late = "delays={name: random_subset, count: 1, seconds: 0.01}"
    for recipe in ("sgd", "dpsgd"):
        for seed in range(3):
            arguments = ("epochs=3", f"seed={seed}", "compute={step_s: 0.01}", late, "--transport", "virtual")
            ended = hocket("run", recipe, "-n", "4", *arguments, "--out", str(folder / f"{recipe}-{seed}"))
            assert ended.status == 0, ended.err
    return folder
