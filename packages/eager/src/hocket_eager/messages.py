"""A partial sum by messages: a persistent schedule, which progress threads carry out while applications compute.

Source: eager-SGD (Li et al.), sec. 4: internal and external activation, persistent schedules, offloading.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from hocket.api import Array, Execution, Outcome, Peer, ProgressEngine, schedule
from hocket.errors import PeerLostError
from hocket_eager.initiative import Situation, initiative
from hocket_eager.partial_sum import PartialSum
from hocket_eager.receive_buffer import ReceiveBuffer
from hocket_eager.rules import Delivery, QuorumRules, is_handed
from hocket_eager.send_buffer import SendBuffer

_T = TypeVar("_T")

#: The number of active ranks travels behind the data, in its dtype.
TRAILER_BYTES = 8


class Leaving:
    """The notice that a rank has left for good; the first that leaves sends it to all.

    Args:
        peer: the ranks; collective.
        progress: the progress thread.
        name: the exchange, for messages.
    """

    def __init__(self, peer: Peer, progress: ProgressEngine, name: str) -> None:
        self.anyone = False
        leaving = schedule.chain(
            ("leaving", schedule.activation_broadcast(peer.rank, peer.size)),
            ("noted", _once(self._note)),
            persistent=True,
        )
        self._run = Execution(leaving, peer, progress, f"{name} leaving")

    def tell(self) -> None:
        """Say that this rank leaves."""
        if not self.anyone:
            self._run.start(0)

    def close(self) -> None:
        """Give the lane back; collective, once all have left."""
        self._run.close()

    def _note(self, round: int) -> None:
        self.anyone = True
        self._run.nudge()  # a round may start now that waited for a rank's application


class MessageSum(PartialSum):
    """A partial sum by messages; see `PartialSum`.

    Args:
        peer: the ranks; collective.
        progress: the progress thread.
        name: the segment, for messages.
        numel: elements of a gradient.
        dtype: floating-point.
        rules: the rules by which rounds start.
        missed: the result that a late rank is handed.
        coordinator: the rank that the others notify, where the rules need one.
        allreduce: (rank, size, data) -> this rank's part of summing all ranks' `data` in place.
        leaving: the exchange's.
    """

    def __init__(
        self,
        peer: Peer,
        progress: ProgressEngine,
        name: str,
        numel: int,
        dtype: np.dtype[np.generic],
        rules: QuorumRules,
        missed: Delivery,
        coordinator: int,
        allreduce: Callable[[int, int, Array], schedule.Schedule],
        leaving: Leaving,
    ) -> None:
        self.name = name
        self._arrived = 0
        self._missed = missed
        self._leaving = leaving
        self._send = SendBuffer(numel, dtype)
        self._receive = ReceiveBuffer(numel, dtype, missed)
        self._total = np.zeros(numel + TRAILER_BYTES // dtype.itemsize, dtype)
        self._numel = numel
        situation = Situation(lambda: self._arrived, lambda: leaving.anyone, lambda: self.first_round)
        rounds = schedule.chain(
            ("arrival", initiative(peer.rank, rules, coordinator, situation)),
            ("activation", schedule.activation_broadcast(peer.rank, peer.size)),
            ("contribution", _once(self._contribute)),
            ("sum", allreduce(peer.rank, peer.size, self._total)),
            ("result", _once(self._publish)),
            persistent=True,
        )
        self._run = Execution(rounds, peer, progress, name)

    def propose(self, data: Array, step: int) -> None:
        self._send.add(data, step)
        self._arrived = step + 1
        if self.ended(step):
            self._run.nudge()  # the round under way may wait for this rank to come within its bound
        else:
            self._run.start(step - self.first_round)

    def ended(self, step: int) -> bool:
        return self._telling(lambda: self._run.ended(step - self.first_round))

    def wait(self, step: int, timeout_s: float | None = None) -> None:
        self._telling(lambda: self._run.wait(step - self.first_round, timeout_s))

    def fetch(self, step: int, out: Array) -> Outcome:
        local, active = self._receive.fetch(out)
        round = self.first_round + local  # now, as a rank can take part before it has said where it resumes
        send = self._send
        included = send.accepted_step == step and is_handed(send.accepted_round, round, self._missed)
        return Outcome(round, included, active, staleness=send.staleness_max)

    def left(self) -> tuple[int | None, Array]:
        return self._send.left()

    def restore(self, oldest: int | None, data: Array) -> None:
        self._send.restore(oldest, data)

    def resume(self, round: int) -> None:
        self.first_round = self._arrived = round

    def close(self) -> None:
        self._leaving.tell()
        self._run.close()

    def _contribute(self, round: int) -> None:
        active = self._send.take(self.first_round + round, self._total[: self._numel])
        self._total[self._numel :] = 0
        self._total[self._numel] = active

    def _publish(self, round: int) -> None:
        active = int(self._total[self._numel])
        self._receive.put(self._total[: self._numel], round, active)

    def _telling(self, call: Callable[[], _T]) -> _T:
        """Return the result of `call`; errors of a dead rank say which round was under way."""
        try:
            return call()
        except PeerLostError as error:
            round = self.first_round + self._run.num_ended
            raise type(error)(f"{self.name}, round {round}: {error}") from error


def _once(call: Callable[[int], None]) -> schedule.Schedule:
    return schedule.Schedule((schedule.Compute("compute", call=call),), ("compute",))
