"""The torch transport against the contract: one job for each number of ranks carries out all bodies."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from control_cases import (
    call_something_else,
    catch_an_interruption,
    drop_and_wait,
    leave_early,
    lose_a_rank_that_has_forked,
    wait_idly,
)
from in_jobs import ConformanceInJobs
from piece_cases import by_sockets

from hocket.testing.job import Job

HERE = Path(__file__).parent
FULL = pytest.mark.full


class TestTorch(ConformanceInJobs):
    sizes: tuple[object, ...] = (
        pytest.param(1, marks=FULL),
        2,
        pytest.param(3, marks=FULL),
        pytest.param(4, marks=FULL),
        5,
    )
    transport = "torch"

    def test_ranks_that_meet_in_different_places_say_who_is_where(self) -> None:
        for rank, message in enumerate(self.run(3, leave_early)):
            assert message.startswith(
                f"rank {rank}: the ranks are in different places: ranks 0, 2 at opening gradients.0[3]; "
                "rank 1 at closing the peer: did a rank leave its loop early"
            )

    def test_a_rank_that_was_interrupted_in_a_call_is_told_apart(self) -> None:
        for rank, message in enumerate(self.run(2, catch_an_interruption)):
            assert f"rank {1 - rank} made another call here" in message
            assert "the loop over session.data" in message or "allgather" in message

    def test_what_was_dropped_is_let_go_once_it_is_over(self) -> None:
        assert self.run(2, drop_and_wait) == [False, False]

    def test_ranks_that_wait_cost_no_cpu(self) -> None:
        assert max(self.run(3, wait_idly, 10)) < 0.1

    def test_ranks_that_call_different_collectives_are_told(self) -> None:
        """Whoever finds out tells the others, which may wait for other ranks."""
        for size in (2, 3, 5) * 2:
            messages = self.run(size, call_something_else)
            for rank, message in enumerate(messages):
                assert message.startswith(
                    f"rank {rank}: mixed up ({'allreduce' if rank else 'barrier'}): rank "
                )
                assert "made another call here, or used" in message or "has failed in this call" in message
            assert "made another call here" in messages[0]


class TestTorchBySockets(TestTorch):
    """Messages as between hosts."""

    sizes = (pytest.param(2, marks=FULL), 3)

    def run(self, size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
        return super().run(size, by_sockets, body.__module__, body.__name__, list(args))


def test_a_dead_rank_is_noticed_though_what_it_has_forked_lives_on(tmp_path: Path) -> None:
    """As the workers of a DataLoader do, for seconds."""
    with (
        closing(Job(2, HERE, "torch")) as job,
        pytest.raises(AssertionError, match="the ranks ended with exit"),
    ):
        job.run(lose_a_rank_that_has_forked, (str(tmp_path / "told"),))
    seconds, _, told = (tmp_path / "told").read_text().partition(" ")
    assert float(seconds) < 5
    assert told == "rank 0: control (opening lost): rank 1 has died"
