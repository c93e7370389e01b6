"""The virtual world: what it is beyond the contract. Determinism, time, faults, and random states."""

from __future__ import annotations

import itertools
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import mtrand

from hocket.errors import DeadlockError, ExchangeTimeoutError, PeerLostError, TransportError, UserError
from hocket.testing.transport.messages import exchange_at_random
from hocket.transport.virtual import NetworkModel, VirtualPeer, VirtualWorld, current_peer

#: Numbers that are exact in binary: 1 s of latency, 8 bytes a second.
SLOW = NetworkModel(latency_s=1.0, bandwidth_bits_per_s=64.0, poll_s=0.25)


def me() -> VirtualPeer:
    peer = current_peer()
    assert isinstance(peer, VirtualPeer)
    return peer


def run(size: int, body: Callable[[VirtualPeer], Any], **settings: Any) -> list[Any]:
    return VirtualWorld(size, **settings).run(lambda: body(me()))


def overlapping(count: int) -> tuple[np.ndarray, np.ndarray]:
    memory = words(count + 1)
    return memory[:-1], memory[1:]


def words(count: int) -> np.ndarray:
    return np.zeros(count)  # 8 bytes each: a second on the slow network


def test_more_ranks_than_the_system_has_threads_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, itertools.count()

    def limited(thread: threading.Thread) -> None:
        if next(started) >= 2:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(
        UserError, match="3 virtual ranks take 3 threads, but the system starts only 2 more: use"
    ):
        run(3, lambda peer: None)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("virtual")]


