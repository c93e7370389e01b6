"""The MPI transport against the contract: one job for each number of ranks carries out all bodies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any, ClassVar

import pytest

from hocket.testing.job import Job
from hocket.testing.transport import TransportConformance

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed"),
]


class TestMPI(TransportConformance):
    sizes = (1, 2, 3, 4)
    jobs: ClassVar[dict[int, Job]] = {}

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _end_jobs(cls) -> Iterator[None]:
        yield
        while cls.jobs:
            cls.jobs.popitem()[1].close()

    def run(self, size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
        if size not in self.jobs:
            self.jobs[size] = Job(size)
        try:
            return self.jobs[size].run(body, args)
        except BaseException:
            # What is left of a failed body would meet the next one.
            self.jobs.pop(size).close()
            raise
