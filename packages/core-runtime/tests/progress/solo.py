"""A solo allreduce, the hardest user of schedules and progress threads: whoever arrives first starts the round.

Source: eager-SGD (Li et al.), sec. 4.1 and Fig. 7. Not registered: the eager plugin has the one for users.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from hocket.progress import ProgressEngine
from hocket.schedule import Compute, Schedule, activation_broadcast, chain, recursive_doubling_allreduce
from hocket.transport.peer import Array, Peer

__all__ = ["Solo"]


class Solo:
    """One rank's end.

    Attributes:
        waiting: what the next round will take; null after a round has taken it.
        taken: what each round has taken from this rank, by round, if `remembers`.
        results: each round's sum, by round, if `remembers`.
    """

    def __init__(
        self,
        peer: Peer,
        progress: ProgressEngine,
        count: int,
        dtype: str = "float64",
        *,
        allreduce: Callable[[int, int, Array], Schedule] = recursive_doubling_allreduce,
        remembers: bool = True,
        name: str = "solo",
    ) -> None:
        self.waiting = np.zeros(count, dtype)
        self.taken: list[Array] = []
        self.results: list[Array] = []
        self._sum = np.zeros(count, dtype)
        self._newest = np.zeros(count, dtype)
        self._newest_round = -1
        self._remembers = remembers
        self._lock = threading.Lock()
        schedule = chain(
            ("activation", activation_broadcast(peer.rank, peer.size)),
            ("contribution", _one(self._take)),
            ("sum", allreduce(peer.rank, peer.size, self._sum)),
            ("result", _one(self._publish)),
            persistent=True,
        )
        self._run = progress.open(schedule, peer, name)

    def __call__(self, data: Array, round: int) -> tuple[int, Array]:
        """Contribute `data` as soon as may be, and return the newest sum, of `round` or later, and its round."""
        with self._lock:
            self.waiting += data
        if not self._run.ended(round):
            self._run.start(round).wait()
        with self._lock:
            return self._newest_round, self._newest.copy()

    @property
    def num_rounds(self) -> int:
        return self._run.num_ended

    def close(self) -> None:
        self._run.close()

    def _take(self, round: int) -> None:
        """Move what waits into the round, at once, so that nothing is contributed twice or lost."""
        with self._lock:
            np.copyto(self._sum, self.waiting)
            self.waiting[...] = 0
        if self._remembers:
            self.taken.append(self._sum.copy())

    def _publish(self, round: int) -> None:
        with self._lock:
            np.copyto(self._newest, self._sum)
            self._newest_round = round
            if self._remembers:  # within the lock, so that whoever is told of a round finds it
                self.results.append(self._sum.copy())


def _one(call: Callable[[int], None]) -> Schedule:
    return Schedule((Compute("compute", call=call),), ("compute",))
