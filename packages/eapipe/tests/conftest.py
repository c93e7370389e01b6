"""Fixtures of all tests of the package."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from hocket.testing.job import Job

#: Ranks under mpiexec do not share the start of one process.
MPI = [
    pytest.mark.mpi,
    pytest.mark.full,
    pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed"),
]


@pytest.fixture(scope="session", params=["torch", pytest.param("mpi", marks=MPI)])
def job_of_4(request: pytest.FixtureRequest) -> Iterator[Job]:
    """Four ranks that are processes."""
    job = Job(4, Path(__file__).parent, request.param)
    yield job
    job.close()
