"""Fixtures of all tests of the package."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from hocket.testing.job import Job


@pytest.fixture(scope="session")
def job_of_4() -> Iterator[Job]:
    """Four ranks under mpiexec."""
    if find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed")
    job = Job(4, Path(__file__).parent)
    yield job
    job.close()
