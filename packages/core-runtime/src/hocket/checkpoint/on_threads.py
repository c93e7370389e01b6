"""An action on a thread of each rank, beside training; its failure raises on all ranks, as in `collectively`."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from hocket.arrays import Array
from hocket.checkpoint.collectively import in_words, results_of
from hocket.transport.lane import Lane
from hocket.transport.request import Request

T = TypeVar("T")

#: Seconds between two looks of a rank that has nothing else to do.
_LOOK_EVERY_S = 0.01

#: Bytes of a rank's outcome, and characters of an error's text in it, each of up to 12 bytes as JSON.
_OUTCOME_BYTES, _ERROR_CHARACTERS = 16384, 1200


class OnThreads(Generic[T]):
    """An action that runs on a thread of each rank; collective.

    The thread exchanges no messages: ranks tell each other whether theirs has ended, by a sum that begins with one look
    and ends with the next, and then how it has ended, by a gathering that does the same. So all ranks learn it with the
    same look, and a look waits only for the others' look before: at the same place in their scripts ranks may have made
    one step, and so one look, more than others that left a step out.

    Args:
        lane: of the ranks, for nothing else meanwhile.
        act: the action; its result is JSON-able and short.
    """

    def __init__(self, lane: Lane, act: Callable[[], T]) -> None:
        self._lane, self._act = lane, act
        # This rank's outcome as JSON, and its error.
        self._own: Array = np.empty(0, dtype=np.uint8)
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._unfinished: Array = np.zeros(1, dtype=np.int64)
        self._total: Array = np.zeros(1, dtype=np.int64)
        self._sum: Request | None = None
        self._gathering: Request[list[Array]] | None = None
        self._outcomes: Sequence[Mapping[str, Any]] = ()
        # A process that ends does not wait for it: what is not complete is as if it had never begun.
        threading.Thread(target=self._run, name="hocket-save", daemon=True).start()

    @property
    def ended(self) -> bool:
        """Tell whether the action has ended on all ranks, as far as looks have found."""
        return self._gathering is not None

    def look(self) -> bool:
        """Return whether the outcomes of all ranks have come since the last look, and look again."""
        if self._gathering is not None:
            self._outcomes = [json.loads(data.tobytes()) for data in self._gathering.wait()]
            return True
        if self._sum is not None:
            self._sum.wait()
            if self._total[0] == 0:
                receive = np.empty((self._lane.size, _OUTCOME_BYTES), dtype=np.uint8)
                self._gathering = self._lane.iallgather(self._own, receive)
                return False
        self._unfinished[0] = not self._ended.is_set()
        self._sum = self._lane.iallreduce(self._unfinished, self._total)
        return False

    def wait(self) -> None:
        """Wait until all ranks have their outcomes, though some may have looked more often than others."""
        while not self.look():
            self._ended.wait(_LOOK_EVERY_S)  # no longer: others may need what only a look moves on

    def results(self) -> list[T]:
        """Return the results of all ranks, once `look` has returned True.

        Raises:
            CheckpointError: on every rank, if the action has failed on any; as of `collectively`.
        """
        return results_of(self._outcomes, self._error)

    def _run(self) -> None:
        try:
            text = json.dumps({"result": self._act()})
        except BaseException as error:
            self._error = error  # raised by `results`, on the thread that trains
            text = json.dumps({"error": in_words(error)[:_ERROR_CHARACTERS]})
        self._own = np.frombuffer(text.encode(), dtype=np.uint8)
        self._ended.set()
