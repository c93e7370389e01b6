"""A transport around another one that records its messages, collectives and waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from hocket.arrays import Array, Buffer
from hocket.trace.record import Recorder, SpanKind
from hocket.transport.lane import Lane
from hocket.transport.peer import Peer
from hocket.transport.request import Request, T, T_co
from hocket.transport.wrapper import WrapperLane, WrapperPeer


class TracedRequest(Request[T_co]):
    """A request that records the end of an operation, as this rank saw it, and the waits for it.

    Args:
        held: the transport's request.
        recorder: this rank's recorder.
        span: the number of the operation's span.
        what: the operation and its lane, for waits.
    """

    __slots__ = ("_held", "_recorder", "_span", "_what")

    def __init__(self, held: Request[T_co], recorder: Recorder, span: int, what: str) -> None:
        self._held = held
        self._recorder = recorder
        self._span: int | None = span
        self._what = what

    def done(self) -> bool:
        try:
            finished = self._held.done()
        except BaseException as error:
            self._end(error)
            raise
        if finished:
            self._end()
        return finished

    def wait(self, timeout_s: float | None = None) -> T_co:
        if self._span is None:
            return self._held.wait(timeout_s)
        wait = self._recorder.begin(SpanKind.WAIT, self._what) if self._recorder.in_training_thread else None
        failure: BaseException | None = None
        try:
            return self._held.wait(timeout_s)
        except BaseException as error:
            failure = error
            raise
        finally:
            self._end(failure)
            if wait is not None:
                self._recorder.end(wait)

    @property
    def result(self) -> T_co:
        return self._held.result

    def withdraw(self) -> None:
        self._held.withdraw()
        self._end("withdrawn")

    def __del__(self) -> None:
        # A dropped request is left to the transport, and its end is not seen.
        self._end("dropped")

    def _end(self, error: BaseException | str | None = None) -> None:
        if self._span is not None:
            self._recorder.end(self._span, error)
            self._span = None


class TracedLane(WrapperLane):
    """A lane that records the operations of another one.

    Args:
        held: the transport's lane.
        recorder: this rank's recorder.
        ranks: the lane's, numbered as in the recording.
        key: the lane's name, the same on its ranks and that of no other lane of theirs.
        ordered: whether an exchange with neighbours is one operation, as on devices, and not its messages.
    """

    def __init__(
        self, held: Lane, recorder: Recorder, ranks: Sequence[int], key: str, *, ordered: bool = False
    ) -> None:
        super().__init__(held)
        self._ordered = ordered
        self._recorder = recorder
        self._ranks = ranks
        self._key = key
        self._own = ranks[held.rank]

    def isend(self, data: Array, to: int, round: int) -> Request:
        span = self._recorder.begin(SpanKind.SEND, self._key, round, data.nbytes, self._own, self._ranks[to])
        return self._traced(self.held.isend(data, to, round), span, "send")

    def irecv(self, data: Array, source: int, round: int) -> Request:
        span = self._recorder.begin(
            SpanKind.RECEIVE, self._key, round, data.nbytes, self._ranks[source], self._own
        )
        return self._traced(self.held.irecv(data, source, round), span, "receive")

    def iexchange(
        self, sends: Sequence[tuple[Buffer, int]], receives: Sequence[tuple[Buffer, int]], round: int
    ) -> Request:
        if not self._ordered:
            return Lane.iexchange(self, sends, receives, round)  # message by message
        num_bytes = sum(int(data.nbytes) for data, _ in sends)
        return self._collective("exchange", num_bytes, lambda: self.held.iexchange(sends, receives, round))

    def iallreduce(self, send: Array, receive: Array) -> Request:
        return self._collective("allreduce", send.nbytes, lambda: self.held.iallreduce(send, receive))

    def ibroadcast(self, data: Array, root: int) -> Request:
        return self._collective("broadcast", data.nbytes, lambda: self.held.ibroadcast(data, root))

    def ireduce(self, send: Array, receive: Array | None, root: int) -> Request:
        return self._collective("reduce", send.nbytes, lambda: self.held.ireduce(send, receive, root))

    def iallgather(self, send: Array, receive: Array) -> Request[list[Array]]:
        return self._collective("allgather", send.nbytes, lambda: self.held.iallgather(send, receive))

    def ibarrier(self) -> Request:
        return self._collective("barrier", 0, self.held.ibarrier)

    def _collective(self, what: str, num_bytes: int, begin: Callable[[], Request[T]]) -> TracedRequest[T]:
        span = self._recorder.begin(SpanKind.COLLECTIVE, f"{what} in {self._key}", 0, num_bytes)
        return self._traced(begin(), span, what)

    def _traced(self, held: Request[T], span: int, what: str) -> TracedRequest[T]:
        return TracedRequest(held, self._recorder, span, f"{what} in {self._key}")


class TracedPeer(WrapperPeer):
    """A peer that records the operations of its lanes, and its own gatherings.

    Args:
        held: the transport's peer.
        recorder: this rank's recorder.
        ranks: the peer's ranks, as numbered in the recording; None for all.
        opened: the number of opened lanes of each name, in this peer and its groups together.
    """

    def __init__(
        self,
        held: Peer,
        recorder: Recorder,
        ranks: Sequence[int] | None = None,
        opened: Counter[str] | None = None,
    ) -> None:
        super().__init__(held)
        self._recorder = recorder
        self._ranks = list(range(held.size)) if ranks is None else list(ranks)
        self._suffix = "" if ranks is None else f" of ranks {' '.join(map(str, ranks))}"
        self._opened: Counter[str] = Counter() if opened is None else opened

    def allgather_bytes(
        self, data: bytes, timeout_s: float | None = None, what: str = "allgather"
    ) -> list[bytes]:
        if not self._recorder.in_training_thread:
            return self.held.allgather_bytes(data, timeout_s, what)
        wait = self._recorder.begin(SpanKind.WAIT, "allgather of control messages", 0, len(data))
        try:
            return self.held.allgather_bytes(data, timeout_s, what)
        finally:
            self._recorder.end(wait)

    def _wrap_lane(self, held: Lane, capacity_bytes: int) -> Lane:
        # The ranks of a group open its lanes in the same order: they count alike.
        key = held.name + self._suffix
        self._opened[key] += 1
        number = self._opened[key]
        key = key if number == 1 else f"{key} #{number}"
        return TracedLane(held, self._recorder, self._ranks, key, ordered=self.ordered)

    def _wrap_group(self, held: Peer, ranks: Sequence[int]) -> Peer:
        return TracedPeer(held, self._recorder, [self._ranks[rank] for rank in ranks], self._opened)
