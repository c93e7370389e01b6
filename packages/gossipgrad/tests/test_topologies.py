"""Dissemination, hypercube, rotation and random pushes: the interface's contract, and what the paper says of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hocket
from hocket import draws
from hocket.errors import CompositionError, ConfigError
from hocket.strategy import Placement
from hocket.testing.topology import Irregular, TopologyConformance
from hocket.topology import Exponential, Topology
from hocket_gossipgrad import Dissemination, Hypercube, RandomPush, Rotated, Shuffles
from hocket_gossipgrad.dissemination import num_dimensions

POWERS = [2, 4, 8, 16, 32, 64, 128, 256]
NO_POWERS = [size for size in range(1, 34) if size & (size - 1)]


class TestDissemination(TopologyConformance):
    topologies = (
        Dissemination(),
        Rotated(Dissemination()),
        Rotated(Dissemination(), Shuffles.FIXED, seed=5),
        Rotated(Irregular(3), seed=2**64 - 1),
    )


class TestHypercube(TopologyConformance):
    topologies = (Hypercube(), Rotated(Hypercube(), seed=7))
    refuses = NO_POWERS


class TestRandomPush(TopologyConformance):
    topologies = (RandomPush(), RandomPush(2**64 - 1))


def receivers(topology: Topology, size: int, round: int) -> np.ndarray:
    """Return the receiver of each rank, [size], for topologies with one receiver each."""
    return np.array([topology.neighbours(rank, size, round, 0).send_to[0] for rank in range(size)])


def reached(topology: Topology, size: int, rounds: range) -> np.ndarray:
    """Return whether a rank's value has reached another one, bool [to, from]."""
    known = np.eye(size, dtype=bool)
    for round in rounds:
        to = receivers(topology, size, round)
        arrived = known.copy()
        arrived[to] |= known
        known = arrived
    return known


@pytest.mark.parametrize(
    ("topology", "sizes"),
    [(Dissemination(), range(2, 258)), (Hypercube(), POWERS)],
    ids=["dissemination", "hypercube"],
)
def test_everything_reaches_everyone_in_log2_steps_and_no_sooner(topology: Topology, sizes: range) -> None:
    for size in sizes:
        steps = math.ceil(math.log2(size))
        assert reached(topology, size, range(steps)).all(), size
        assert not reached(topology, size, range(steps - 1)).all(), size


@given(size=st.integers(2, 257), cycle=st.integers(0, 2**40), seed=st.integers(0, 2**64 - 1))
def test_and_so_it_does_in_each_rotated_cycle(size: int, cycle: int, seed: int) -> None:
    steps = num_dimensions(size)
    rounds = range(cycle * steps, (cycle + 1) * steps)
    assert reached(Rotated(Dissemination(), seed=seed), size, rounds).all()


@given(size=st.integers(2, 257), round=st.integers(0, 2**40), seed=st.integers(0, 2**64 - 1))
def test_each_step_is_a_permutation(size: int, round: int, seed: int) -> None:
    """One message from each rank and to each, and nobody to himself."""
    rotated = [Rotated(Dissemination(), shuffles, seed) for shuffles in Shuffles]
    powers = [Hypercube(), Rotated(Hypercube(), seed=seed)] if size in POWERS else []
    for topology in (Dissemination(), *rotated, *powers):
        to = receivers(topology, size, round)
        assert sorted(to) == list(range(size))
        assert (to != np.arange(size)).all()


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 8, 13, 16])
def test_a_cycle_gives_the_mean_for_powers_of_two_alone(size: int) -> None:
    product = np.eye(size)
    for round in range(num_dimensions(size)):
        product = Dissemination().mixing_matrix(size, round, 0) @ product
    assert np.allclose(product, 1 / size, atol=1e-12) == (size in POWERS)
    assert (product > 0).all()


def test_dissemination_is_the_one_peer_exponential_graph() -> None:
    for size in range(1, 20):
        for round in range(12):
            np.testing.assert_array_equal(
                Dissemination().mixing_matrix(size, round, 0), Exponential().mixing_matrix(size, round, 0)
            )


def meetings(topology: Topology, size: int, rounds: int) -> np.ndarray:
    """Return whether ordered pairs exchange directly within that many rounds, bool [from, to]."""
    met = np.eye(size, dtype=bool)
    for round in range(rounds):
        met[np.arange(size), receivers(topology, size, round)] = True
    return met