class TestTime:
    def test_a_message_takes_latency_and_transfer(self) -> None:
        def body(peer: VirtualPeer) -> float:
            lane = peer.lane("a")
            start = peer.clock.now()
            (lane.isend(words(3), 1, 0) if peer.rank == 0 else lane.irecv(words(3), 0, 0)).wait()
            return peer.clock.now() - start

        assert run(2, body, network=SLOW) == [
            3.0,
            4.0,
        ]  # the sender's link is free before the message arrives

    def test_a_link_sends_one_message_at_a_time(self) -> None:
        def body(peer: VirtualPeer) -> float:
            lane = peer.lane("a")
            start = peer.clock.now()
            if peer.rank == 0:
                lane.isend(words(3), 1, 0)
                lane.isend(words(2), 2, 0)
            else:
                lane.irecv(words(4 - peer.rank), 0, 0).wait()
            return peer.clock.now() - start

        assert run(3, body, network=SLOW) == [0.0, 4.0, 6.0]

    def test_a_link_receives_one_message_at_a_time(self) -> None:
        def body(peer: VirtualPeer) -> float:
            lane = peer.lane("a")
            start = peer.clock.now()
            if peer.rank > 0:
                lane.isend(words(2), 0, 0)
            else:
                for request in [lane.irecv(words(2), source, 0) for source in (1, 2)]:
                    request.wait()
            return peer.clock.now() - start

        assert run(3, body, network=SLOW)[0] == 5.0

    def test_links_carry_both_directions_at_once(self) -> None:
        def body(peer: VirtualPeer) -> float:
            lane, other = peer.lane("a"), 1 - peer.rank
            start = peer.clock.now()
            lane.isend(words(5), other, 0)
            lane.irecv(words(5), other, 0).wait()
            return peer.clock.now() - start

        assert run(2, body, network=SLOW) == [6.0, 6.0]

    def test_a_message_that_waits_for_its_sender_does_not_hold_the_receiver(self) -> None:
        def body(peer: VirtualPeer) -> float:
            lane = peer.lane("a")
            start = peer.clock.now()
            if peer.rank == 0:
                lane.isend(words(10), 1, 0)
                lane.isend(words(10), 2, 0)  # reaches rank 2 only after 11 s
            elif peer.rank == 3:
                peer.clock.elapse(2)
                lane.isend(words(1), 2, 0)
            elif peer.rank == 2:
                lane.irecv(words(1), 3, 0).wait()
            return peer.clock.now() - start

        assert run(4, body, network=SLOW)[2] == 4.0

    def test_native_collectives_end_after_the_last_start(self) -> None:
        def body(peer: VirtualPeer) -> list[float]:
            lane = peer.lane("a")
            start = peer.clock.now()
            peer.clock.elapse(peer.rank)
            lane.iallreduce(words(12), words(12)).wait()
            reduced = peer.clock.now() - start
            lane.ibroadcast(words(12), 1).wait()
            return [reduced, peer.clock.now() - start - reduced]

        expected = [2 + SLOW.allreduce_seconds(96, 3), SLOW.broadcast_seconds(96, 3)]
        assert run(3, body, network=SLOW) == [expected] * 3

    def test_native_collectives_share_links_and_what_ranks_agree_on_does_not_wait_for_them(self) -> None:
        def body(peer: VirtualPeer) -> list[float]:
            lanes = [peer.lane(name) for name in ("first", "second")]
            before_s = peer.clock.now()
            summed = [lane.iallreduce(words(2), np.empty(2)) for lane in lanes]
            ended = []
            peer.allgather_bytes(b"")
            ended.append(peer.clock.now() - before_s)
            for request in summed:
                request.wait()
                ended.append(peer.clock.now() - before_s)
            return ended

        transfer_s, latency_s = (SLOW.allreduce_seconds(nbytes, 2) for nbytes in (16, 0))
        transfer_s -= latency_s
        agreed_s = SLOW.allgather_seconds(0, 2)
        assert (
            run(2, body, network=SLOW) == [[agreed_s, transfer_s + latency_s, 2 * transfer_s + latency_s]] * 2
        )

    def test_a_poll_costs_its_time(self) -> None:
        def body(peer: VirtualPeer) -> int:
            lane, other = peer.lane("a"), 1 - peer.rank
            lane.isend(words(1), other, 0)
            receive, polls = lane.irecv(words(1), other, 0), 1
            while not receive.done():
                polls += 1
            return polls

        assert run(2, body, network=SLOW) == [8, 8]  # 2 s at 0.25 s each

    def test_tasks_of_one_rank_compute_side_by_side(self) -> None:
        def body(peer: VirtualPeer) -> list[float]:
            def work() -> float:
                assert me() is peer
                peer.clock.elapse(3)
                return peer.clock.now()

            other = peer.threads.spawn("progress", work)
            peer.clock.elapse(2)
            return [peer.clock.now(), other.wait(), peer.clock.now()]

        assert run(1, body) == [[2.0, 3.0, 3.0]]

    def test_the_world_says_how_long_it_ran_and_what_it_sent(self) -> None:
        world = VirtualWorld(2, network=SLOW)

        def body() -> None:
            me().clock.elapse(me().rank + 1)
            me().lane("a").isend(words(3), 0, 0)

        for _ in range(2):  # a second run starts anew
            world.run(body)
            assert (world.elapsed_s, world.num_messages, world.num_bytes) == (3.0, 2, 48)


class TestDeterminism:
    @staticmethod
    def trace(seed: int) -> list[tuple[int, int, float]]:
        events = []

        def body(peer: VirtualPeer) -> None:
            lane = peer.lane("a")
            for step in range(4):
                events.append((peer.rank, step, peer.clock.now()))
                exchange = lane.iallreduce(words(4), words(4))
                while not exchange.done():
                    events.append((peer.rank, -1, peer.clock.now()))

        run(5, body, seed=seed)
        return events

    def test_a_seed_repeats_the_run(self) -> None:
        assert self.trace(1) == self.trace(1)

    def test_seeds_explore_interleavings(self) -> None:
        traces = [self.trace(seed) for seed in range(5)]
        assert len({tuple(trace) for trace in traces}) == 5
        assert len({tuple(sorted(trace)) for trace in traces}) == 1  # but here the times are the same

    @settings(deadline=None, max_examples=40, database=None)
    @given(
        size=st.integers(1, 6),
        seed=st.integers(0, 2**32),
        num_messages=st.integers(0, 60),
        latency_s=st.sampled_from([0.0, 1e-6, 1e-3]),
        bandwidth=st.sampled_from([1e3, 1e6, float("inf")]),
    )
    def test_random_traffic_arrives(
        self, size: int, seed: int, num_messages: int, latency_s: float, bandwidth: float
    ) -> None:
        network = NetworkModel(latency_s, bandwidth)
        worlds = [VirtualWorld(size, network=network, seed=seed) for _ in range(2)]
        received = [world.run(lambda: exchange_at_random(me(), seed, num_messages)) for world in worlds]
        assert sum(received[0]) == num_messages == worlds[0].num_messages
        assert received[0] == received[1]
        assert worlds[0].elapsed_s == worlds[1].elapsed_s

    def test_64_ranks_are_fast(self) -> None:
        def body(peer: VirtualPeer) -> None:
            lane = peer.lane("a")
            for step in range(5):
                lane.isend(words(10), (peer.rank + 1) % peer.size, step)
                lane.irecv(words(10), peer.rank - 1 if peer.rank else peer.size - 1, step).wait()
                lane.iallreduce(words(10), words(10)).wait()

        start = time.process_time()
        run(64, body)
        assert time.process_time() - start < 2.0  # measured: 0.1


