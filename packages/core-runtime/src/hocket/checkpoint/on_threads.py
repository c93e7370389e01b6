"""An action on a thread of each rank, beside training; its failure raises on all ranks, as in `collectively`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np

from hocket.arrays import Array
from hocket.checkpoint.collectively import collectively
from hocket.transport.lane import Lane
from hocket.transport.peer import Peer
from hocket.transport.request import Request

__all__ = ["OnThreads"]

T = TypeVar("T")

#: Seconds between two looks of a rank that has nothing else to do.
_LOOK_EVERY_S = 0.01


class OnThreads(Generic[T]):
    """An action that runs on a thread of each rank; collective.

    The thread exchanges no messages: ranks tell each other whether theirs has ended, by a sum that begins with one look
    and ends with the next. So all ranks learn it with the same look, and none waits for another's thread.

    Args:
        peer: the ranks, in a group that nothing else uses.
        lane: of that group.
        act: the action; its result is JSON-able.
    """

    def __init__(self, peer: Peer, lane: Lane, act: Callable[[], T]) -> None:
        self._peer, self._lane, self._act = peer, lane, act
        self._result: T | None = None
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._unfinished: Array = np.zeros(1, dtype=np.int64)
        self._total: Array = np.zeros(1, dtype=np.int64)
        self._sum: Request | None = None
        # A process that ends does not wait for it: what is not complete is as if it had never begun.
        threading.Thread(target=self._run, name="hocket-save", daemon=True).start()

    def look(self) -> bool:
        """Return whether the action had ended on all ranks at the last look, and look again."""
        if self._sum is not None:
            self._sum.wait()
            if self._total[0] == 0:
                return True
        self._unfinished[0] = not self._ended.is_set()
        self._sum = self._lane.iallreduce(self._unfinished, self._total)
        return False

    def wait(self) -> None:
        """Wait until the action has ended on all ranks, which may have looked more often or less."""
        while not self.look():
            self._ended.wait(_LOOK_EVERY_S)  # no longer: others may need what only a look moves on

    def results(self) -> list[T]:
        """Return the results of all ranks, once the action has ended.

        Raises:
            CheckpointError: on every rank, if it has failed on any; as of `collectively`.
        """
        return collectively(self._peer, self._own)

    def _own(self) -> T:
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def _run(self) -> None:
        try:
            self._result = self._act()
        except BaseException as error:
            self._error = error  # raised by `results`, on the thread that trains
        finally:
            self._ended.set()
