"""Predictions that rank strategies: a step's time on a network, and the point where plain allreduce is as good."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from hocket.plan.plan import Plan
from hocket.plan.utilisation import BANDWIDTHS, exposed_seconds

__all__ = ["CLOSE", "PLAIN", "Prediction", "least_bandwidth", "most_hosts", "predict"]

#: The recipe that changes nothing and sends while backward goes on, as DDP does.
PLAIN = "agd"

#: What takes no longer than this many times another is level with it.
CLOSE = 1.05


@dataclass(frozen=True)
class Prediction:
    """The predicted costs of a strategy.

    Attributes:
        step_s: seconds of a step, on average.
        exposed_s: of these, seconds that a rank waits for messages.
        held_up_s: of these, seconds that late ranks hold it up, itself included.
        packing_s: of these, seconds that it compresses; 0 if not measured.
        bytes_per_step: bytes that a rank sends, on average.
        memory_bytes: bytes of the exchanges' buffers on a rank.
    """

    step_s: float
    exposed_s: float
    held_up_s: float
    packing_s: float
    bytes_per_step: float
    memory_bytes: int


def predict(plan: Plan, step_s: float, held_up_s: float = 0.0, packing_s: float = 0.0) -> Prediction:
    """Predict a strategy's step.

    Args:
        plan: of its exchanges.
        step_s: seconds of computing in a step.
        held_up_s: of `held_up_seconds`; 0 if no rank is late.
        packing_s: seconds of a step that compressors compute.
    """
    exposed_s = exposed_seconds(plan, step_s)
    together_s = step_s + exposed_s + held_up_s + packing_s
    return Prediction(together_s, exposed_s, held_up_s, packing_s, plan.bytes_per_step, plan.memory_bytes)


def least_bandwidth(is_level: Callable[[float], bool]) -> float | None:
    """Return the least of `BANDWIDTHS` from which a condition holds; None if it fails at the largest.

    Args:
        is_level: the condition, of bits a second.
    """
    least = None
    for bandwidth in reversed(BANDWIDTHS):
        if not is_level(bandwidth):
            break
        least = bandwidth
    return least


def most_hosts(is_level: Callable[[int], bool], numbers: Sequence[int]) -> int | None:
    """Return the largest number of hosts up to which a condition holds; None if it fails at the least.

    Args:
        is_level: the condition, of a number of hosts.
        numbers: the numbers to try, rising.
    """
    return max(takewhile(is_level, numbers), default=None)