class TestRandomStates:
    @staticmethod
    def draw(peer: VirtualPeer, switch: bool) -> list[float]:
        """Draw from every global generator, NumPy's normals an odd number of times between switches."""
        lane, drawn = peer.lane("a"), []
        random.seed(peer.rank)
        np.random.seed(peer.rank)
        torch.manual_seed(peer.rank)
        for _ in range(5):
            drawn += [random.random(), np.random.randn(), torch.rand(()).item()]
            drawn += torch.nn.functional.dropout(torch.ones(4)).tolist()
            if switch:
                lane.ibarrier().wait()
        return drawn

    def test_every_rank_draws_as_if_alone(self) -> None:
        alone = run(4, lambda peer: self.draw(peer, switch=False))
        for seed in range(3):
            assert run(4, lambda peer: self.draw(peer, switch=True), seed=seed) == alone

    def test_ranks_start_with_the_callers_states_and_give_them_back(self) -> None:
        def draw(_: VirtualPeer) -> list[float]:
            return [random.random(), np.random.randn(), np.random.rand(), torch.rand(()).item()]

        random.seed(5)
        np.random.seed(5)
        np.random.randn()  # leaves a normal number in the cache
        torch.manual_seed(5)
        inside = run(3, draw)
        outside = [random.random(), np.random.randn(), np.random.rand(), torch.rand(()).item()]
        assert inside == [outside] * 3

    def test_another_bit_generator_is_swapped_too(self) -> None:
        usual = mtrand.get_bit_generator()
        mtrand.set_bit_generator(np.random.PCG64(3))

        def draw(peer: VirtualPeer) -> list[float]:
            lane, drawn = peer.lane("a"), []
            for _ in range(4):
                drawn.append(np.random.rand())
                lane.ibarrier().wait()
            return drawn

        try:
            first, *others = run(3, draw)
        finally:
            mtrand.set_bit_generator(usual)
        assert others == [first, first]

    def test_a_rank_may_change_its_bit_generator(self) -> None:
        usual = mtrand.get_bit_generator()

        def draw(peer: VirtualPeer) -> list[float]:
            lane = peer.lane("a")
            if peer.rank == 1:
                mtrand.set_bit_generator(np.random.PCG64(3))
            else:
                np.random.seed(5)
            drawn = []
            for _ in range(3):
                lane.ibarrier().wait()
                drawn.append(np.random.rand())
            return drawn

        first, other, last = run(3, draw)
        assert first == last == list(np.random.RandomState(5).rand(3))
        assert other == list(np.random.RandomState(np.random.PCG64(3)).rand(3))
        assert mtrand.get_bit_generator() is usual

    def test_torch_is_not_imported(self) -> None:
        script = (
            "import sys; from hocket.transport.virtual import VirtualWorld; VirtualWorld(3).run(int); "
            "assert 'torch' not in sys.modules"
        )
        subprocess.run([sys.executable, "-c", script], check=True, timeout=60)

    def test_torch_may_be_imported_by_a_rank(self) -> None:
        script = (
            "from hocket.transport.virtual import VirtualWorld, current_peer\n"
            "def draw():\n"
            "    lane = current_peer().lane('a')\n"
            "    import torch\n"
            "    torch.manual_seed(7)\n"
            "    first = torch.rand(()).item()\n"
            "    lane.ibarrier().wait()\n"
            "    return first, torch.rand(()).item()\n"
            "assert len(set(VirtualWorld(3).run(draw))) == 1\n"
        )
        subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


