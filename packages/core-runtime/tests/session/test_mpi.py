"""Sessions over real MPI: one job carries out all cases. The README's script also runs in the simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import in_place_cases
import pytest
import readme_script
from forward_cases import forward_changes_no_bit

import hocket
from hocket.testing.job import Job
from hocket.transport.virtual import current_peer

RANKS = 4
GLOBAL_BATCH = 16

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    with closing(Job(RANKS, Path(__file__).parent)) as ranks:
        yield ranks


@pytest.mark.parametrize("case", in_place_cases.CASES, ids=lambda case: case.__name__)
def test_in_memory_that_ranks_share(job: Job, case: Callable[..., None]) -> None:
    """One buffer, and the same numbers."""
    job.run(case, ())


def test_overlap_forward_changes_no_bit_over_messages(job: Job) -> None:
    job.run(forward_changes_no_bit, ())


def curve(ranks: list[dict[str, Any]]) -> list[float]:
    """Return each step's loss, the mean over its samples."""
    steps = zip(*(of_rank["losses"] for of_rank in ranks), strict=True)
    return [sum(loss * weight for loss, weight in step) / sum(weight for _, weight in step) for step in steps]


@pytest.mark.one_of_each
@pytest.mark.parametrize("num", [96, 101, 97, 3])
@pytest.mark.parametrize("strategy", [["sgd"], ["agd", "gradients.0.segments=layers"]], ids=lambda s: s[0])
def test_the_readmes_script_reads_each_sample_once_and_has_the_same_losses(
    job: Job, num: int, strategy: list[str]
) -> None:
    """Also where the last global batch is ragged, and where there are fewer samples than ranks."""

    def simulated() -> dict[str, Any]:
        peer = current_peer()
        assert peer is not None
        return readme_script.run(peer, num, GLOBAL_BATCH, strategy)

    alone, two = (hocket.virtual(ranks).run(simulated) for ranks in (1, 2))
    four = job.run(readme_script.run, (num, GLOBAL_BATCH, strategy))
    expected = curve(alone)
    assert len(expected) == -(-num // GLOBAL_BATCH)
    for ranks in (two, four):
        assert sorted(index for of_rank in ranks for index in of_rank["read"]) == list(range(num))
        assert curve(ranks) == pytest.approx(expected, rel=1e-12, abs=1e-13)
        for of_rank in ranks:
            assert of_rank["parameters"] == pytest.approx(alone[0]["parameters"], rel=1e-11, abs=1e-12)
