"""Fixtures of all tests of the package."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from hocket.testing.job import Job

NO_MPI = pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed")
#: Ranks under mpiexec do not share the start of one process.
TRANSPORTS = ["torch", pytest.param("mpi", marks=[pytest.mark.mpi, pytest.mark.full, NO_MPI])]


def _job(size: int, transport: str) -> Iterator[Job]:
    job = Job(size, Path(__file__).parent, transport)
    yield job
    job.close()


@pytest.fixture(scope="session", params=TRANSPORTS)
def job_of_8(request: pytest.FixtureRequest) -> Iterator[Job]:
    """Eight ranks that are processes."""
    yield from _job(8, request.param)


@pytest.fixture(scope="session", params=[pytest.param("mpi", marks=[pytest.mark.mpi, NO_MPI])])
def job_of_3(request: pytest.FixtureRequest) -> Iterator[Job]:
    """Three ranks under mpiexec."""
    yield from _job(3, request.param)
