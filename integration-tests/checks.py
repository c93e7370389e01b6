"""What every cell and every recipe must pass."""

from __future__ import annotations

from functools import cache

import numpy as np
from matrix import RANKS, Cell
from reference import NoReferenceError, reference
from trial import Run, train_virtually

from hocket.strategy import Placement, Strategy

__all__ = ["STEPS", "check_learns", "check_numbers", "trained"]

#: Enough for what one round leaves behind to show in the next ones.
STEPS = 4

#: Enough to see that a strategy learns.
_LEARNING_STEPS = 20


@cache
def trained(cell: Cell, ranks: int) -> Run:
    """Return what a cell's training gives; the tests of numbers and of bytes look at one run."""
    strategy = cell.compose()
    return train_virtually(strategy, ranks, STEPS if _is_known(strategy) else _LEARNING_STEPS)


def check_numbers(strategy: Strategy, run: Run) -> None:
    """Compare a run with the reference; where there is none, see that it learns.

    Raises:
        AssertionError: other numbers, or replicas that differ where the strategy says that they do not.
    """
    ranks, steps = run.losses.shape
    if _is_known(strategy):
        np.testing.assert_allclose(run.parameters, reference(strategy, ranks, steps), rtol=1e-10, atol=1e-12)
    elif steps >= _LEARNING_STEPS:
        check_learns(run)
    if strategy.keeps_replicas_equal(Placement.on_one_host(ranks)):
        assert len({of_rank.tobytes() for of_rank in run.parameters}) == 1, "the replicas are not equal"


def _is_known(strategy: Strategy) -> bool:
    try:
        reference(strategy, RANKS[0], 1)  # of two ranks none might have anything to exchange
    except NoReferenceError:
        return False
    return True


def check_learns(run: Run) -> None:
    """See that the mean loss of the last quarter of the steps is below that of the first one by a twentieth.

    Momentum SGD halves it; without momentum, as factor masking has it, it falls by a tenth at most.
    """
    quarter = run.losses.shape[1] // 4
    first, last = run.losses[:, :quarter].mean(), run.losses[:, -quarter:].mean()
    assert last < 0.95 * first, f"the loss went from {first:.3f} to {last:.3f}"