class TestWaiting:
    def test_a_deadlock_says_who_waits_for_whom(self) -> None:
        def body(peer: VirtualPeer) -> None:
            lane = peer.lane("gradients.0[3]")
            peer.status.note_step(7)
            if peer.rank < 2:
                lane.irecv(words(1), 1 - peer.rank, 4).wait()
            elif peer.rank == 2:
                lane.iallreduce(words(1), words(1)).wait()

        with pytest.raises(DeadlockError) as caught:
            run(4, body)
        report = str(caught.value)
        for rank, awaited in enumerate(["rank 1 in irecv, round 4", "rank 0 in irecv, round 4"]):
            assert f"rank {rank} [main] (step 7) waits for {awaited}, lane 'gradients.0[3]'" in report
        assert "waits for ranks 0, 1 and 3 in iallreduce of float64[1], lane 'gradients.0[3]'" in report
        assert "rank 3 [main] (step 7) has ended" in report

    def test_a_deadlock_of_pollers_is_one_too(self) -> None:
        def body(peer: VirtualPeer) -> None:
            request = peer.lane("a").irecv(words(1), 1 - peer.rank, 0)
            while not request.done():
                pass

        with pytest.raises(DeadlockError, match=r"rank 0 .* polls for rank 1 in irecv"):
            run(2, body)

    def test_a_poller_goes_on_when_something_happens(self) -> None:
        def body(peer: VirtualPeer) -> float:
            lane = peer.lane("a")
            if peer.rank == 0:
                peer.clock.elapse(3600)  # 3.6e9 polls
                lane.isend(words(1), 1, 0)
                return peer.clock.now()
            request = lane.irecv(words(1), 0, 0)
            while not request.done():
                pass
            return peer.clock.now()

        sent, received = run(2, body)
        assert received == pytest.approx(sent + NetworkModel().message_seconds(8), abs=2e-6)

    def test_a_survivor_of_a_deadlock_goes_on(self) -> None:
        def body(peer: VirtualPeer) -> bool:
            lane = peer.lane("a")
            with pytest.raises(DeadlockError):
                lane.irecv(words(1), 1 - peer.rank, 0).wait()
            lane.isend(words(1), 1 - peer.rank, 0).wait()
            return True

        assert run(2, body) == [True, True]

    def test_a_timeout_passes_in_virtual_time(self) -> None:
        def body(peer: VirtualPeer) -> float:
            lane = peer.lane("a")
            start = peer.clock.now()
            if peer.rank == 0:
                with pytest.raises(
                    ExchangeTimeoutError, match=r"rank 0.*rank 1.*round 9.*lane 'a'.*within 1e\+06 s"
                ):
                    lane.irecv(words(1), 1, 9).wait(1e6)
            return peer.clock.now() - start

        start = time.monotonic()
        assert run(2, body) == [1e6, 0.0]
        assert time.monotonic() - start < 5

    def test_what_arrives_at_the_deadline_is_in_time(self) -> None:
        def body(peer: VirtualPeer) -> None:
            lane = peer.lane("a")
            if peer.rank == 0:
                lane.isend(words(1), 1, 0)
            else:
                lane.irecv(words(1), 0, 0).wait(2.0)

        run(2, body, network=NetworkModel(1.0, 64.0))

    def test_the_default_timeout_counts_while_others_compute(self) -> None:
        def body(peer: VirtualPeer) -> float:
            lane = peer.lane("a")
            start = peer.clock.now()
            if peer.rank == 1:
                peer.clock.elapse(100)
            else:
                with pytest.raises(ExchangeTimeoutError, match="within 30 s"):
                    lane.irecv(words(1), 1, 0).wait()
            return peer.clock.now() - start

        assert run(2, body, timeout_s=30) == [pytest.approx(30.0), pytest.approx(100.0)]

    def test_what_is_known_of_the_others_can_be_asked_for(self) -> None:
        def body(peer: VirtualPeer) -> str:
            lane = peer.lane("a")
            if peer.rank == 1:
                lane.ibarrier().wait()
                return ""
            peer.clock.elapse(2 + peer.rank)
            known = peer.status.describe()
            lane.ibarrier().wait()
            return known

        known = run(3, body)[0]
        assert "rank 1 [main] waits for ranks 0 and 2 in ibarrier, lane 'a', since 2 s" in known
        assert "rank 0 [main] computes" in known


