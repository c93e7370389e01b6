"""Fixtures of all tests of the package: one thread, as two give other bits, and the modules beside the tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from hocket.testing.job import Job

# With --import-mode=importlib the modules beside the tests are not found by themselves.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def job_of_4() -> Iterator[Job]:
    """Four ranks under mpiexec."""
    if find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed")
    job = Job(4, Path(__file__).parent)
    yield job
    job.close()
