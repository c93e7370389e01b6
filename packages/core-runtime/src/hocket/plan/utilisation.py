"""The share of a step that ranks spend computing, and the bandwidth that it takes.

Ranks wait for each other only in exchanges, one of which is on the network at a time.

Source: the simulation of A. Douillard et al., "Streaming DiLoCo", arXiv:2501.18512, table 4, whose grid of bandwidths
this is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np

from hocket.plan.plan import ExchangePlan, Plan
from hocket.strategy.exchange import GRADIENTS, Overlap

#: Bits a second: 50 from 0.1 Gbit/s to 1 Tbit/s, each 1.21 times the one before.
BANDWIDTHS: Sequence[float] = (np.logspace(-1, 3, 50) * 1e9).tolist()

#: Of a step's computing: forward takes one multiplication of each weight, backward two.
BACKWARD_SHARE = 2 / 3


def exposed_seconds(plan: Plan, step_s: float, hidden_s: float = 0.0) -> float:
    """Return a rank's mean wait for exchanges, in seconds per step.

    Overlap backward hides exchanges of early gradients during two thirds of a step, shared by layers in proportion to
    their parameters; the last segment, or a single one, is sent when backward has ended. Overlap forward hides
    exchanges during the third after it, and a delay during whole steps.

    Args:
        plan: of the exchanges.
        step_s: seconds of computing in a step.
        hidden_s: seconds that are hidden of other traffic.
    """
    gradients = [planned for planned in plan.exchanges if planned.exchange.slot == GRADIENTS]
    exposed = 0.0
    if gradients:
        backward_s = step_s * BACKWARD_SHARE * (gradients[0].exchange.overlap is Overlap.BACKWARD)
        exposed += max(0.0, _ended_after(gradients, backward_s) - backward_s - hidden_s)
    for planned in plan.exchanges:
        if planned not in gradients:
            hides = hidden_s + step_s * _hidden_steps(planned)
            sends = planned.segment_seconds if planned.exchange.stagger else [sum(planned.segment_seconds)]
            period = min(planned.exchange.period(len(scope)) for scope in planned.scopes)
            exposed += sum(max(0.0, seconds - hides) for seconds in sends) / period
    return exposed


def _ended_after(gradients: list[ExchangePlan], backward_s: float) -> float:
    """Return the seconds from backward's begin until the last segment arrives; each is sent as soon as possible.

    Args:
        gradients: the exchanges of gradients, which pass each segment on.
        backward_s: seconds during which gradients arrive; 0 if all are there when exchanges begin.
    """
    gradients = [planned for planned in gradients if planned.layouts]
    if not gradients:
        return 0.0
    numel = [sum(span.numel for span in layout.spans) for layout in gradients[0].layouts]
    segment_seconds = np.zeros(len(numel))
    for planned in gradients:
        seconds = np.array(planned.segment_seconds)
        # A rank that carries only some of the segments: the others' are shared out.
        alike = len(seconds) == len(numel)
        segment_seconds += seconds if alike else seconds.sum() * np.divide(numel, sum(numel))
    ended_s = 0.0
    for in_s, seconds_s in zip(backward_s * np.cumsum(numel) / sum(numel), segment_seconds, strict=True):
        ended_s = float(max(ended_s, in_s) + seconds_s)
    return ended_s


def _hidden_steps(planned: ExchangePlan) -> float:
    exchange = planned.exchange
    return exchange.delay + (1 - BACKWARD_SHARE) * (exchange.overlap is Overlap.FORWARD)


def computing_share(plan: Plan, step_s: float, hidden_s: float = 0.0, held_up_s: float = 0.0) -> float:
    """Return the share of its time that a rank computes, 0 to 1.

    Args:
        plan, step_s, hidden_s: see `exposed_seconds`.
        held_up_s: of `held_up_seconds`; 0 if no rank is late.
    """
    return step_s / (step_s + exposed_seconds(plan, step_s, hidden_s) + held_up_s)


def least_bandwidths(
    planned: Callable[[float], Plan],
    step_s: float,
    shares: Sequence[float],
    hidden_s: float = 0.0,
    held_up_s: float = 0.0,
) -> list[float | None]:
    """Return the least of `BANDWIDTHS` with which a rank computes each share of its time; None if none is enough.

    Args:
        planned: function from a bandwidth in bits a second to the plan.
        step_s, hidden_s, held_up_s: see `computing_share`.
        shares: 0 to 1.
    """
    found = (
        bisect_left(
            BANDWIDTHS, share, key=lambda each: computing_share(planned(each), step_s, hidden_s, held_up_s)
        )
        for share in shares
    )
    return [BANDWIDTHS[at] if at < len(BANDWIDTHS) else None for at in found]
