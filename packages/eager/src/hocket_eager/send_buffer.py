"""Gradients that a rank has proposed and no round has taken yet.

Source: eager-SGD (Li et al.), sec. 5 and Fig. 7: a stale gradient goes into the send buffer, and is added to the next.
"""

from __future__ import annotations

import threading

import numpy as np

from hocket.api import Array


class SendBuffer:
    """The sum of one rank's proposals for one segment.

    It is taken as a whole, so that nothing goes in twice or is lost. The training thread adds, the progress thread
    takes.

    Attributes:
        accepted_step: the newest step whose gradient a round has taken; -1 for none.
        accepted_round: the round that took it.
        staleness_max: the most rounds by which a gradient was late.
    """

    def __init__(self, numel: int, dtype: np.dtype[np.generic]) -> None:
        self.accepted_step = self.accepted_round = -1
        self.staleness_max = 0
        self._sum = np.zeros(numel, dtype)
        # The steps whose gradients are in the sum.
        self._oldest: int | None = None
        self._newest = -1
        self._lock = threading.Lock()

    def add(self, data: Array, step: int) -> None:
        """Propose the gradient [numel] of a step; steps come in order."""
        with self._lock:
            if self._oldest is None:
                self._oldest = step
                np.copyto(self._sum, data)
            else:
                np.add(self._sum, data, out=self._sum)
            self._newest = step

    def take(self, round: int, out: Array) -> bool:
        """Move everything into `out` [numel], for a round; return whether that round's own gradient is in it."""
        with self._lock:
            if self._oldest is None:
                out[...] = 0
                return False
            np.copyto(out, self._sum)
            self.accepted_step, self.accepted_round = self._newest, round
            self.staleness_max = max(self.staleness_max, round - self._oldest)
            self._oldest = None
            return self._newest == round

    def left(self) -> tuple[int | None, Array]:
        """Return the step of the oldest gradient that is left (or None), and a copy of their sum."""
        with self._lock:
            return self._oldest, self._sum.copy() if self._oldest is not None else np.zeros_like(self._sum)

    def restore(self, oldest: int | None, data: Array) -> None:
        """Hold what `left` returned, and nothing else."""
        with self._lock:
            self._oldest = oldest
            np.copyto(self._sum, data)
