"""SPARTA alone, with a delay, and between DiLoCo's outer steps: values, equal elements, and bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from oracle import Family, Vector, trained
from sparta import Sparta, count
from toys import LAYERS, inner_step, layers_of, on_ranks, start, steps_of, toy_session

import hocket

STEPS, DENSITY = 19, 0.25
RECIPE = ("parameters.0.segments=layers", f"parameters.0.compressor.density={DENSITY}")
STAGGERED = ("parameters.0.every=4", "parameters.0.stagger=true")


def assert_trained(strategy: Any, sparta: Sparta, family: Family, ranks: int) -> None:
    def steps(step: int, theta: dict[str, Vector]) -> None:
        inner_step(step, theta)
        sparta.step(step, theta)

    def ended() -> Any:
        with toy_session(strategy) as session:
            steps_of(session, STEPS)
            return layers_of(session.model)

    replicas, _ = trained(family, start(ranks), STEPS, steps)
    for rank, own in enumerate(on_ranks(ranks, ended)):
        for layer in LAYERS:
            np.testing.assert_allclose(own[layer], replicas[-1][layer][rank], rtol=1e-11, atol=1e-12)


@pytest.mark.one_of_each
@pytest.mark.parametrize("algorithm", ["native", "ring"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_it_is_that_of_its_definition(ranks: int, algorithm: str) -> None:
    how = f"parameters.0.collective={{name: allreduce, algorithm: {algorithm}}}"
    assert_trained(hocket.compose("diloco.sparta", *RECIPE, how), Sparta(DENSITY), Family(1000), ranks)


@pytest.mark.parametrize(("every", "delay"), [(1, 1), (4, 3), (4, 4)])
def test_means_come_later_where_layers_take_turns(every: int, delay: int) -> None:
    """Steps made while they travel stay."""
    staggered = STAGGERED if every > 1 else ()
    strategy = hocket.compose("diloco.sparta", *RECIPE, *staggered, f"parameters.0.delay={delay}")
    sparta = Sparta(DENSITY, every, [1, 2, 3, 4] if every > 1 else (), delay)
    assert_trained(strategy, sparta, Family(1000), 3)


def test_between_outer_steps_it_keeps_what_these_step_by() -> None:
    strategy = hocket.compose("diloco.sparta_diloco", *RECIPE, "parameters.1.every=5")
    assert_trained(strategy, Sparta(DENSITY), Family(5, 0.7, 0.9, nesterov=True), 3)


def test_ranks_end_a_round_with_the_same_bits_of_what_has_travelled_and_their_own_of_all_else() -> None:
    """Without steps the rest is what it was, to the bit."""

    def ended() -> Any:
        strategy = hocket.compose("diloco.sparta", *RECIPE)
        with toy_session(strategy, lr=0.0, initial="keep", shift=True) as session:
            before = layers_of(session.model)
            steps_of(session, 1)
            return before, layers_of(session.model)

    given, travelled = on_ranks(3, ended), 0
    for layer, size in LAYERS.items():
        before, after = (np.stack([each[i][layer] for each in given]) for i in (0, 1))
        changed = (before != after).any(0)
        assert changed.sum() <= count(DENSITY, size)
        assert (after[:, changed] == after[0, changed]).all()
        travelled += changed.sum()
    assert travelled >= 4


def test_counted_bytes_are_those_of_an_allreduce_of_the_elements_that_travel() -> None:
    def sent() -> float:
        with toy_session(hocket.compose("diloco.sparta", *RECIPE)) as session:
            steps_of(session, STEPS)
            return float(session.counters.bytes_sent)

    elements = sum(count(DENSITY, size) for size in LAYERS.values())
    assert on_ranks(4, sent) == [pytest.approx(STEPS * 2 * 3 / 4 * 8 * elements)] * 4
