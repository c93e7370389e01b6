"""Two ranks that carry out the tests' cases."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from hocket.testing.job import Job

HERE = Path(__file__).parent
# Without them nothing here can be imported.
collect_ignore_glob = (
    [] if all(map(importlib.util.find_spec, ("transformers", "accelerate"))) else ["test_*.py"]
)


@pytest.fixture(scope="session")
def job() -> Iterator[Job]:
    """Two ranks started by mpiexec, to which Hocket names the ranks."""
    with closing(Job(2, HERE)) as ranks:
        yield ranks