class TestFaults:
    def test_an_error_of_one_rank_ends_the_others(self) -> None:
        lost: dict[int, str] = {}

        def body(peer: VirtualPeer) -> None:
            lane = peer.lane("a")
            if peer.rank == 2:
                peer.clock.elapse(1)
                raise ValueError("no such batch")
            try:
                lane.ibarrier().wait()
            except PeerLostError as error:
                lost[peer.rank] = str(error)
                lane.ibarrier().wait()  # a rank that ends has no transport any more

        with pytest.raises(ValueError, match="no such batch") as caught:
            run(4, body)
        assert any("rank 2" in note for note in caught.value.__notes__)
        assert sorted(lost) == [0, 1, 3]
        assert "rank 2" in lost[0]
        assert "no such batch" in lost[0]

    @pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
    def test_an_exit_of_one_rank_ends_the_others(self, error: BaseException) -> None:
        def body(peer: VirtualPeer) -> None:
            if peer.rank == 1:
                raise error
            peer.lane("a")

        with pytest.raises(type(error)):
            run(3, body)

    def test_an_error_before_the_others_begin(self) -> None:
        def body(peer: VirtualPeer) -> None:
            raise ValueError(str(peer.rank))

        with pytest.raises(ValueError):
            run(8, body)

    def test_an_error_of_a_second_task_ends_the_world(self) -> None:
        def body(peer: VirtualPeer) -> None:
            lane = peer.lane("a")
            peer.threads.spawn("progress", lambda: 1 / 0)
            lane.irecv(words(1), 0, 0).wait()

        with pytest.raises(ZeroDivisionError) as caught:
            run(2, body)
        assert "[progress]" in caught.value.__notes__[0]

    def test_abort_ends_every_rank(self) -> None:
        def body(peer: VirtualPeer) -> None:
            lane = peer.lane("a")
            if peer.rank == 1:
                peer.abort("rank 1, step 3: out of memory", 4)
            lane.ibarrier().wait()

        with pytest.raises(TransportError) as caught:
            run(3, body)
        assert caught.value.args == ("rank 1, step 3: out of memory",)

    def test_an_interrupt_ends_the_world(self) -> None:
        def body(peer: VirtualPeer) -> None:
            lane = peer.lane("a")
            if peer.rank == 0:
                ident = threading.main_thread().ident
                assert ident is not None
                signal.pthread_kill(ident, signal.SIGINT)
            while True:
                lane.ibarrier().wait()

        with pytest.raises(KeyboardInterrupt):
            run(2, body)
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("virtual")]

    def test_a_world_in_a_world(self) -> None:
        def outer(peer: VirtualPeer) -> list[int]:
            lane = peer.lane("a")
            inner = run(2, lambda inner: 10 * peer.rank + inner.rank)
            assert me() is peer
            lane.ibarrier().wait()
            return inner

        assert run(2, outer) == [[0, 1], [10, 11]]

    def test_outside_a_world_there_is_no_peer(self) -> None:
        run(1, lambda peer: None)
        assert current_peer() is None


