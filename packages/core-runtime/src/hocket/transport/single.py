"""The transport of a run with one rank and no launcher: all operations are done at once."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NoReturn

from hocket.arrays import Array
from hocket.errors import ExchangeTimeoutError, TransportError
from hocket.transport.gathering import check_gathering, gathered
from hocket.transport.lane import Lane
from hocket.transport.peer import Peer
from hocket.transport.request import Finished, FunctionRequest, Request


class _SingleLane(Lane):
    rank, size = 0, 1

    def __init__(self, name: str) -> None:
        self.name = name
        # By round: the buffers of receives that no send has filled, in their order, and what no receive has taken.
        self._receives: dict[int, dict[int, Array]] = defaultdict(dict)
        self._messages: dict[int, deque[Array]] = defaultdict(deque)
        self._keys = itertools.count()

    def isend(self, data: Array, to: int, round: int) -> Request:
        _require_rank_0(to)
        self._messages[round].append(data.copy())
        self._deliver(round)
        return Finished()

    def irecv(self, data: Array, source: int, round: int) -> Request:
        _require_rank_0(source)
        receives, key = self._receives[round], next(self._keys)
        receives[key] = data
        self._deliver(round)

        def wait(timeout_s: float | None) -> None:
            if key in receives:  # the only rank is the one that waits: nobody is left who could send
                raise ExchangeTimeoutError(
                    f"rank 0 waits for itself in {self.name}, round {round}: nothing was sent"
                )

        return FunctionRequest(lambda: key not in receives, wait, withdraw=lambda: receives.pop(key, None))

    def _deliver(self, round: int) -> None:
        receives, messages = self._receives[round], self._messages[round]
        while receives and messages:
            key, message = next(iter(receives)), messages.popleft()
            if message.nbytes != receives[key].nbytes:
                raise TransportError(
                    f"rank 0: {self.name}, round {round}: a message of {message.nbytes} bytes arrived for a buffer "
                    f"of {receives[key].nbytes}"
                )
            receives.pop(key).reshape(-1).view("u1")[:] = message.reshape(-1).view("u1")

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

    def iallgather(self, send: Array, receive: Array) -> Request[list[Array]]:
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
