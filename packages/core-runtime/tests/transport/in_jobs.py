"""The conformance suite in jobs of processes: one for each number of ranks carries out all bodies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from hocket.testing.job import Job
from hocket.testing.transport import TransportConformance

HERE = Path(__file__).parent


class ConformanceInJobs(TransportConformance):
    """Each subclass has jobs of its own, over `transport`."""

    transport: str = "mpi"
    jobs: ClassVar[dict[int, Job]]

    def __init_subclass__(cls) -> None:
        cls.jobs = {}

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _end_jobs(cls) -> Iterator[None]:
        yield
        while cls.jobs:
            cls.jobs.popitem()[1].close()

    def run(self, size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
        if size not in self.jobs:
            self.jobs[size] = Job(size, HERE, self.transport)
        try:
            return self.jobs[size].run(body, args)
        except BaseException:
            # What is left of a failed body would meet the next one.
            self.jobs.pop(size).close()
            raise
