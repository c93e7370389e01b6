"""The MPI transport against the contract: one job for each number of ranks carries out all bodies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from control_cases import drop_and_wait, form_groups_often, leave_early, open_many_lanes
from in_jobs import ConformanceInJobs
from piece_cases import by_rings, in_small_pieces

from hocket.launch.mpiexec import find_mpiexec
from hocket.testing.job import Job

HERE = Path(__file__).parent

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed"),
]


FULL = pytest.mark.full


class TestMPI(ConformanceInJobs):
    sizes: tuple[object, ...] = (
        pytest.param(1, marks=FULL),
        pytest.param(2, marks=FULL),
        3,
        pytest.param(4, marks=FULL),
    )


class TestMPIInPieces(TestMPI):
    """What is too large for one call of MPI."""

    sizes = (pytest.param(2, marks=FULL), 3)

    def run(self, size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
        return super().run(size, in_small_pieces, body.__module__, body.__name__, list(args))


class TestMPIByRings(TestMPI):
    """What is summed between hosts."""

    sizes = (pytest.param(2, marks=FULL), 3, pytest.param(4, marks=FULL))

    def run(self, size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
        return super().run(size, by_rings, body.__module__, body.__name__, list(args))


@pytest.fixture(scope="module")
def trio() -> Iterator[Job]:
    with closing(Job(3, HERE)) as job:
        yield job


def test_ranks_that_meet_in_different_places_say_who_is_where(trio: Job) -> None:
    for rank, message in enumerate(trio.run(leave_early, ())):
        assert message.startswith(
            f"rank {rank}: the ranks are in different places: ranks 0, 2 at opening gradients.0[3]; "
            "rank 1 at closing the peer: did a rank leave its loop early"
        )


def test_groups_take_a_communicator_once(trio: Job) -> None:
    assert trio.run(form_groups_often, ()) == [[True] * 3] * 3


@pytest.fixture(scope="module")
def pair() -> Iterator[Job]:
    with closing(Job(2, HERE)) as job:
        yield job


def test_what_was_dropped_is_let_go_once_it_is_over(pair: Job) -> None:
    assert pair.run(drop_and_wait, ()) == [False, False]


def test_more_lanes_than_communicators(pair: Job) -> None:
    for told, number in pair.run(open_many_lanes, ()):
        if find_mpiexec().vendor == "openmpi":
            assert (told, number) == ("", "2100")
        else:
            assert f"opening gradients.0[{number}]" in told
            assert told.endswith("use fewer, larger segments, or fewer exchanges")
