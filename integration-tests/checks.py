"""Checks that every cell and every recipe must pass."""

from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np
import pytest
from matrix import RANKS, is_repeatable
from reference import NoReferenceError, reference
from trial import Run, Toy

from hocket.collective.allreduce import Allreduce, AllreduceAlgorithm
from hocket.plan.plan import plan
from hocket.strategy import Exchange, Placement, Strategy
from hocket.transport.network import NetworkModel

#: Enough for what one round leaves behind to show in the next ones.
STEPS = 4

#: Enough to see that a strategy learns.
_LEARNING_STEPS = 20


def steps_for(strategy: Strategy) -> int:
    """Return how long a strategy is trained: as long as its numbers show, or, without a reference, its learning."""
    return STEPS if _is_known(strategy) else _LEARNING_STEPS


def check_numbers(strategy: Strategy, run: Run) -> None:
    """Compare a run with the reference; where there is none, see that it learns.

    Raises:
        AssertionError: other numbers, or replicas that differ where the strategy says that they do not.
    """
    ranks, steps = run.losses.shape
    if _is_known(strategy):
        np.testing.assert_allclose(run.parameters, reference(strategy, ranks, steps), rtol=1e-10, atol=1e-12)
    elif steps >= _LEARNING_STEPS:
        check_learns(strategy, run)
    if strategy.keeps_replicas_equal(Placement.on_one_host(ranks)):
        assert len({of_rank.tobytes() for of_rank in run.parameters}) == 1, "the replicas are not equal"


@cache
def _is_known(strategy: Strategy) -> bool:
    try:
        # Of two ranks none might have anything to exchange, and in the first step nothing may be due.
        reference(strategy, RANKS[0], max((e.period(RANKS[0]) for e in strategy.exchanges), default=1))
    except NoReferenceError:
        return False
    return True


def check_bytes(strategy: Strategy, ranks: int, run: Run, *, rounds: int, is_carried: bool = False) -> None:
    """Compare what sessions counted with the plan and, with `is_carried`, with what messages carried.

    Of a message whose length is known on average only, the plan is within half of it.

    Args:
        strategy: what was trained with.
        ranks: how many there were.
        run: of a multiple of the strategy's intervals and periods.
        rounds: of which the topologies are looked at.
        is_carried: whether to look at messages, where all exchanges are made of them.
    """
    if not is_repeatable(strategy):
        return
    compressors = (exchange.compressor for exchange in strategy.exchanges)
    equal_sizes = all(compressor is None or compressor.traits.equal_sizes for compressor in compressors)
    planned = plan(strategy, Toy(), ranks, NetworkModel()).bytes_per_step
    assert run.counted_bytes == pytest.approx(planned, rel=1e-9 if equal_sizes else 0.5)
    if is_carried and all(_is_made_of_messages(each, ranks, rounds) for each in strategy.exchanges):
        assert run.message_bytes == pytest.approx(run.counted_bytes, rel=1e-9)


def _is_made_of_messages(exchange: Exchange, ranks: int, rounds: int) -> bool:
    """Return whether ranks send each other messages, as many in each round, and all that are counted."""
    if isinstance(exchange.collective, Allreduce):
        return exchange.collective.algorithm not in (AllreduceAlgorithm.NATIVE, AllreduceAlgorithm.AUTO)
    if exchange.topology is None:
        return False
    degrees = {
        len(exchange.topology.neighbours(rank, ranks, round, segment).send_to)
        for rank, round, segment in product(range(ranks), range(rounds), range(4))
    }
    return len(degrees) == 1


def check_learns(strategy: Strategy, run: Run) -> None:
    """See that the mean loss of the last quarter of the steps is below that of the first one by a twentieth.

    Momentum SGD halves it; without momentum, as factor masking has it, it falls by a tenth at most.
    """
    compressors = [exchange.compressor for exchange in strategy.exchanges]
    if any(compressor is not None and compressor.traits.transforms for compressor in compressors):
        return  # what comes of coefficients is to be stepped by its sign
    quarter = run.losses.shape[1] // 4
    first, last = run.losses[:, :quarter].mean(), run.losses[:, -quarter:].mean()
    assert last < 0.95 * first, f"the loss went from {first:.3f} to {last:.3f}"
