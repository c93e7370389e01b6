"""The transport of a run with one rank and no launcher: everything is done at once."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NoReturn

from hocket.arrays import Array
from hocket.errors import TransportError
from hocket.transport.gathering import check_gathering, gathered
from hocket.transport.lane import Lane
from hocket.transport.peer import Peer
from hocket.transport.request import Finished, Request

__all__ = ["SinglePeer"]


class _SelfReceive(Request):
    """A receive from oneself: filled by a send that has happened already, or by one still to come."""

    def __init__(self, lane: _SingleLane, data: Array, round: int) -> None:
        self._lane, self._data, self._round, self._filled = lane, data, round, False
        lane.receives[round].append(self)
        lane.deliver(round)

    def fill(self, message: Array) -> None:
        if message.nbytes != self._data.nbytes:
            raise TransportError(
                f"rank 0: {self._lane.name}, round {self._round}: a message of {message.nbytes} bytes came into "
                f"a buffer of {self._data.nbytes}"
            )
        self._data.reshape(-1).view("u1")[:] = message.reshape(-1).view("u1")
        self._filled = True

    def done(self) -> bool:
        return self._filled

    def wait(self, timeout_s: float | None = None) -> None:
        if not self._filled:
            # The only rank is the one that waits: nobody is left who could send.
            from hocket.errors import ExchangeTimeoutError

            raise ExchangeTimeoutError(
                f"rank 0 waits for itself in {self._lane.name}, round {self._round}: nothing was sent"
            )

    def withdraw(self) -> None:
        if not self._filled:
            self._lane.receives[self._round].remove(self)


class _SingleLane(Lane):
    rank, size = 0, 1

    def __init__(self, name: str) -> None:
        self.name = name
        self.receives: dict[int, deque[_SelfReceive]] = defaultdict(deque)
        self._messages: dict[int, deque[Array]] = defaultdict(deque)

    def deliver(self, round: int) -> None:
        while self._messages[round] and self.receives[round]:
            self.receives[round].popleft().fill(self._messages[round].popleft())

    def isend(self, data: Array, to: int, round: int) -> Request:
        _require_rank_0(to)
        self._messages[round].append(data.copy())
        self.deliver(round)
        return Finished()

    def irecv(self, data: Array, source: int, round: int) -> Request:
        _require_rank_0(source)
        return _SelfReceive(self, data, round)

    def iallreduce(self, send: Array, receive: Array) -> Request:
        receive[...] = send
        return Finished()

    def ibroadcast(self, data: Array, root: int) -> Request:
        _require_rank_0(root)
        return Finished()

    def ireduce(self, send: Array, receive: Array | None, root: int) -> Request:
        _require_rank_0(root)
        assert receive is not None
        return self.iallreduce(send, receive)

    def iallgather(self, send: Array, receive: Array) -> Request:
        check_gathering(f"rank 0: {self.name}", send, receive, size=1)
        receive[0, : send.size] = send
        return Finished(gathered(receive, [send.size]))

    def ibarrier(self) -> Request:
        return Finished()

    def close(self) -> None:
        pass


def _require_rank_0(rank: int) -> None:
    if rank != 0:
        raise TransportError(f"rank {rank} does not exist: this run has one rank")


class SinglePeer(Peer):
    """The only rank of a run."""

    transport = "single"

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.threads.shares_process = True

    def lane(self, name: str, capacity_bytes: int = 0) -> Lane:
        return _SingleLane(name)

    def group(self, ranks: Sequence[int]) -> Peer | None:
        for rank in ranks:
            _require_rank_0(rank)
        return self if ranks else None

    def allgather_bytes(
        self, data: bytes, timeout_s: float | None = None, what: str = "allgather"
    ) -> list[bytes]:
        return [data]

    def abort(self, message: str, code: int = 1) -> NoReturn:
        raise TransportError(message)

    def close(self) -> None:
        self.threads.check_ended()
