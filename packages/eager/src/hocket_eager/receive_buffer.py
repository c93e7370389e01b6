"""The results of rounds, until the application asks for them."""

from __future__ import annotations

import threading

import numpy as np

from hocket.api import Array
from hocket_eager.rules import Delivery


class ReceiveBuffer:
    """The newest round's result, or the sum of those that nobody has asked for yet.

    The progress thread puts, the training thread fetches.

    Source: eager-SGD (Li et al.), sec. 5: "only the latest data in the receive buffer can be seen". The sum is ours:
    with it, ranks that have come to the same step have been handed the same rounds.
    """

    def __init__(self, numel: int, dtype: np.dtype[np.generic], missed: Delivery) -> None:
        self._result = np.zeros(numel, dtype)
        self._round = -1
        self._active = 0
        self._sums = missed is Delivery.SUM
        self._fetched = True
        self._lock = threading.Lock()

    def put(self, result: Array, round: int, active: int) -> None:
        """Note a round's result [numel]; rounds come in order."""
        with self._lock:
            if self._sums and not self._fetched:
                np.add(self._result, result, out=self._result)
            else:
                np.copyto(self._result, result)
            self._round, self._active, self._fetched = round, active, False

    def fetch(self, out: Array) -> tuple[int, int]:
        """Copy the result into `out` [numel]; return the newest round and its number of active ranks."""
        with self._lock:
            if self._sums and self._fetched:
                out[...] = 0  # all rounds have been handed out
            else:
                np.copyto(out, self._result)
            self._fetched = True
            return self._round, self._active
