"""Delays and reordering keep the contract on real MPI, too, where nothing but the ranks' own looks lets them pass.

Killed ranks of real jobs: `tests/endings`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any, ClassVar

import pytest

from hocket.testing.faulty import carry_out_with_faults
from hocket.testing.job import Job
from hocket.testing.transport import TransportConformance

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed"),
]

FAULTS = {"seed": 5, "delay_s": [0.0, 0.003], "reorder": 0.5}


class TestMPI(TransportConformance):
    sizes = (2, 3)
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
            return self.jobs[size].run(carry_out_with_faults, (FAULTS, body.__module__, body.__name__, *args))
        except BaseException:
            # What is left of a failed body would meet the next one.
            self.jobs.pop(size).close()
            raise
