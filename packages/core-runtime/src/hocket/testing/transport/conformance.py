"""The tests that every transport passes, on every number of ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from hocket.testing.transport import collectives, gathering, messages, peers
from hocket.transport.request import RANKS_DIVERGED

if TYPE_CHECKING:
    import pytest

__all__ = ["TransportConformance"]

T = TypeVar("T")


class TransportConformance(ABC):
    """The conformance tests of a transport, for subclasses named `Test...` that run bodies on ranks.

    Attributes:
        sizes: the numbers of ranks that every test is run with; one may be a `pytest.param` with marks.
    """

    sizes: tuple[object, ...] = (1, 2, 3, 4, 7)

    @abstractmethod
    def run(self, size: int, body: Callable[..., T], *args: object) -> list[T]:
        """Run `body(peer, *args)` on `size` ranks.

        Args:
            size: the number of ranks.
            body: a function in a module of this package, or in the module of a test of your own.
            args: JSON values.

        Returns:
            The ranks' return values, by rank: JSON values.

        Raises:
            Exception: a rank raised; the transport chooses the type.
        """

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "size" in metafunc.fixturenames:
            metafunc.parametrize("size", self.sizes)

    def test_ranks_are_numbered(self, size: int) -> None:
        assert self.run(size, peers.rank_and_size) == [[rank, size] for rank in range(size)]

    def test_receives_match_by_source_and_round(self, size: int) -> None:
        self.run(size, messages.receive_in_another_order)

    def test_neighbours_exchange_in_groups(self, size: int) -> None:
        self.run(size, messages.exchange_with_neighbours)

    def test_buffers_lie_in_host_memory(self, size: int) -> None:
        self.run(size, peers.stay_on_the_host)

    def test_lanes_are_apart(self, size: int) -> None:
        self.run(size, messages.receive_on_another_lane_first)

    def test_one_round_keeps_the_order_of_sends(self, size: int) -> None:
        self.run(size, messages.send_one_round_often)

    def test_messages_of_any_size(self, size: int) -> None:
        self.run(size, messages.send_sizes, [0, 1, 1000, 1_000_003])

    def test_sent_buffers_may_be_changed(self, size: int) -> None:
        self.run(size, messages.change_what_was_sent)

    def test_polling_finishes_a_request(self, size: int) -> None:
        self.run(size, messages.poll_until_done)

    def test_random_traffic(self, size: int) -> None:
        self.run(size, messages.exchange_at_random, 11, 40)

    def test_dropped_requests_are_carried_out(self, size: int) -> None:
        self.run(size, messages.drop_requests)

    def test_allreduce_sums(self, size: int) -> None:
        for dtype in collectives.DTYPES:
            self.run(size, collectives.allreduce_against_numpy, dtype, [0, 1, 7, 1000, 100_003])

    def test_collectives_on_two_lanes_may_be_called_in_another_order(self, size: int) -> None:
        self.run(size, collectives.allreduce_on_two_lanes)

    def test_collectives_on_one_lane_match_by_order(self, size: int) -> None:
        self.run(size, collectives.allreduce_while_others_are_under_way)

    def test_reduce_sums_on_the_root(self, size: int) -> None:
        for dtype in collectives.DTYPES:
            self.run(size, collectives.reduce_to_everyone, dtype, [0, 1, 1000, 20_003])

    def test_broadcast_from_every_root(self, size: int) -> None:
        self.run(size, collectives.broadcast_from_everyone)

    def test_nobody_leaves_a_barrier_before_all_have_come(self, size: int) -> None:
        self.run(size, collectives.come_late_to_a_barrier)

    def test_gathers_messages_of_different_lengths(self, size: int) -> None:
        self.run(size, gathering.gather_lengths)

    def test_a_gathering_is_finished_by_polling(self, size: int) -> None:
        self.run(size, gathering.poll_a_gathering)

    def test_gatherings_on_one_lane_match_by_order(self, size: int) -> None:
        self.run(size, gathering.gather_while_others_are_under_way)

    def test_gatherings_on_two_lanes_may_be_called_in_another_order(self, size: int) -> None:
        self.run(size, gathering.gather_on_two_lanes)

    def test_a_dropped_gathering_is_carried_out(self, size: int) -> None:
        self.run(size, gathering.drop_a_gathering)

    def test_collectives_of_all_kinds_at_random(self, size: int) -> None:
        for seed in range(3):
            self.run(size, gathering.mix_at_random, seed, 30)

    def test_a_message_too_long_to_gather_is_refused(self, size: int) -> None:
        for rank, refusal in enumerate(self.run(size, gathering.gather_too_much)):
            assert all(word in refusal for word in (f"rank {rank}", "narrow lane", "9 bytes", "room for 8"))

    def test_allgather_bytes_of_different_lengths(self, size: int) -> None:
        expected = [[rank] * (3 * rank) for rank in range(size)]
        assert self.run(size, peers.allgather_lengths) == [expected] * size

    def test_gatherings_for_different_calls_are_refused(self, size: int) -> None:
        words = ("rank 0", "another call", "rank 1" if size == 2 else "ranks 1", "one call", RANKS_DIVERGED)
        for refusal in self.run(size, peers.gather_for_different_calls):
            assert all(word in refusal for word in words) if size > 1 else refusal == ""

    def test_disjoint_groups_in_one_call(self, size: int) -> None:
        self.run(size, peers.split_by_parity)

    def test_a_group_keeps_its_order_and_leaves_others_out(self, size: int) -> None:
        self.run(size, peers.group_backwards)

    def test_groups_of_groups(self, size: int) -> None:
        self.run(size, peers.halve_until_alone)

    def test_a_wait_ends_with_an_error_that_says_for_whom(self, size: int) -> None:
        for rank, message in enumerate(self.run(size, messages.wait_too_long)):
            assert f"rank {rank}" in message
            assert "slow lane" in message
            if size > 1:
                assert f"rank {(rank + 1) % size}" in message

    def test_a_message_of_another_size_is_an_error_that_says_where(self, size: int) -> None:
        for sent, expected in [(100, 40), (40, 100), (4096, 8192)] if size > 1 else []:
            message = self.run(size, messages.receive_another_size, sent, expected)[1]
            for word in ("rank 1", "sizes", "rank 0", "round 4", str(expected), RANKS_DIVERGED):
                assert word in message

    def test_allocated_memory_is_aligned(self, size: int) -> None:
        self.run(size, peers.allocate_sizes)

    def test_lanes_are_opened_and_closed_again(self, size: int) -> None:
        self.run(size, peers.reopen_lanes)

    def test_clocks_do_not_go_back(self, size: int) -> None:
        self.run(size, peers.look_at_the_clock)
