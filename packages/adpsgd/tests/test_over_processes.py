"""Averagings of pairs over processes, against the replay of their order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pair_cases import Case, check, mean_at_start, mean_of, train_on

from hocket.testing.job import Job

HERE = Path(__file__).parent


def jobs() -> Sequence[Any]:
    mpi = [
        pytest.mark.mpi,
        pytest.mark.full,  # whose ranks do not share the start of one process
        pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed"),
    ]
    return [*(pytest.param(("mpi", size), marks=mpi) for size in (2, 4)), ("torch", 2)]


@pytest.fixture(scope="module", params=jobs(), ids=lambda given: f"{given[0]}-{given[1]}")
def job(request: pytest.FixtureRequest) -> Iterator[tuple[int, Job]]:
    transport, size = request.param
    with closing(Job(size, HERE, transport)) as ranks:
        yield size, ranks


@pytest.mark.parametrize("topology", ["complete", pytest.param("ring", marks=pytest.mark.full)])
def test_over_processes_the_replay_gives_the_same_weights(job: tuple[int, Job], topology: str) -> None:
    size, ranks = job
    paces_s = [0.004, *[0.001] * (size - 1)]
    exchange = {"topology": topology, "segments": "layers"}
    case = Case(30, paces_s, exchange=exchange, settles=(5, 11))
    check(case, ranks.run(train_on, (asdict(case),)))


def test_over_processes_consensus_close_and_checkpoints_keep_the_mean(
    job: tuple[int, Job], tmp_path: Path
) -> None:
    size, ranks = job
    paces_s = [0.004, *[0.001] * (size - 1)]
    case = Case(20, paces_s, lr=0.0, consensus=(7, 13), save=str(tmp_path))
    told = ranks.run(train_on, (asdict(case),))
    mean = mean_at_start(size)
    for of_rank in told:
        np.testing.assert_allclose(of_rank["means"], np.broadcast_to(mean, (2, len(mean))), atol=1e-14)
    np.testing.assert_allclose(mean_of(told), mean, atol=1e-14)
    resumed = ranks.run(train_on, (asdict(Case(9, paces_s, lr=0.0, load=str(tmp_path))),))
    np.testing.assert_allclose(mean_of(resumed), mean, atol=1e-14)
