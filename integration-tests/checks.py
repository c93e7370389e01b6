"""What every cell and every recipe must pass."""

from __future__ import annotations

from functools import cache

import numpy as np
from matrix import Cell
from reference import NoReferenceError, reference
from trial import Run, train_virtually

from hocket.strategy import Placement, Strategy

__all__ = ["STEPS", "check_numbers", "trained"]

#: Enough for what one round leaves behind to show in the next ones.
STEPS = 4

_LONG_STEPS = 40


@cache
def trained(cell: Cell, ranks: int) -> Run:
    """Return what a cell's training gives; the tests of numbers and of bytes look at one run."""
    return train_virtually(cell.compose(), ranks, STEPS)


def check_numbers(strategy: Strategy, run: Run, steps: int) -> None:
    """Compare a run with the reference; where there is none, see that it learns.

    Raises:
        AssertionError: other numbers, or replicas that differ where the strategy says that they do not.
    """
    ranks = len(run.parameters)
    try:
        expected = reference(strategy, ranks, steps)
    except NoReferenceError:
        check_learns(train_virtually(strategy, ranks, _LONG_STEPS))
    else:
        np.testing.assert_allclose(run.parameters, expected, rtol=1e-10, atol=1e-12)
    if strategy.keeps_replicas_equal(Placement.on_one_host(ranks)):
        assert len({of_rank.tobytes() for of_rank in run.parameters}) == 1, "the replicas are not equal"


def check_learns(run: Run) -> None:
    """See that the loss falls by a quarter, on every rank."""
    first, last = run.losses[:, :8].mean(1), run.losses[:, -8:].mean(1)
    assert (last < 0.75 * first).all(), f"the loss went from {first} to {last}"