def stated_rounds(size: int) -> int:
    return num_dimensions(size) + math.ceil((size - 1) * (2 * math.log(size) + 7))


@pytest.mark.parametrize("size", [*range(2, 34), 64, 100])
def test_every_ordered_pair_meets_within_the_stated_number_of_steps(size: int) -> None:
    assert meetings(Rotated(Dissemination()), size, stated_rounds(size)).all()
    if size in POWERS:
        assert meetings(Rotated(Hypercube()), size, stated_rounds(size)).all()


def test_without_rotation_most_pairs_never_meet() -> None:
    assert meetings(Dissemination(), 32, 1000).sum() == 32 * (1 + 5)


@pytest.mark.parametrize("size", [8, 32])
def test_p_fixed_shuffles_leave_some_pairs_apart(size: int) -> None:
    """The number of pairs is the docstring's on average over seeds; more rounds do not help, as they repeat."""
    cycle = size * num_dimensions(size)
    apart = [
        (~meetings(Rotated(Dissemination(), Shuffles.FIXED, seed), size, cycle)).sum() for seed in range(40)
    ]
    chance = 1 - num_dimensions(size) / (size - 1)
    expected = size * (size - 1) * chance**size
    assert np.mean(apart) == pytest.approx(expected, abs=4 * math.sqrt(expected / len(apart)))
    worst = Rotated(Dissemination(), Shuffles.FIXED, seed=int(np.argmax(apart)))
    for rank in range(size):
        assert worst.neighbours(rank, size, 1, 0) == worst.neighbours(rank, size, 1 + cycle, 0)
    assert (~meetings(worst, size, stated_rounds(size))).sum() == max(apart) > 0


def test_the_first_block_is_unshuffled_and_later_ones_differ() -> None:
    for shuffles in Shuffles:
        rotated = Rotated(Dissemination(), shuffles)
        for round in range(3):
            assert (receivers(rotated, 8, round) == receivers(Dissemination(), 8, round)).all()
        assert any(
            (receivers(rotated, 8, 3 + r) != receivers(Dissemination(), 8, 3 + r)).any() for r in range(3)
        )


@pytest.mark.parametrize("topology", [Hypercube(), Dissemination()])
def test_a_block_is_one_relabelling_of_the_ranks(topology: Topology) -> None:
    size, seed = 8, 3
    for round in range(3, 15):
        relabel = np.eye(size)[draws.permutation(size, "rotation", seed, round // 3)].T
        expected = relabel @ topology.mixing_matrix(size, round, 0) @ relabel.T
        np.testing.assert_array_equal(Rotated(topology, seed=seed).mixing_matrix(size, round, 0), expected)


def test_random_pushes_are_unbalanced() -> None:
    counts = np.concatenate([np.bincount(receivers(RandomPush(), 32, r), minlength=32) for r in range(100)])
    assert np.mean(counts == 0) == pytest.approx((1 - 1 / 31) ** 31, abs=0.03)
    assert counts.max() >= 4


def test_a_hypercube_of_6_ranks_is_refused_with_the_alternative() -> None:
    strategy = hocket.compose("gossipgrad.hypercube")
    with pytest.raises(CompositionError, match=r"6 ranks: use 4 or 8 ranks, or gossipgrad\.dissemination"):
        strategy.check_size(Placement.on_one_host(6))
    strategy.check_size(Placement.on_one_host(8))


def test_rotation_over_what_needs_push_sum_says_so() -> None:
    assert not Rotated(Irregular()).rows_sum_to_one
    exchange = {
        "collective": "gossip",
        "topology": {"name": "gossipgrad.rotated", "topology": "irregular_directed"},
    }
    with pytest.raises(CompositionError, match=r"irregular_directed.*not an average"):
        hocket.compose({"parameters": [exchange]})


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_out_of_range_is_refused(seed: int) -> None:
    for topology in ("gossipgrad.random_push", "gossipgrad.rotated"):
        fields = {"topology": "ring"} if topology.endswith("rotated") else {}
        exchange = {"collective": "gossip", "topology": {"name": topology, "seed": seed, **fields}}
        with pytest.raises(ConfigError, match=f"seed is {seed}"):
            hocket.compose({"parameters": [exchange]})


def test_the_hypercubes_partners_by_hand() -> None:
    partners = [Hypercube().neighbours(5, 8, round, 0).send_to for round in range(4)]
    assert partners == [(4,), (7,), (1,), (4,)]
