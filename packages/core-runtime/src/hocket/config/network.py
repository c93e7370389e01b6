"""The network that the virtual transport imitates and that `plan` predicts for."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Network"]


@dataclass(frozen=True)
class Network:
    """A network as two numbers: a message of n bytes takes latency_s + n / bandwidth_bytes_per_s.

    Attributes:
        latency_s: time of an empty message, in seconds; 0 or more.
        bandwidth_bytes_per_s: of one rank's link, in each direction; more than 0, may be infinite.
    """

    latency_s: float = 20e-6
    bandwidth_bytes_per_s: float = 1.25e9

    def __post_init__(self) -> None:
        if not 0 <= self.latency_s < math.inf:
            raise ValueError(f"latency_s must be finite and 0 or more, not {self.latency_s}")
        if not self.bandwidth_bytes_per_s > 0:
            raise ValueError(f"bandwidth_bytes_per_s must be more than 0, not {self.bandwidth_bytes_per_s}")

    def seconds(self, nbytes: float) -> float:
        """Return how long one message of `nbytes` bytes takes."""
        return self.latency_s + nbytes / self.bandwidth_bytes_per_s
