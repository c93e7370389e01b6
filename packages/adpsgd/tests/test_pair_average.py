"""Averagings of pairs against the replay of the order in which they took place, and rounds against steps of gossip."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pair_cases import Case, check, mean_at_start, mean_of, simulate, start_of, target_of

import hocket
from hocket.collective.api import Choices
from hocket.progress import ThreadProgress
from hocket.segment.partition import Model, named_spans, partition
from hocket.segment.segment import Segment
from hocket.testing.collective import Shape
from hocket.testing.collective.rounds import Case as Rounds
from hocket.testing.collective.rounds import time_round
from hocket.topology import Complete, RandomMatching, Ring, Topology
from hocket.transport.faults import Faults
from hocket.transport.network import NetworkModel
from hocket.transport.virtual import VirtualWorld, current_peer
from hocket_adpsgd import PairAverage
from hocket_adpsgd.pairing import SharedCopy

# Each example is a whole training.
NO_SHRINK = [phase for phase in Phase if phase is not Phase.shrink]
TOPOLOGIES = ("complete", "ring", "exponential", "random_matching", "irregular_directed")


@settings(deadline=None, phases=NO_SHRINK, suppress_health_check=[HealthCheck.too_slow])
@given(
    ranks=st.integers(2, 9),
    steps=st.integers(1, 12),
    topology=st.sampled_from(TOPOLOGIES),
    segments=st.sampled_from(["model", "layers"]),
    delay=st.sampled_from([0, 1]),
    paces_s=st.lists(st.sampled_from([0.0, 1e-5, 1e-3, 0.01]), min_size=1, max_size=9),
    late=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_the_replay_of_the_recorded_order_gives_the_same_weights(
    ranks: int,
    steps: int,
    topology: str,
    segments: str,
    delay: int,
    paces_s: list[float],
    late: bool,
    seed: int,
) -> None:
    exchange = {"topology": topology, "segments": segments, "delay": delay, "collective.seed": seed}
    case = Case(steps, paces_s, exchange=exchange)
    faults = Faults(seed, delay_s=(0.0, 0.005), reorder=0.2) if late else None
    told = simulate(case, ranks, faults, seed)
    if delay:
        check(case, told)
    still = simulate(Case(steps, paces_s, lr=0.0, exchange=exchange), ranks, faults, seed)
    np.testing.assert_allclose(mean_of(still), mean_at_start(ranks), rtol=0, atol=1e-14 * (steps + 2))


@given(numel=st.integers(0, 40), dtype=st.sampled_from(["float32", "float64"]), seed=st.integers(0, 10**6))
def test_two_copies_move_by_the_same_to_the_bit(numel: int, dtype: str, seed: int) -> None:
    drawn = np.random.default_rng(seed)
    copies = [SharedCopy(numel, np.dtype(dtype)) for _ in range(2)]
    values = [(drawn.standard_normal(numel) * 10.0 ** drawn.integers(-6, 6)).astype(dtype) for _ in copies]
    for rank, copy in enumerate(copies):
        copy.enter(values[rank], 1 - rank)
        assert copy.begin(1 - rank) == 1
    for copy, other in zip(copies, reversed(copies), strict=True):
        copy.received[:] = other.sent
    for rank, copy in enumerate(copies):
        copy.end(1 - rank)
    np.testing.assert_array_equal(copies[0].changes(), -copies[1].changes())
    mean, out = (values[0].astype(float) + values[1]) / 2, np.empty(numel, dtype)
    for rank, copy in enumerate(copies):
        assert copy.fetch(out) == (1 - rank,)
        eps = 4 * np.finfo(dtype).eps * max(np.abs(v).max(initial=0) for v in values)
        np.testing.assert_allclose(out, mean, rtol=0, atol=eps)


def test_runs_on_virtual_ranks_repeat_to_the_bit() -> None:
    case = Case(20, [0.001, 0.004, 0.0015], exchange={"segments": "layers"})
    assert simulate(case, 5) == simulate(case, 5)


def test_a_late_rank_holds_nobody_up_and_is_averaged_with_while_it_computes() -> None:
    told = simulate(Case(40, [0.04, 0.01, 0.01, 0.01]), 4)
    slow, *fast = told
    assert slow["staleness"] > max(2, *(of_rank["active"] / of_rank["outcomes"] - 1 for of_rank in fast))
    for rank, of_rank in enumerate(told):
        assert of_rank["outcomes"] == 40
        assert set(of_rank["partners"]) == {str(other) for other in range(4) if other != rank}
        assert of_rank["bytes"] > 0


def test_one_rank_is_local_bit_for_bit() -> None:
    def local() -> list[float]:
        rank = hocket.join().rank
        values = torch.nn.Parameter(torch.from_numpy(start_of(rank)))
        optimizer = torch.optim.SGD([values], lr=0.1)
        for step in range(12):
            optimizer.zero_grad()
            ((values - torch.from_numpy(target_of(rank, step))).square().sum() / 2).backward()
            optimizer.step()
        return list(values.tolist())

    [alone] = simulate(Case(), 1)
    [expected] = VirtualWorld(1).run(local)
    assert alone["parameters"] == expected


# --- rounds of the channel ---------------------------------------------------------------------------------


def rounds_together(topology: Topology, numel: int, rounds: int) -> Callable[[], list[list[float]]]:
    """Return what ranks do that come to each round together, each with what the round before has left."""

    def body() -> list[list[float]]:
        peer = current_peer()
        assert peer is not None
        spans = partition(named_spans([("p", torch.zeros(numel, dtype=torch.float64))]), Model())[0]
        size = spans[-1].padded_numel + spans[-1].start
        outgoing, incoming = (torch.zeros(size, dtype=torch.float64) for _ in range(2))
        segment = Segment("tested[0]", 0, spans, outgoing, incoming)
        progress = ThreadProgress()
        choices = Choices("tested", "parameters", topology)
        channel = PairAverage().open(peer, [segment], progress, choices)
        outgoing[:numel] = torch.from_numpy(np.random.default_rng(peer.rank).standard_normal(numel))
        together, seen = peer.lane("together"), [outgoing[:numel].tolist()]
        for round in range(rounds):
            together.ibarrier().wait()
            outcome = channel.start([segment], round).wait()
            assert outcome.round == round
            assert outcome.num_active == 1 + len(outcome.partners) <= 2
            outgoing.copy_(incoming)
            seen.append(outgoing[:numel].tolist())
        changes = channel.take_changes(segment)
        assert changes is not None
        assert not changes.any()
        channel.close()
        progress.close()
        return seen

    return body


@pytest.mark.parametrize("size", range(1, 10))
def test_a_matching_that_asks_at_once_is_a_step_of_gossip(size: int) -> None:
    """Also where the two have asked each other: they average, and do not swap."""
    topology, rounds = RandomMatching(), 5
    seen = np.array(VirtualWorld(size).run(rounds_together(topology, 9, rounds)))
    for round in range(rounds):
        expected = topology.mixing_matrix(size, round, 0) @ seen[:, round]
        np.testing.assert_allclose(seen[:, round + 1], expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_matching_sends_as_many_bytes_as_planned(size: int) -> None:
    numel = 40_000
    worlds = [VirtualWorld(size) for _ in range(2)]
    for world, rounds in zip(worlds, (1, 6), strict=True):
        world.run(rounds_together(RandomMatching(), numel, rounds))
    said = PairAverage().cost(8 * numel, size, RandomMatching(), NetworkModel())
    # Notices are wake-ups, which count for nothing there.
    sent = (worlds[1].num_bytes - worlds[0].num_bytes) / size / 5
    assert sent == pytest.approx(said.bytes, rel=1e-3)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_matching_takes_as_long_as_planned(size: int) -> None:
    exchange = {"collective": "adpsgd.pair_average", "topology": "random_matching"}
    plain = Rounds("parameters", exchange, [Shape(0, 400_000, 0, "float32")], 1).to_json()

    def body() -> float:
        peer = current_peer()
        assert peer is not None
        return time_round(peer, plain)

    said = PairAverage().cost(1_600_000, size, RandomMatching(), NetworkModel()).seconds
    assert VirtualWorld(size).run(body) == pytest.approx([said] * size, rel=0.05)


@pytest.mark.parametrize("topology", [Complete(), Ring(), RandomMatching()])
@pytest.mark.parametrize("size", [1, 2, 5, 16])
def test_partners_are_neighbours_and_each_is_drawn(topology: Topology, size: int) -> None:
    collective = PairAverage(seed=3)
    for rank in range(size):
        drawn = set()
        for round in range(60):
            partner = collective.partner(topology, rank, size, round, 0)
            neighbours = topology.neighbours(rank, size, round, 0).send_to
            assert partner in neighbours if neighbours else partner is None
            drawn.add(partner)
        if isinstance(topology, Ring):
            assert drawn == set(topology.neighbours(rank, size, 0, 0).send_to) or size == 1
    if size > 2 and isinstance(topology, Complete):
        segments = [[collective.partner(topology, 0, size, round, s) for round in range(20)] for s in (0, 1)]
        assert segments[0] != segments[1]
