"""Faults on purpose: what is delayed and reordered still keeps the contract, what is dropped or killed is named."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.errors import ExchangeTimeoutError, PeerLostError, RankKilledError
from hocket.testing.transport import TransportConformance
from hocket.transport.faults import Faults, KillAt
from hocket.transport.lane import Lane
from hocket.transport.peer import Peer
from hocket.transport.virtual import NetworkModel, VirtualWorld, current_peer

SLOW = Faults(seed=5, delay_s=(0.0, 0.003), reorder=0.5)


def world(size: int, faults: Faults, **options: Any) -> VirtualWorld:
    return VirtualWorld(size, wrap=faults.wrap, **options)


def my_peer() -> Peer:
    peer = current_peer()
    assert peer is not None
    return peer


@pytest.mark.parametrize(
    "faults", [Faults(), SLOW, Faults(seed=1, reorder=1.0)], ids=["none", "slow", "reordered"]
)
class TestVirtual(TransportConformance):
    sizes = (pytest.param(2, marks=pytest.mark.full), 4)

    @pytest.fixture(autouse=True)
    def _use(self, faults: Faults) -> None:
        self.faults = faults

    def run(self, size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
        return world(size, self.faults).run(lambda: body(my_peer(), *args))


class TestWhatIsDrawn:
    def test_depends_on_the_whole_address(self) -> None:
        faults = Faults(seed=3, delay_s=(0.0, 1.0))
        address = ("send", "a", 0, 1, 0, 0)
        others = [
            ("allreduce", "a", 0, 1, 0, 0),
            ("send", "b", 0, 1, 0, 0),
            ("send", "a", 2, 1, 0, 0),
            ("send", "a", 0, 2, 0, 0),
            ("send", "a", 0, 1, 1, 0),
            ("send", "a", 0, 1, 0, 1),
        ]
        delays = [faults.fate(*each).delay_s for each in (address, *others)]
        assert len(set(delays)) == len(delays)
        assert faults.fate(*address) == faults.fate(*address)
        assert Faults(seed=4, delay_s=(0.0, 1.0)).fate(*address).delay_s != delays[0]

    def test_is_spread_as_asked(self) -> None:
        faults = Faults(delay_s=(2.0, 4.0), reorder=0.25, drop=0.75)
        fates = [faults.fate("send", "a", 0, 1, round) for round in range(4000)]
        delays = np.array([fate.delay_s for fate in fates])
        assert delays.min() >= 2
        assert delays.max() <= 4
        # Five standard errors of a uniform's mean, and of a share of 4,000.
        assert abs(delays.mean() - 3) < 5 * 2 / np.sqrt(12 * 4000)
        assert abs(np.mean([fate.overtaken for fate in fates]) - 0.25) < 5 * np.sqrt(0.25 * 0.75 / 4000)
        assert abs(np.mean([fate.dropped for fate in fates]) - 0.75) < 5 * np.sqrt(0.25 * 0.75 / 4000)

    def test_spares_other_lanes_and_never_drops_a_collective(self) -> None:
        faults = Faults(delay_s=(1.0, 1.0), reorder=1.0, drop=1.0, lanes="gradients.*")
        assert faults.fate("send", "session", 0, 1, 0) == (0.0, False, False)
        assert faults.fate("send", "gradients.0[1]", 0, 1, 0) == (1.0, True, True)
        assert faults.fate("allreduce", "gradients.0[1]", 0, -1, 0) == (1.0, False, False)

    @pytest.mark.parametrize(
        "wrong", [{"seed": -1}, {"delay_s": (2.0, 1.0)}, {"delay_s": (0.0, float("inf"))}, {"drop": 1.5}]
    )
    def test_refuses_what_cannot_be(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Faults(**wrong)


class TestDelays:
    def test_a_message_comes_so_much_later(self) -> None:
        def body() -> float:
            peer, word = my_peer(), np.zeros(1)
            lane = peer.lane("a")
            start_s = peer.clock.now()
            if peer.rank == 0:
                lane.isend(word, 1, 0).wait()
            else:
                lane.irecv(word, 0, 0).wait()
            return peer.clock.now() - start_s

        network = NetworkModel(latency_s=1.0, bandwidth_bits_per_s=64.0)
        assert VirtualWorld(2, network=network).run(body)[1] == 2.0
        assert world(2, Faults(delay_s=(5.0, 5.0)), network=network).run(body)[1] == 7.0

    def test_a_collective_begins_so_much_later(self) -> None:
        def body() -> float:
            peer = my_peer()
            lane = peer.lane("a")
            start_s = peer.clock.now()
            lane.ibarrier().wait()
            return peer.clock.now() - start_s

        early = VirtualWorld(3).run(body)[0]
        assert world(3, Faults(delay_s=(5.0, 5.0))).run(body)[0] == pytest.approx(5.0 + early)

    def test_a_delayed_send_wakes_a_sleeping_thread(self) -> None:
        def body() -> float:
            peer, word = my_peer(), np.zeros(1)
            lane, wake = peer.lane("a"), peer.threads.wake()
            if peer.rank == 0:
                lane.isend(word, 1, 0)
                return 0.0
            request = lane.irecv(word, 0, 0)
            while not request.done():
                wake.wait(None)
            return peer.clock.now()

        assert 5.0 < world(2, Faults(delay_s=(5.0, 5.0))).run(body)[1] < 5.1

    def test_a_message_is_overtaken_by_the_next_to_elsewhere(self) -> None:
        first = next(
            seed
            for seed in range(100)
            if Faults(seed, reorder=0.5).fate("send", "a", 0, 1, 0).overtaken
            and not Faults(seed, reorder=0.5).fate("send", "a", 0, 1, 1).overtaken
        )

        def body() -> list[bool]:
            peer, words = my_peer(), np.zeros(2)
            lane = peer.lane("a")
            if peer.rank == 0:
                for round in range(2):
                    lane.isend(words[:1], 1, round)
                return []
            requests = [lane.irecv(words[round : round + 1], 0, round) for round in range(2)]
            requests[1].wait()
            return [requests[0].done()]

        network = NetworkModel(latency_s=1.0, bandwidth_bits_per_s=64.0)
        assert world(2, Faults(), network=network).run(body)[1] == [True]
        assert world(2, Faults(first, reorder=0.5), network=network).run(body)[1] == [False]


class TestDrops:
    def test_end_in_an_error_that_names_the_message(self) -> None:
        def body() -> str:
            peer, word = my_peer(), np.zeros(1)
            lane = peer.lane("gradients.0[3]")
            lane.isend(word, 1 - peer.rank, 6).wait()
            with pytest.raises(ExchangeTimeoutError) as raised:
                lane.irecv(word, 1 - peer.rank, 6).wait(timeout_s=2.0)
            return str(raised.value)

        for rank, message in enumerate(world(2, Faults(drop=1.0)).run(body)):
            assert f"rank {rank} " in message
            assert f"rank {1 - rank} in irecv, round 6, lane 'gradients.0[3]'" in message


def workload(peer: Peer, steps: int = 4) -> None:
    """Exchange with everybody a few times: messages all around, then an allreduce."""
    lanes = [peer.lane("a"), peer.lane("b")]
    for step in range(steps):
        messages(peer, lanes[step % 2], step)
        total = np.zeros(3)
        lanes[0].iallreduce(np.full(3, float(peer.rank)), total).wait()
        assert (total == peer.size * (peer.size - 1) / 2).all()
        peer.status.note_step(step + 1)
    assert peer.allgather_bytes(bytes([peer.rank])) == [bytes([rank]) for rank in range(peer.size)]


def messages(peer: Peer, lane: Lane, round: int) -> None:
    others = [rank for rank in range(peer.size) if rank != peer.rank]
    received = {rank: np.zeros(2) for rank in others}
    requests = [lane.irecv(data, rank, round) for rank, data in received.items()]
    requests += [lane.isend(np.array([peer.rank, round], float), rank, round) for rank in others]
    for request in reversed(requests):
        request.wait()
    for rank, data in received.items():
        assert data.tolist() == [rank, round]


def survive(peer: Peer) -> str:
    """Return what ended the workload; nothing where it came to its end."""
    try:
        workload(peer)
    except PeerLostError as error:
        return str(error)
    return ""


class TestKills:
    def test_survivors_name_the_dead_rank_within_a_second(self) -> None:
        def body() -> tuple[str, float]:
            return survive(my_peer()), my_peer().clock.now()

        broken = world(4, Faults(kill=KillAt(rank=2, step=1, call=3)))
        results = broken.run(body)
        assert broken.killed == [2]
        assert results[2] is None
        for rank in (0, 1, 3):
            told, at_s = results[rank]
            assert told.startswith(f"rank {rank} ")
            assert told.endswith("rank 2 [main] (step 1) was killed")
            assert at_s < 1.0

    def test_a_world_whose_survivors_catch_nothing_raises_their_error(self) -> None:
        with pytest.raises(PeerLostError, match=r"rank 1 \[main\] was killed"):
            world(3, Faults(kill=KillAt(rank=1, call=5))).run(lambda: workload(my_peer()))

    def test_a_dead_rank_takes_part_in_nothing_any_more(self) -> None:
        after_death: list[str] = []

        def body() -> None:
            peer = my_peer()
            lane = peer.lane("a")
            if peer.rank == 0:
                # Nobody survives in an `except Exception`, or by holding on.
                for _ in range(3):
                    try:
                        lane.ibarrier()
                    except Exception:
                        after_death.append("survived")
                    except BaseException as error:
                        after_death.append(type(error).__name__)
            else:
                lane.ibarrier().wait()

        with pytest.raises(PeerLostError, match="rank 0"):
            world(2, Faults(kill=KillAt(rank=0, call=1))).run(body)
        assert after_death == [RankKilledError.__name__] * 3

    def test_all_tasks_of_the_rank_die(self) -> None:
        ended: list[str] = []

        def beside(peer: Peer) -> None:
            try:
                peer.threads.event().wait(lambda: "nothing")
            except RankKilledError:
                ended.append(f"rank {peer.rank}")
                raise

        def body() -> None:
            peer = my_peer()
            lane = peer.lane("a")
            if peer.rank == 1:
                peer.threads.spawn("beside", lambda: beside(peer))
                peer.clock.elapse(1e-3)
            lane.ibarrier().wait()

        with pytest.raises(PeerLostError, match="rank 1"):
            world(2, Faults(kill=KillAt(rank=1, call=1))).run(body)
        assert ended == ["rank 1"]

    def test_who_needs_the_dead_rank_no_more_ends_well(self) -> None:
        def body() -> int:
            peer = my_peer()
            if peer.rank == 1:
                peer.lane("nobody comes")
            return peer.rank

        assert world(3, Faults(kill=KillAt(rank=1))).run(body) == [0, None, 2]


def history(seed: int, size: int, faults: Faults) -> list[Any]:
    def body() -> Any:
        return survive(my_peer()), my_peer().clock.now()

    run = world(size, faults, seed=seed, timeout_s=60.0)
    return [*run.run(body), run.killed, run.elapsed_s, run.num_messages]


@given(
    seed=st.integers(0, 2**32),
    size=st.integers(2, 8),
    delay_s=st.sampled_from([0.0, 1e-6, 1e-4, 0.1]),
    reorder=st.sampled_from([0.0, 0.3, 1.0]),
    victim=st.integers(0, 7),
    step=st.integers(0, 4),
    call=st.integers(0, 20),
)
def test_no_kill_hangs_anybody(
    seed: int, size: int, delay_s: float, reorder: float, victim: int, step: int, call: int
) -> None:
    kill = KillAt(victim % size, step, call)
    faults = Faults(seed, delay_s=(0.0, delay_s), reorder=reorder, kill=kill)
    *results, killed, elapsed_s, _ = history(seed, size, faults)
    assert elapsed_s < 60.0
    if not killed:
        assert [told for told, _ in results] == [""] * size
        return
    assert killed == [kill.rank]
    for rank, result in enumerate(results):
        if rank == kill.rank:
            assert result is None
        else:
            assert re.search(rf"rank {kill.rank} \[main\].* was killed", result[0])


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), size=st.integers(2, 6))
def test_the_same_seed_gives_the_same_history(seed: int, size: int) -> None:
    faults = Faults(seed, delay_s=(0.0, 1e-3), reorder=0.3, kill=KillAt(rank=1, step=2, call=1))
    assert history(seed, size, faults) == history(seed, size, faults)
    other = Faults(seed + 1, delay_s=(0.0, 1e-3), reorder=0.3, kill=KillAt(rank=1, step=2, call=1))
    assert history(seed, size, faults) != history(seed, size, other)
