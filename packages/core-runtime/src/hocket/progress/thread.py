"""Progress from a thread of its own, which answers other ranks while the training thread computes.

Source: eager-SGD (Li et al.), sec. 4.3: offloading "on an auxiliary thread"; GossipGraD (Daily et al. 2018), sec. 5.2:
the training thread puts its communication into a queue, from which a communication thread takes it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from hocket.errors import ExchangeTimeoutError, PeerLostError
from hocket.progress.engine import ProgressEngine
from hocket.transport.peer import Peer
from hocket.transport.request import FunctionRequest, Request, T
from hocket.transport.signals import Event, Wake

# If the training thread has not heard of a failure after so many seconds, the thread ends the job itself.
_TELLING_S = 5.0


class ThreadProgress(ProgressEngine):
    """An engine whose activities run in a progress thread, which sleeps while it is idle.

    A failure there is raised by the application's next use of the engine; if there is none for 5 s, the thread ends the
    job. The thread starts with the first activity or carried request, and ends with `close` or with the process.
    """

    def __init__(self) -> None:
        super().__init__()
        # Only the progress thread looks at these: MPI lets no two threads look at one request at once.
        self._carried: dict[int, Request] = {}
        self._reported: Event | None = None
        self._thread: Request | None = None
        self._stopping = False

    def advance(self) -> None:
        super().advance()
        self.check()

    def carry(self, request: Request[T], peer: Peer, name: str) -> Request[T]:
        self._begin(peer)
        key = id(request)
        self._carried[key] = request
        self.nudge()

        def over() -> bool:
            return key not in self._carried

        def done() -> bool:
            self.check()
            return over()

        def wait(timeout_s: float | None) -> None:
            self.wait_until(over, "the progress thread", name, lambda: f"the messages of {name}", timeout_s)

        return FunctionRequest(done, wait, lambda: request.result)

    def check(self) -> None:
        if self.error is not None and self._reported is not None:
            self._reported.set()
        super().check()

    def nudge(self) -> None:
        if self._wake is not None:
            self._wake.ring()

    def _wait(self, over: Callable[[], bool], describe: Callable[[], str], timeout_s: float | None) -> None:
        event = self._event_of(over)
        if event is not None:
            event.wait(describe, timeout_s)

    def _begin(self, peer: Peer) -> Wake:
        wake = super()._begin(peer)
        if self._thread is None:
            self._reported = peer.threads.event()
            self._thread = peer.threads.spawn("progress", self._live, self._ask_to_stop)
        return wake

    def _advance_carried(self) -> bool:
        under_way = self._carried.copy()  # the training thread may add to it meanwhile
        ended = [key for key, request in under_way.items() if request.done()]
        for key in ended:
            del self._carried[key]
        if ended:
            self._tell()
        return len(ended) < len(under_way)

    def _live(self) -> None:
        assert self._peer is not None
        assert self._reported is not None
        try:
            while not self._stopping:
                self.step(None)
        except Exception as error:
            self.fail(error)
            try:
                self._reported.wait(lambda: "its training thread to learn of a failure", _TELLING_S)
            except PeerLostError:
                return  # the training thread's waits end so, too
            except ExchangeTimeoutError:
                self._peer.abort(f"hocket: {self.error}; all ranks end")

    def _ask_to_stop(self) -> None:
        self._stopping = True
        self.nudge()

    def abandon(self) -> None:
        self._carried = {}
        if self.error is not None and self._reported is not None:
            self._reported.set()
        with suppress(PeerLostError):  # where the world ends its thread has ended, too
            super().abandon()

    def _stop(self) -> None:
        if self._thread is not None:
            self._ask_to_stop()
            self._thread.wait()
            self._thread = None
            self._stopping = False
        super()._stop()
