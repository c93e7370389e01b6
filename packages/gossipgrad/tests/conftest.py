"""Fixtures of all tests of the package."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from hocket.testing.job import Job


def _job(size: int) -> Iterator[Job]:
    if find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed")
    job = Job(size, Path(__file__).parent)
    yield job
    job.close()


@pytest.fixture(scope="session")
def job_of_8() -> Iterator[Job]:
    """Eight ranks under mpiexec."""
    yield from _job(8)


@pytest.fixture(scope="session")
def job_of_3() -> Iterator[Job]:
    """Three ranks under mpiexec."""
    yield from _job(3)
