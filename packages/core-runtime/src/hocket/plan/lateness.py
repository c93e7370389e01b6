"""The time that late ranks hold up others, by a strategy's waits. Messages take no time here."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hocket.plan.plan import ExchangePlan, Plan

if TYPE_CHECKING:
    from hocket.delays import Delays

#: Of how many steps the mean is taken.
LOOKED_AT = 240


def held_up_seconds(plan: Plan, step_s: float, delays: Delays, seed: int = 0, island: int = 1) -> float:
    """Return the seconds that late ranks add to a step, on average over ranks and steps.

    All steps compute equally long apart from the delays. A rank that exchanges with others continues when all of them
    have reached the exchange, or, if it is delayed, had reached it when it began. No rank waits in collectives that
    answer from a progress thread: a late one joins a later round.

    Args:
        plan: of the exchanges.
        step_s: seconds of computing in a step, during which a delayed exchange hides others' lateness.
        delays: the delay of each rank in each step.
        seed: of delays that are drawn.
        island: number of ranks of each of the plan's, which is as late as its latest.
    """
    size = plan.ranks
    clock = np.zeros(size)
    waiting = [each for each in plan.exchanges if not each.exchange.collective.traits.needs_thread]
    longest = max((each.exchange.delay for each in waiting), default=0)
    came: deque[NDArray[np.float64]] = deque(maxlen=longest + 1)
    rounds = [0] * len(waiting)
    for step in range(LOOKED_AT):
        late = delays.of_step(step, size * island, seed).reshape(size, island).max(axis=1)
        clock = clock + step_s + late
        came.append(clock)
        for number, planned in enumerate(waiting):
            delay = planned.exchange.delay
            if step < delay:
                continue
            begun = came[-1 - delay] if delay else clock  # after the exchanges before it
            for ranks in planned.scopes:
                due = list(_due(planned, step + 1 - delay, len(ranks)))
                for segment in due:
                    clock = _met(planned, ranks, rounds[number], segment, clock, begun)
                if due and ranks is planned.scopes[-1]:
                    rounds[number] += 1
    return float(clock.mean()) / LOOKED_AT - step_s


def _due(planned: ExchangePlan, step: int, size: int) -> Iterator[int]:
    """Yield the segments sent after a step, from 1 on; one for all with the same partners."""
    exchange, segments = planned.exchange, len(planned.layouts)
    for segment in range(segments):
        if exchange.is_due(step, segment, segments, size):
            yield segment
            if exchange.topology is None:
                return


def _met(
    planned: ExchangePlan,
    ranks: Sequence[int],
    round: int,
    segment: int,
    clock: NDArray[np.float64],
    begun: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return the ranks' clocks after an exchange among them."""
    met = clock.copy()
    topology = planned.exchange.topology
    places = list(ranks)
    if topology is None:
        met[places] = np.maximum(clock[places], begun[places].max())
        return met
    rows = topology.mixing_rows(len(places), round, segment)
    own = rows.starts[:-1]  # a rank's own value is the first that it adds up
    times = begun[places][rows.sources]
    times[own] = clock[places]
    met[places] = np.maximum.reduceat(times, own)
    return met