class TestMistakes:
    @pytest.mark.parametrize(("sent", "posted"), [(3, 2), (2, 3), (0, 1)])
    def test_a_message_of_another_size(self, sent: int, posted: int) -> None:
        def body(peer: VirtualPeer) -> None:
            lane = peer.lane("a")
            lane.isend(words(sent), peer.rank, 5)
            pattern = f"lane 'a', round 5: rank 0 sent {8 * sent} bytes, .* posted for {8 * posted}"
            with pytest.raises(TransportError, match=pattern):
                lane.irecv(words(posted), 0, 5).wait()

        run(1, body)

    def test_collectives_that_disagree(self) -> None:
        def body(peer: VirtualPeer) -> None:
            lane = peer.lane("a")
            if peer.rank == 1:
                lane.iallreduce(words(2), words(2)).wait()
            elif peer.rank == 2:
                lane.ibarrier().wait()
            else:
                lane.iallreduce(words(3), words(3)).wait()

        with pytest.raises(TransportError) as caught:
            run(4, body)
        for part in (
            "ranks 0 and 3 called iallreduce of float64[3]",
            "rank 1 called",
            "rank 2 called ibarrier",
        ):
            assert part in str(caught.value)

    def test_lanes_of_other_names(self) -> None:
        with pytest.raises(TransportError, match="rank 0 called lane 'x0'; rank 1 called lane 'x1'"):
            run(2, lambda peer: peer.lane(f"x{peer.rank}"))

    def test_groups_that_disagree(self) -> None:
        with pytest.raises(TransportError, match=r"rank 0 named \[0, 1\], but rank 1 named \[1, 0\]"):
            run(2, lambda peer: peer.group([peer.rank, 1 - peer.rank]))

    @pytest.mark.parametrize("ranks", [[0, 0], [0, 2], [-1]])
    def test_groups_of_no_ranks(self, ranks: list[int]) -> None:
        with pytest.raises(TransportError, match="is not a group"):
            run(2, lambda peer: peer.group(ranks))

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda lane: lane.isend(words(4)[::2], 0, 0), "not C-contiguous"),
            (lambda lane: lane.isend(words(4), 1, 0), "no rank 1"),
            (lambda lane: lane.irecv(np.frombuffer(b"12345678"), 0, 0), "read-only"),
            (lambda lane: lane.iallreduce(np.zeros(2, "f2"), np.zeros(2, "f2")), "float16 is not"),
            (
                lambda lane: lane.iallreduce(words(2), words(3)),
                r"sends float64\[2\], but receives float64\[3\]",
            ),
            (lambda lane: lane.iallreduce(*overlapping(2)), "overlap"),
            (lambda lane: lane.ibroadcast(words(2), -1), "no rank -1"),
        ],
    )
    def test_buffers_and_ranks_that_cannot_be(self, call: Callable[..., Any], message: str) -> None:
        with pytest.raises(TransportError, match=message):
            run(1, lambda peer: call(peer.lane("a")))

    def test_closed_lanes_and_peers(self) -> None:
        def body(peer: VirtualPeer) -> None:
            lane = peer.lane("a")
            receive = lane.irecv(words(1), 0, 0)
            lane.close()
            with pytest.raises(TransportError, match="closed before round 0 came from rank 0"):
                receive.wait()
            with pytest.raises(TransportError, match="lane 'a' is closed"):
                lane.ibarrier()
            peer.close()
            with pytest.raises(TransportError, match="closed"):
                peer.lane("b")

        run(1, body)

    def test_another_rank_s_endpoint(self) -> None:
        peers: dict[int, VirtualPeer] = {}

        def body(peer: VirtualPeer) -> None:
            peers[peer.rank] = peer
            peer.lane("a").ibarrier().wait()
            peers[1 - peer.rank].clock.elapse(1)

        with pytest.raises(TransportError, match="peer was used outside of that rank's own threads"):
            run(2, body)
        with pytest.raises(TransportError):
            peers[0].clock.elapse(1)  # and after the world's end

    def test_numbers_that_cannot_be(self) -> None:
        def elapse(peer: VirtualPeer, seconds: float) -> None:
            peer.clock.elapse(seconds)

        with pytest.raises(ValueError, match="at least 1 rank"):
            VirtualWorld(0)
        for seconds in (-1.0, float("nan"), float("inf")):
            with pytest.raises(ValueError, match="finite time"):
                run(1, partial(elapse, seconds=seconds))


def test_threads_whose_backward_failed_have_ended_with_the_run() -> None:
    # Torch gives up what is left of such a graph when the system ends the thread, after `Thread.join` has returned.
    def run() -> int:
        values = [torch.ones(1, requires_grad=True) for _ in range(200)]
        for value in values:
            value.register_post_accumulate_grad_hook(_refuse)
        for value in values:
            with pytest.raises(ValueError, match="no gradient"):
                (torch.stack([each * 2 for each in values]).sum() + value).backward()
        return threading.get_native_id()

    for native in VirtualWorld(4).run(run):
        assert not Path(f"/proc/self/task/{native}").exists()


def _refuse(_: torch.Tensor) -> None:
    raise ValueError("no gradient")
