"""Schedules carried out by both engines on virtual ranks, against NumPy."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from bodies import ALLREDUCES, ENGINES, CalledSum, allreduce_rounds, broadcast_rounds, called_rounds
from hypothesis import given
from hypothesis import strategies as st

from hocket.launch.joining import join
from hocket.progress import Execution, InlineProgress, ThreadProgress
from hocket.schedule import (
    Compute,
    Gate,
    Logic,
    NoOp,
    Operation,
    Receive,
    Schedule,
    Send,
    recursive_doubling_allreduce,
    ring_allreduce,
)
from hocket.transport.network import (
    NetworkModel,
)
from hocket.transport.single import SinglePeer
from hocket.transport.virtual import VirtualWorld

MODELS = {
    "binomial": NetworkModel.binomial_cost,
    "rabenseifner": NetworkModel.rabenseifner_cost,
    "recursive doubling": NetworkModel.recursive_doubling_cost,
    "ring": NetworkModel.ring_cost,
}


@given(
    size=st.one_of(st.integers(1, 9), st.just(17)),
    seed=st.integers(0, 10**6),
    engine=st.sampled_from(sorted(ENGINES)),
    kind=st.sampled_from(sorted(ALLREDUCES)),
    count=st.one_of(st.integers(0, 40), st.just(1003)),
    dtype=st.sampled_from(["float32", "float64"]),
)
def test_allreduce(size: int, seed: int, engine: str, kind: str, count: int, dtype: str) -> None:
    told = VirtualWorld(size, seed=seed).run(
        lambda: allreduce_rounds(join(), seed, engine, kind, count, dtype)
    )
    assert told == [told[0]] * size  # the same bits


@pytest.mark.parametrize(("size", "num_parts"), [(2, 2), (3, 4), (5, 3)])
def test_large_shares_go_around_a_ring_in_parts(size: int, num_parts: int) -> None:
    count = size * num_parts * (1 << 15) + 3  # parts of 2^18 bytes
    told = VirtualWorld(size).run(lambda: allreduce_rounds(join(), size, "inline", "ring", count, "float64"))
    assert told == [told[0]] * size
    assert ring_allreduce(0, size, np.zeros(count)).num_tags == num_parts * 2 * (size - 1)


@pytest.mark.one_of_each
@pytest.mark.parametrize("size", range(1, 18))
@pytest.mark.parametrize("kind", MODELS)
def test_allreduce_among_any_number(kind: str, size: int) -> None:
    told = VirtualWorld(size).run(
        lambda: allreduce_rounds(join(), size, "inline", kind, 5 * size + 3, "float64")
    )
    assert told == [told[0]] * size


@pytest.mark.parametrize("kind", MODELS)
def test_virtual_seconds_are_the_model_s(kind: str) -> None:
    network = NetworkModel(latency_s=1e-3, bandwidth_bits_per_s=8e7)

    def seconds(count: int) -> float:
        peer, progress = join(), InlineProgress()
        data = np.ones(count)
        run = Execution(ALLREDUCES[kind](peer.rank, peer.size, data), peer, progress, "sum")
        peer.lane("begin").ibarrier().wait()
        begin_s = peer.clock.now()
        run.start(0).wait()
        took_s = peer.clock.now() - begin_s
        progress.close()
        return took_s

    for size, count in product((2, 4, 5, 7, 8, 17), (1, 100_000)):
        simulated = max(VirtualWorld(size, network=network).run(lambda: seconds(count)))  # noqa: B023
        assert simulated == pytest.approx(MODELS[kind](network, 8 * count, size).seconds, rel=0.01)


@pytest.mark.one_of_each
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("size", [*range(1, 10), 17])
def test_broadcast(size: int, engine: str) -> None:
    VirtualWorld(size).run(lambda: broadcast_rounds(join(), engine, 7))


@pytest.mark.parametrize("engine", ENGINES)
def test_runs_go_on_side_by_side(engine: str) -> None:
    """Two exchanges, started in another order on every other rank."""

    def body() -> None:
        peer = join()
        progress = ENGINES[engine]()
        datas = [np.ones(3), np.ones(5)]
        runs = [
            Execution(
                recursive_doubling_allreduce(peer.rank, peer.size, data), peer, progress, f"segment {number}"
            )
            for number, data in enumerate(datas)
        ]
        order = [0, 1] if peer.rank % 2 else [1, 0]
        for round in range(3):
            requests = [runs[number].start(round) for number in order]
            for request in reversed(requests):
                request.wait()
        assert all((data == 6**3).all() for data in datas)
        progress.close()

    VirtualWorld(6).run(body)


def test_groups_count_their_own_ranks() -> None:
    def body() -> float:
        peer = join()
        group = peer.group([rank for rank in (4, 2, 0, 1, 3) if rank % 2 == peer.rank % 2])
        assert group is not None
        progress = ThreadProgress()
        data = np.array([float(peer.rank)])
        run = Execution(recursive_doubling_allreduce(group.rank, group.size, data), group, progress, "group")
        run.start(0).wait()
        progress.close()
        return float(data[0])

    assert VirtualWorld(5).run(body) == [6.0, 4.0, 6.0, 4.0, 6.0]


def test_an_operation_fires_once_and_may_wait_for_any() -> None:
    fired: list[str] = []

    def note(name: str, *after: str, logic: Logic = Logic.ALL) -> Compute:
        return Compute(name, after, logic, call=lambda round: fired.append(f"{name} {round}"))

    schedule = Schedule(
        (
            NoOp("go"),
            note("a", "go"),
            note("b", "a"),
            note("any", "a", "b", logic=Logic.ANY),
            note("all", "a", "b"),
            note("never", "unheard"),
            Receive("unheard", source=0),
        ),
        ("any", "all"),
        trigger="go",
        persistent=True,
    )
    progress = InlineProgress()
    run = Execution(schedule, SinglePeer(), progress, "run")
    run.start(1).wait()
    assert run.num_ended == 2
    assert fired == [f"{name} {round}" for round in (0, 1) for name in ("a", "b", "any", "all")]
    progress.close()


def test_a_gate_holds_a_round_back_until_it_is_open() -> None:
    """It is asked when it fires, and again when the run is nudged; each round anew."""
    asked: list[int] = []
    opened: set[int] = {0}

    def is_open(round: int) -> bool:
        asked.append(round)
        return round in opened

    schedule = Schedule((NoOp("go"), Gate("gate", ("go",), is_open=is_open)), ("gate",), trigger="go")
    progress = InlineProgress()
    run = Execution(schedule, SinglePeer(), progress, "run")
    run.start(0).wait()
    assert asked == [0]
    request = run.start(1)
    assert not request.done()
    opened.add(1)
    run.nudge()
    assert request.done()
    assert set(asked) == {0, 1}
    progress.close()


def test_messages_of_the_next_round_wait_for_it() -> None:
    """Rank 0 sends without waiting for anybody, rank 1 receives late and slowly: rounds keep apart."""

    def body() -> list[tuple[int, int]]:
        peer = join()
        progress = ThreadProgress()
        data = np.zeros(1, np.int64)
        seen: list[tuple[int, int]] = []
        if peer.rank == 0:

            def count(round: int) -> None:
                data[0] = round

            operations: tuple[Operation, ...] = (
                NoOp("go"),
                Compute("set", ("go",), call=count),
                Send("send", ("set",), data=data, to=1),
            )
            schedule = Schedule(operations, ("send",), trigger="go")
        else:
            operations = (
                NoOp("go"),
                Receive("get", ("go",), data=data, source=0),
                Compute("see", ("get",), call=lambda round: seen.append((round, int(data[0])))),
            )
            schedule = Schedule(operations, ("see",), trigger="go")
        run = Execution(schedule, peer, progress, "stream")
        for round in range(20):
            peer.clock.elapse(0.1 * peer.rank)
            run.start(round).wait()
        progress.close()
        return seen

    assert VirtualWorld(2).run(body)[1] == [(round, round) for round in range(20)]


def test_inline_progress_advances_what_it_watches() -> None:
    def body() -> None:
        peer = join()
        progress = InlineProgress()
        lane = peer.lane("a")
        received = np.zeros(1)
        request = lane.irecv(received, (peer.rank + 1) % 2, 0)
        progress.watch(request.done)
        lane.isend(np.ones(1), (peer.rank + 1) % 2, 0)
        while not request.done():
            progress.advance()
        assert received[0] == 1

    VirtualWorld(2).run(body)


# ------------------------------------------------------------------------------------------- called by other ranks


@given(
    size=st.integers(1, 9),
    seed=st.integers(0, 10**6),
    rounds=st.integers(1, 12),
    allreduce=st.sampled_from(sorted(ALLREDUCES)),
    slow=st.sampled_from([1.0, 10.0, 100.0]),
)
def test_each_round_has_everybody_once(
    size: int, seed: int, rounds: int, allreduce: str, slow: float
) -> None:
    """However many start a round, and whoever has none of it in hand yet."""
    told = VirtualWorld(size, seed=seed).run(lambda: called_rounds(join(), seed, rounds, 3, allreduce, slow))
    assert told == [[size] * rounds] * size


def test_a_slow_rank_is_pulled_through_rounds_and_holds_nobody_up() -> None:
    def body() -> tuple[float, int]:
        peer = join()
        progress = ThreadProgress()
        run = CalledSum(peer, progress).run
        if peer.rank == 2:
            peer.clock.elapse(1.0)
        ended = run.num_ended
        for round in range(10):
            run.start(round).wait()
        after_s = peer.clock.now()
        progress.close()
        return after_s, ended

    fast, _, slow, _ = VirtualWorld(4).run(body)
    assert fast[0] < 0.01
    assert slow[0] == pytest.approx(1.0, abs=0.01)
    assert slow[1] == 10, "all rounds had ended before it came"


def test_who_closes_first_goes_on_answering() -> None:
    def body() -> float:
        peer = join()
        progress = ThreadProgress()
        called = CalledSum(peer, progress)
        for round in range(5 if peer.rank == 0 else 1):
            peer.clock.elapse(0.1)
            called.run.start(round).wait()
        progress.close()
        assert called.sums == [3.0] * 5
        return peer.clock.now()

    assert min(VirtualWorld(3).run(body)) > 0.5


@pytest.mark.parametrize("seed", range(3))
def test_the_same_seed_gives_the_same_run(seed: int) -> None:
    def run() -> tuple[list[object], float]:
        world = VirtualWorld(5, seed=seed)
        return world.run(lambda: called_rounds(join(), seed, 6, 2, "ring", 10.0)), world.elapsed_s

    assert run() == run()
