"""Progress from a thread of its own, which answers other ranks while the training thread computes.

Source: eager-SGD (Li et al.), sec. 4.3: offloading "on an auxiliary thread".
"""

from __future__ import annotations

from collections.abc import Callable

from hocket.errors import ExchangeTimeoutError, PeerLostError
from hocket.progress.api import ProgressEngine
from hocket.progress.carried import CarriedRequest
from hocket.progress.driver import Driver
from hocket.transport.peer import Peer
from hocket.transport.request import Request

__all__ = ["ThreadProgress"]

# If the training thread has not heard of a failure after so many seconds, the thread ends the job itself.
_TELLING_S = 5.0


class ThreadProgress(ProgressEngine):
    """Schedules are carried out by a progress thread, which sleeps while there is nothing to do.

    What fails there is raised by whatever the application does next with the engine; if that is nothing for 5 s, the
    thread ends the job. The thread starts with the first schedule or carried request, and ends with `close` or with the
    process.
    """

    def __init__(self) -> None:
        super().__init__()
        self._driver: Driver | None = None
        self._thread: Request | None = None
        self._stopping = False

    def advance(self) -> None:
        super().advance()
        if self._driver is not None:
            self._driver.check()

    def carry(self, request: Request, peer: Peer, name: str) -> Request:
        return CarriedRequest(request, self._driver_for(peer), self, name)

    def nudge(self) -> None:
        if self._driver is not None:
            self._driver.ring()

    def wait_until(
        self, over: Callable[[], bool], describe: Callable[[], str], timeout_s: float | None
    ) -> None:
        assert self._driver is not None
        event = self._driver.watch(over)
        if event is not None:
            event.wait(describe, timeout_s)

    def _driver_for(self, peer: Peer) -> Driver:
        if self._driver is None:
            self._driver = Driver(peer)
            self._thread = peer.threads.spawn("progress", self._live, self._ask_to_stop)
        return self._driver

    def _live(self) -> None:
        driver = self._driver
        assert driver is not None
        try:
            while not self._stopping:
                driver.step(None)
        except Exception as error:
            driver.fail(error)
            try:
                driver.told.wait(lambda: "its training thread to hear of a failure", _TELLING_S)
            except PeerLostError:
                return  # the training thread's waits end so, too
            except ExchangeTimeoutError:
                driver.peer.abort(f"hocket: {driver.error}; all ranks end")

    def _ask_to_stop(self) -> None:
        self._stopping = True
        self.nudge()

    def _stop(self) -> None:
        if self._driver is None or self._thread is None:
            return
        self._ask_to_stop()
        self._thread.wait()
        self._driver.close()
        self._driver = self._thread = None
        self._stopping = False
