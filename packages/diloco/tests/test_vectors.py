"""torchft's regression fixtures, and streaming against the NumPy loop.

Source: meta-pytorch/torchft, test_fixtures/torchft.diloco_regression_test.DiLoCoMockedUpdateTest, snapshot 7eb7087: two
layers of one weight, 1.0 at first, whose gradient is always 2; inner SGD with lr 1, outer SGD with lr 2; a period of 6
steps, in which each layer is a fragment; a delay of 0 or 1, and 0, 0.5
or 1 of the local weights in a blend. torchft sends `delay` steps before its boundary.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import Family, trained
from torchft import PRINTED, STEPS, fixture_strategy, followed, followed_over_mpi

import hocket
from hocket.testing.job import Job

FIXTURES = [(delay, local) for delay in (0, 1) for local in (0.0, 0.5, 1.0)]


def expected(delay: int, local: float, ranks: int) -> tuple[Any, Any]:
    """Return replicas and outer parameters of both layers after 0, 1, ... steps, [steps + 1, 2] each."""
    family = Family(
        6, lr=2.0, fragments=[["0"], ["1"]], starts=[3 - delay, 6 - delay], delay=delay, local=local
    )

    def inner_step(step: int, theta: Any) -> None:
        for layer in theta:
            theta[layer] -= 2

    replicas, outer = trained(family, {"0": np.ones((ranks, 1)), "1": np.ones((ranks, 1))}, STEPS, inner_step)
    return (
        [[float(of["0"][0, 0]), float(of["1"][0, 0])] for of in replicas],
        [[float(of["0"][0]), float(of["1"][0])] for of in outer],
    )


@pytest.mark.one_of_each
@pytest.mark.parametrize(("delay", "local"), FIXTURES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_fixtures_on_virtual_ranks(ranks: int, delay: int, local: float) -> None:
    strategy = fixture_strategy(delay, local)
    for replicas, outer in hocket.virtual(ranks).run(lambda: followed(strategy)):
        wanted, wanted_outer = expected(delay, local, ranks)
        np.testing.assert_allclose(replicas, wanted, rtol=0, atol=1e-6)
        np.testing.assert_allclose(outer, wanted_outer, rtol=0, atol=1e-6)
        for layer, (first, values) in PRINTED.get((delay, local), {}).items():
            given = [of[layer] for of in replicas[first : first + len(values)]]
            np.testing.assert_allclose(given, values, rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    job = Job(2, Path(__file__).parent)
    yield job
    job.close()


@pytest.mark.mpi
@pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed")
@pytest.mark.parametrize(("delay", "local"), FIXTURES)
def test_fixtures_over_mpi(job: Job, delay: int, local: float) -> None:
    replicas, outer = job.run(followed_over_mpi, (delay, local))[0]
    wanted, wanted_outer = expected(delay, local, 2)
    np.testing.assert_allclose(replicas, wanted, rtol=0, atol=1e-5)
    np.testing.assert_allclose(outer, wanted_outer, rtol=0, atol=1e-5)
