"""The contract over real MPI, with real sleeping: by messages, and in memory that the ranks share."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract import Case, check, take_part
from test_conformance import TestLastOfAll as LastOfAll
from training import resume_on, train, train_on

import hocket
from hocket.testing.collective import CollectiveConformance, Shape
from hocket.testing.job import Job
from hocket_eager import Algorithm, Quorum

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed"),
]

_STEPS = 60 if os.environ.get("HOCKET_CELLS") == "all" else 30


@pytest.mark.parametrize(
    ("candidates", "starts", "missed", "shared"),
    [  # each two of them; virtual ranks draw all
        (None, "first", "newest", True),
        (None, "last", "sum", False),
        (1, "first", "sum", True),
        (1, "last", "newest", False),
        (2, "first", "newest", False),
        (2, "last", "sum", True),
    ],
)
def test_contract(
    job: tuple[int, Job], candidates: int | None, starts: str, missed: str, shared: bool
) -> None:
    size, ranks = job
    collective = {
        "candidates": candidates,
        "starts": starts,
        "missed": missed,
        "shared": shared,
        "algorithm": Algorithm.STAR if missed == "sum" else Algorithm.RECURSIVE_DOUBLING,
    }
    pace = [1.0] * (size - 1) + [10.0]
    case = Case(size, collective, [_STEPS] * size, [_STEPS] * size, 2, pace, seed=1)
    check(case, ranks.run(take_part, (asdict(case),)))


@pytest.mark.parametrize("shared", [True, False])
def test_bounded_staleness(job: tuple[int, Job], shared: bool) -> None:
    size, ranks = job
    collective = {"candidates": None, "staleness": 2, "shared": shared}
    pace = [0.3] * (size - 1) + [4.0]
    case = Case(size, collective, [_STEPS] * size, [_STEPS] * size, 1, pace, seed=2)
    told = ranks.run(take_part, (asdict(case),))
    check(case, told)
    assert max(one["staleness"] for rank in told for one in rank[0]["handed"]) > 0


@pytest.mark.parametrize(("candidates", "shared"), [(None, True), (1, False)])
def test_ranks_that_leave_early(job: tuple[int, Job], candidates: int | None, shared: bool) -> None:
    size, ranks = job
    steps = [0, *[_STEPS // 2] * (size - 2), _STEPS]
    collective = {"candidates": candidates, "missed": "sum", "shared": shared}
    case = Case(size, collective, steps, [_STEPS // 3] * size, 2, [1.0] * size, seed=3)
    check(case, ranks.run(take_part, (asdict(case),)))


def _over(job: Job, suite: type[CollectiveConformance]) -> CollectiveConformance:
    class OverMPI(suite):  # type: ignore[misc, valid-type]
        def run(self, size: int, seed: int, body: Callable[..., Any], *args: Any) -> list[Any]:
            return job.run(body, args)

    return OverMPI()


def test_conformance(job: tuple[int, Job]) -> None:
    """Segments of any size, in sessions' order, and on a resumed run's channel."""
    shapes = [Shape(0, 7, 1, "float32"), Shape(2, 0, 0, "float32"), Shape(3, 1003, 3, "float64")]
    suite = _over(job[1], LastOfAll)
    suite.check(job[0], shapes, 3, resumed_at=2)
    suite.check(job[0], [Shape(1, 600_000, 1, "float32")], 2)
    suite.check(job[0], shapes, 2, faulty=True)


@pytest.mark.parametrize("shared", [True, False])
def test_sessions(job: tuple[int, Job], shared: bool) -> None:
    """Last of all gives what an allreduce gives; solo learns, and its replicas drift apart."""
    size, ranks = job
    paces_s = [0.002, 0.0, 0.004]

    def trained(collective: Any) -> list[dict[str, Any]]:
        exchange = {"collective": collective, "segments": "layers", "overlap": "backward"}
        return ranks.run(train_on, ({"gradients": [exchange]}, paces_s))

    eager = {"name": "eager.partial_allreduce", "candidates": None, "shared": shared}
    # With the newest result alone, solo learns little of five ranks, and diverges where one falls far behind.
    kinds = ("allreduce", {**eager, "starts": "last"}, {**eager, "missed": "sum"})
    synchronous, full, solo = map(trained, kinds)
    assert len({tuple(of["parameters"]) for of in full}) == 1
    np.testing.assert_allclose(full[0]["parameters"], synchronous[0]["parameters"], rtol=1e-4, atol=1e-5)
    assert full[0]["active"] == size
    for of in solo:
        assert np.mean(of["losses"][-20:]) < 0.3 * np.mean(of["losses"][:10])
        assert of["active"] < size


@pytest.mark.parametrize(("starts", "shared"), [(Quorum.FIRST, True), (Quorum.LAST, False)])
def test_another_number_of_ranks_resumes(
    job: tuple[int, Job], starts: str, shared: bool, tmp_path: Path
) -> None:
    collective = {
        "name": "eager.partial_allreduce",
        "candidates": None,
        "starts": str(starts),
        "shared": shared,
    }
    config = {"gradients": [{"collective": collective, "segments": "layers"}]}
    hocket.virtual(4).run(lambda: train(hocket.compose(config), save=(tmp_path, 5)))
    told = job[1].run(resume_on, (config, str(tmp_path)))
    assert all(np.isfinite(of["parameters"]).all() for of in told)
