"""The fair topology: the contract, what is kept between draws, and the roulettes that are refused."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.config.component import describe
from hocket.errors import ConfigError
from hocket.strategy import compose
from hocket.testing.topology import TopologyConformance
from hocket_crossover import FairRandom
from hocket_crossover.derangements import uniform

PREFER_NEXT = tuple(
    tuple(0.0 if i == j else 9.0 if j == (i + 1) % 6 else 1.0 for j in range(6)) for i in range(6)
)


class TestFairRandom(TopologyConformance):
    topologies = (FairRandom(), FairRandom(seed=2**64 - 1))


class TestWithRoulette(TopologyConformance):
    topologies = (FairRandom(roulette=PREFER_NEXT),)
    refuses = tuple(size for size in range(1, 34) if size != 6)


@given(st.integers(2, 40), st.integers(0, 2**40), st.integers(0, 2**20))
def test_the_mixing_matrix_is_half_a_derangement(size: int, round: int, segment: int) -> None:
    matrix = FairRandom(seed=3).mixing_matrix(size, round, segment)
    sources = uniform(size, 3, [(round, segment)])[0]
    expected = np.eye(size) / 2
    expected[np.arange(size), sources] = 0.5
    np.testing.assert_array_equal(matrix, expected)


def test_two_ranks_swap() -> None:
    neighbours = FairRandom().neighbours(0, 2, 5, 1)
    assert (neighbours.send_to, neighbours.receive_from, neighbours.self_weight) == ((1,), (1,), 0.5)


def test_segments_and_rounds_have_graphs_of_their_own() -> None:
    topology = FairRandom()
    sources = {
        tuple(topology.neighbours(rank, 16, round, segment).receive_from[0] for rank in range(16))
        for round in range(20)
        for segment in range(20)
    }
    assert len(sources) == 400


def test_large_draws_are_the_same_in_any_order() -> None:
    """For 1000 ranks and 40 segments; rounds are skipped and come again."""
    topology = FairRandom(seed=11)
    for round in (0, 1, 2, 3, 5, 4, 9, 3, 10, 11):
        for segment in range(40):
            sources = uniform(1000, 11, [(round, segment)])[0]
            neighbours = topology.neighbours(7, 1000, round, segment)
            assert neighbours.receive_from == (int(sources[7]),)
            assert sources[neighbours.send_to[0]] == 7


def test_every_process_draws_the_same() -> None:
    code = (
        "from hocket_crossover import FairRandom, Unfair\n"
        "for t in (FairRandom(5), Unfair(5), Unfair(5, True)):\n"
        "    print([t.neighbours(r, 9, 2, s).receive_from[0] for s in (4, 1) for r in range(9)])\n"
    )
    outputs = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    [output] = outputs
    expected = [int(FairRandom(5).neighbours(r, 9, 2, s).receive_from[0]) for s in (4, 1) for r in range(9)]
    assert output.splitlines()[0] == str(expected)


def test_a_roulette_can_stand_in_a_config_and_comes_back() -> None:
    strategy = compose(
        "crossover",
        "parameters.0.topology={name: crossover.fair_random, roulette: [[0, 1, 2], [1, 0, 1], [1, 1, 0]]}",
    )
    assert strategy.parameters[0].topology == FairRandom(roulette=((0, 1, 2), (1, 0, 1), (1, 1, 0)))
    assert compose(strategy.resolved()) == strategy
    assert describe(strategy.parameters[0].topology)["roulette"][0] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("roulette", "reason"),
    [
        ("[[0, 1], [1]]", "square table"),
        ("[[0, 1]]", "square table"),
        ("5", "square table"),
        ("[[0, -1], [1, 0]]", "negative"),
        ("[[0, .nan], [1, 0]]", "not a number"),
        ("[[0, 1e308], [1, 0]]", "too large"),
        ("[[1, 1], [1, 0]]", "no rank receives from itself"),
        ("[[0, 1, 0], [1, 0, 0], [1, 1, 0]]", "without a partner"),
    ],
)
def test_a_table_that_is_no_roulette_is_refused(roulette: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"parameters\.0\.topology\.roulette: roulette .*{reason}"):
        compose("crossover", f"parameters.0.topology={{name: crossover.fair_random, roulette: {roulette}}}")


def test_composing_needs_no_torch() -> None:
    code = (
        "import sys, hocket\n"
        "for recipe in ('crossover', 'crossover.combo', 'crossover.hierarchical'):\n"
        "    hocket.compose(recipe).parameters[0].topology.neighbours(0, 4, 0, 0)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
