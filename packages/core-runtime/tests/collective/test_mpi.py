"""Core's collectives over real MPI: one job for each number of ranks carries out all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
from cases import CASES

from hocket.testing.collective import CollectiveConformance, Shape
from hocket.testing.job import Job

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed"),
]

SHAPES = [
    Shape(0, 7, 1, "float32"),
    Shape(2, 0, 0, "float32"),
    Shape(3, 1003, 3, "float64"),
    Shape(7, 33, 0, "bfloat16"),
]
LARGE = Shape(1, 600_000, 1, "float32")


@pytest.fixture(scope="module", params=[3, pytest.param(4, marks=pytest.mark.full)])
def job(request: pytest.FixtureRequest) -> Iterator[tuple[int, Job]]:
    job = Job(request.param)
    yield request.param, job
    job.close()


@pytest.fixture(params=CASES, ids=lambda case: case.__name__)
def suite(request: pytest.FixtureRequest, job: tuple[int, Job]) -> CollectiveConformance:
    class OverMPI(request.param):  # type: ignore[misc, name-defined]
        def run(self, size: int, seed: int, body: Callable[..., Any], *args: Any) -> list[Any]:
            return job[1].run(body, args)

    return OverMPI()


@pytest.mark.one_of_each
@pytest.mark.parametrize("threaded", [False, True])
def test_small_segments(suite: CollectiveConformance, job: tuple[int, Job], threaded: bool) -> None:
    suite.check(job[0], SHAPES, 3, threaded=threaded, resumed_at=2)


def test_delayed_messages(suite: CollectiveConformance, job: tuple[int, Job]) -> None:
    suite.check(job[0], SHAPES, 2, faulty=True)


def test_large_segments(suite: CollectiveConformance, job: tuple[int, Job]) -> None:
    suite.check(job[0], [LARGE, SHAPES[0]], 2)


def test_one_buffer(suite: CollectiveConformance, job: tuple[int, Job]) -> None:
    suite.check(job[0], [LARGE, SHAPES[0]], 2, in_place=True)
