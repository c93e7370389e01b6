"""Fixtures of all tests of the package."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from hocket.testing.job import Job


@pytest.fixture(scope="session", params=[pytest.param(2, marks=pytest.mark.full), 5])
def job(request: pytest.FixtureRequest) -> Iterator[tuple[int, Job]]:
    """Start ranks under mpiexec; yield their number and them."""
    if find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed")
    job = Job(request.param, Path(__file__).parent)
    yield request.param, job
    job.close()
