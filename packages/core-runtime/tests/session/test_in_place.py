"""Exchanges in memory that the ranks of a host share, over real MPI: one buffer, and the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from in_place_cases import CASES

from hocket.testing.job import Job

RANKS = 4

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    with closing(Job(RANKS, Path(__file__).parent)) as ranks:
        yield ranks


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_case(job: Job, case: Callable[..., None]) -> None:
    job.run(case, ())
