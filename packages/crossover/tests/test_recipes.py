"""Training by the recipes equals the mixing matrices applied to the stacked replicas, segment by segment."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from replicas import LAYERS, averaged, batches, flat, mlp, on_ranks, over_processes, sgd, train

import hocket
from hocket.testing.job import Job
from hocket.topology import Topology
from hocket_crossover import FairRandom, Unfair

WHOLE = (0, LAYERS[-1])
RECIPES: dict[str, tuple[Topology, tuple[int, ...]]] = {
    "crossover": (FairRandom(), LAYERS),
    "crossover.unfair": (Unfair(), LAYERS),
    "crossover.whole_model": (FairRandom(), WHOLE),
    "crossover.combo": (Unfair(distinct=True), LAYERS),
}
HIDDEN = ("{overlap: none}", "{overlap: forward}", "{overlap: none, delay: 1}")


def assert_equal(ended: Any, expected: np.ndarray) -> None:
    np.testing.assert_allclose(ended, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.one_of_each
@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("size", [2, 5, 8])
def test_virtual_ranks_mix_segment_by_segment(recipe: str, hidden: str, size: int) -> None:
    topology, cuts = RECIPES[recipe]
    strategy = hocket.compose(recipe, f"parameters.0={hidden}")
    ended = on_ranks(size, lambda: train(strategy))
    assert_equal(ended, averaged(size, topology, cuts=cuts, delayed="delay" in hidden))


MPI = [
    pytest.mark.mpi,
    pytest.mark.full,  # whose ranks do not share the start of one process
    pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed"),
]


@pytest.fixture(scope="module", params=["torch", pytest.param("mpi", marks=MPI)])
def job(request: pytest.FixtureRequest) -> Iterator[Job]:
    job = Job(8, Path(__file__).parent, request.param)
    yield job
    job.close()


@pytest.mark.one_of_each
@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("recipe", ["crossover", "crossover.unfair"])
def test_processes_mix_segment_by_segment(job: Job, recipe: str, hidden: str) -> None:
    topology, cuts = RECIPES[recipe]
    ended = job.run(over_processes, (recipe, [f"parameters.0={hidden}"]))
    assert_equal(ended, averaged(8, topology, cuts=cuts, delayed="delay" in hidden))


def test_another_seed_averages_with_others() -> None:
    strategy = hocket.compose("crossover", "parameters.0.topology.seed=5")
    ended = on_ranks(8, lambda: train(strategy))
    assert_equal(ended, averaged(8, FairRandom(seed=5)))
    assert np.abs(averaged(8, FairRandom(seed=5)) - averaged(8, FairRandom())).max() > 1e-3


def test_a_rank_alone_trains_as_without_a_strategy() -> None:
    [ended] = on_ranks(1, lambda: train("crossover"))
    [local] = on_ranks(1, lambda: train("local"))
    np.testing.assert_array_equal(ended, local)


def test_an_interval_between_communications_is_a_larger_batch() -> None:
    """Two batches of a `session.accumulate()`, each of which counts half, step as one of both."""

    def accumulating() -> np.ndarray:
        model = mlp()
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, "crossover") as session:
            for number, (x, y) in enumerate(session.data(batches(session.rank))):
                within = contextlib.nullcontext() if number % 2 else session.accumulate()
                with within:
                    (F.cross_entropy(model(x), y) / 2).backward()
                if number % 2:
                    optimizer.step()
                    optimizer.zero_grad()
            assert session.step == 2
        return flat(model)

    np.testing.assert_allclose(
        on_ranks(4, accumulating), on_ranks(4, lambda: train("crossover", joined=2)), rtol=2e-5, atol=2e-6
    )


def test_a_step_sends_one_models_worth() -> None:
    """Each segment goes to one rank."""

    def sent() -> float:
        model = torch.nn.Linear(64, 16, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with hocket.attach(model, optimizer, "crossover") as session:
            for _ in session.data([None] * 3):
                optimizer.zero_grad()
                model(torch.ones(1, 64)).sum().backward()
                optimizer.step()
            session.settle()  # sends what the next forward would
            return session.counters.bytes_sent / 3

    assert hocket.virtual(4).run(sent) == [64 * 16 * 4] * 4
