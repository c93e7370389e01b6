"""The MPI transport against the contract: one job for each number of ranks carries out all bodies."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import pytest

from hocket.testing.transport import TransportConformance
from hocket.transport.launching import find_mpiexec

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed"),
]

_RANK = Path(__file__).with_name("mpi_rank.py")


class Job:
    """Ranks that wait for something to do."""

    def __init__(self, size: int) -> None:
        self._process = subprocess.Popen(
            find_mpiexec().command(size, [sys.executable, str(_RANK)]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, body: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([body.__module__, body.__name__, args]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise AssertionError(f"the ranks ended with exit status {self._process.wait()}")
        answers = json.loads(line)
        errors = [answer["error"] for answer in answers if "error" in answer]
        if errors:
            raise AssertionError("\n".join(errors))
        return [answer["result"] for answer in answers]

    def close(self) -> None:
        """Let the ranks leave; end them where they do not."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("\n")
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait()
        self._process.stdout.close()


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
