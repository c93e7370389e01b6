"""Steps of every recipe against NumPy: mixing matrices on stacked models, on 8 ranks, in both progress modes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from bodies import train
from reference import Stack, trained

import hocket
from hocket.testing.job import Job
from hocket.topology import Complete, Topology
from hocket_gossipgrad import Dissemination, Hypercube, RandomPush, Rotated

RANKS = 8
#: Two blocks and a step: in the second one ranks are in other places.
STEPS = 7

THREAD = {"parameters": "parameters.0.progress=thread", "gradients": "gradients.0.progress=thread"}


def mixing(topology: Topology, ranks: int) -> Any:
    return lambda round, segment: topology.mixing_matrix(ranks, round, segment)


def expected(recipe: str, ranks: int, steps: int) -> Stack:
    rotated = mixing(Rotated(Dissemination()), ranks)
    if recipe == "gossipgrad.gradients":
        return trained(ranks, steps, gradients_by=rotated)
    if recipe == "gossipgrad.agd_every_log":
        return trained(ranks, steps, parameters=mixing(Complete(), ranks), every=(ranks - 1).bit_length())
    if recipe == "gossipgrad.random":
        return trained(ranks, steps, parameters=mixing(RandomPush(), ranks), push_sum=True)
    if recipe == "gossipgrad.hypercube":
        return trained(ranks, steps, parameters=mixing(Rotated(Hypercube()), ranks))
    return trained(ranks, steps, parameters=rotated)


CASES = [
    ("gossipgrad", []),
    ("gossipgrad", [THREAD["parameters"]]),
    ("gossipgrad", ["parameters.0.overlap=none"]),
    ("gossipgrad", ["parameters.0.overlap=none", THREAD["parameters"]]),
    ("gossipgrad.hypercube", []),
    ("gossipgrad.hypercube", [THREAD["parameters"]]),
    ("gossipgrad.gradients", []),
    ("gossipgrad.gradients", [THREAD["gradients"]]),
    ("gossipgrad.agd_every_log", []),
    ("gossipgrad.random", []),
    ("gossipgrad.random", [THREAD["parameters"]]),
]


def check(given: list[list[Any]], recipe: str, steps: int) -> None:
    for number, stack in enumerate(expected(recipe, len(given), steps)):
        found = np.array([of_rank[number] for of_rank in given])
        np.testing.assert_allclose(found, stack, rtol=1e-11, atol=1e-13)


def on_virtual_ranks(ranks: int, recipe: str, overrides: list[str], steps: int) -> list[list[Any]]:
    return hocket.virtual(ranks).run(lambda: train(hocket.join(), recipe, overrides, steps))


@pytest.mark.parametrize(("recipe", "overrides"), CASES)
def test_on_virtual_ranks(recipe: str, overrides: list[str]) -> None:
    for steps in (1, STEPS):
        check(on_virtual_ranks(RANKS, recipe, overrides, steps), recipe, steps)


@pytest.mark.one_of_each
@pytest.mark.parametrize("ranks", [2, 3, 5, 6])
@pytest.mark.parametrize(
    "recipe", ["gossipgrad", "gossipgrad.gradients", "gossipgrad.agd_every_log", "gossipgrad.random"]
)
def test_with_any_number_of_ranks(recipe: str, ranks: int) -> None:
    check(on_virtual_ranks(ranks, recipe, [], STEPS), recipe, STEPS)


def test_the_steps_differ_from_each_other_and_from_local_ones() -> None:
    """So that a topology that stands still, or does nothing, would show."""
    recipes = sorted({recipe for recipe, _ in CASES})
    results = [expected(recipe, RANKS, STEPS)[0] for recipe in recipes] + [trained(RANKS, STEPS)[0]]
    for number, one in enumerate(results):
        for other in results[:number]:
            assert np.abs(one - other).max() > 1e-3


def test_without_rotation_and_at_full_exchange_it_is_synchronous_sgd() -> None:
    """Parameters that are averaged over all ranks after each step are those of gradients that are."""
    complete = ["parameters.0.topology=complete"]
    given = on_virtual_ranks(4, "gossipgrad", complete, STEPS)
    synchronous = on_virtual_ranks(4, "sgd", [], STEPS)
    for one, other in zip(given, synchronous, strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(("recipe", "overrides"), CASES)
def test_over_processes(job_of_8: Job, recipe: str, overrides: list[str]) -> None:
    check(job_of_8.run(train, (recipe, overrides, STEPS)), recipe, STEPS)
