"""A solo allreduce, the hardest user of schedules and progress threads: whoever arrives first starts the round.

Source: eager-SGD (Li et al.), sec. 4.1 and Fig. 7. Not registered: the eager plugin has the one for users.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from hocket.arrays import Array
from hocket.progress import ProgressEngine
from hocket.schedule import (
    Compute,
    Copy,
    Mutex,
    Operation,
    Schedule,
    activation_broadcast,
    chain,
    recursive_doubling_allreduce,
)
from hocket.transport.peer import Peer

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
        self._newest = np.zeros(count, dtype)
        self._newest_round = np.full(1, -1)
        self._lock = Mutex()
        total = np.zeros(count, dtype)
        # At once and under the lock, so that nothing is contributed twice or lost; and without Python.
        take = Copy("take", source=self.waiting, to=total, clears=True, lock=self._lock)
        publish = Copy("publish", source=total, to=self._newest, stamp=self._newest_round, lock=self._lock)

        def note(told: list[Array]) -> list[Operation]:
            return [Compute("note", call=lambda round: told.append(total.copy()))] if remembers else []

        schedule = chain(
            ("activation", activation_broadcast(peer.rank, peer.size)),
            ("contribution", _one_by_one(take, *note(self.taken))),
            ("sum", allreduce(peer.rank, peer.size, total)),
            # Noted before it is published, so that whoever is told of a round finds it.
            ("result", _one_by_one(*note(self.results), publish)),
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
            return int(self._newest_round[0]), self._newest.copy()

    @property
    def num_rounds(self) -> int:
        return self._run.num_ended

    def close(self) -> None:
        self._run.close()


def _one_by_one(*operations: Operation) -> Schedule:
    names = [operation.name for operation in operations]
    ordered = [replace(operation, after=tuple(names[i - 1 : i])) for i, operation in enumerate(operations)]
    return Schedule(tuple(ordered), (names[-1],))
