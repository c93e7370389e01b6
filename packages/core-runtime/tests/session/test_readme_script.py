"""The README's own script over real MPI: the same training with any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import readme_script

from hocket.testing.job import Job

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]

GLOBAL_BATCH = 16


@pytest.fixture(scope="module")
def jobs() -> Iterator[list[Job]]:
    folder = Path(__file__).parent
    with closing(Job(1, folder)) as one, closing(Job(2, folder)) as two, closing(Job(4, folder)) as four:
        yield [one, two, four]


def curve(ranks: list[dict[str, Any]]) -> list[float]:
    """Return each step's loss, the mean over its samples."""
    steps = zip(*(of_rank["losses"] for of_rank in ranks), strict=True)
    return [sum(loss * weight for loss, weight in step) / sum(weight for _, weight in step) for step in steps]


@pytest.mark.parametrize("num", [96, 101, 97, 3])
@pytest.mark.parametrize("strategy", [["sgd"], ["agd", "gradients.0.segments=layers"]], ids=lambda s: s[0])
def test_each_sample_once_and_the_same_losses(jobs: list[Job], num: int, strategy: list[str]) -> None:
    """Also where the last global batch is ragged, and where there are fewer samples than ranks."""
    alone, *several = [job.run(readme_script.run, (num, GLOBAL_BATCH, strategy)) for job in jobs]
    expected = curve(alone)
    assert len(expected) == -(-num // GLOBAL_BATCH)
    for ranks in several:
        assert sorted(index for of_rank in ranks for index in of_rank["read"]) == list(range(num))
        assert curve(ranks) == pytest.approx(expected, rel=1e-12, abs=1e-13)
        for of_rank in ranks:
            assert of_rank["parameters"] == pytest.approx(alone[0]["parameters"], rel=1e-11, abs=1e-12)
