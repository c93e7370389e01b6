"""Models that FSDP2 or tensor parallelism shards within islands train as the same strategy on whole models does.

The oracle is a virtual rank for each island, with the whole model and all that the island reads.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from islands.cases import CASES, run_whole

import hocket

RANKS = Path(__file__).parent / "islands" / "ranks.py"


def started(folder: Path, module: str, ranks: int, names: Sequence[str] = ()) -> str:
    """Run a module of `islands` on ranks to their end; return what they have printed."""
    job = subprocess.run(
        [sys.executable, str(RANKS), str(folder), module, str(ranks), *names],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert job.returncode == 0, job.stdout + job.stderr
    return job.stdout + job.stderr


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("islands")
    started(folder, "trained", 4)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_as_whole_models(name: str, trained: Path) -> None:
    case = CASES[name]
    islands = range(case.shape[0])
    shards = [torch.load(trained / f"{name}.{island}.pt", weights_only=True) for island in islands]
    wholes = hocket.virtual(len(islands)).run(lambda: run_whole(case, hocket.join().rank))
    bound = 1e-12 if case.double else 1e-6
    for given, expected in zip(shards, wholes, strict=True):
        for kind in ("own", "mean", "outputs"):
            assert apart(given[kind], expected[kind]) <= bound, kind
        assert apart(given["restored"], given["own"]) == 0
        assert given["distance"] == pytest.approx(expected["distance"], rel=1e-6, abs=bound)
        assert given["skipped"] == expected["skipped"]


def apart(given: dict[str, Any], expected: dict[str, Any]) -> float:
    """Return the largest difference between tensors of the same names."""
    assert given.keys() == expected.keys()
    return max(float((given[name] - expected[name]).abs().max()) for name in expected)
