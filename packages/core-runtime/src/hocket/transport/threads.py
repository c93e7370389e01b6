"""The threads of a rank: real ones, for ranks that are processes."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hocket.errors import TransportError
from hocket.transport.request import Request, T, T_co
from hocket.transport.signals import Event, Wake
from hocket.transport.status import Status
from hocket.transport.waiting import back_off, wait

# A thread that computes when the process ends is left behind after this time.
_LEAVING_TIMEOUT_S = 5.0


class Rank(Protocol):
    """The part of a peer that its threads read."""

    rank: int
    timeout_s: float

    @property
    def status(self) -> Status: ...


class Threads:
    """The maker of the rank's other threads, and of their events and wake-ups.

    Args:
        peer: the rank's endpoint.

    Attributes:
        shares_process: whether all ranks of the job are threads of this process.
    """

    shares_process = False

    def __init__(self, peer: Rank) -> None:
        self._peer = peer
        self._begun: Sequence[ThreadRequest[object]] = ()

    def spawn(self, name: str, call: Callable[[], T], stop: Callable[[], None] | None = None) -> Request[T]:
        """Run `call()` in another thread of this rank, which has to end before the peer is closed.

        Args:
            name: its role on this rank, for reports.
            call: the function that it runs; its exception is raised by waits for the request.
            stop: makes `call` return soon. It is called when the process ends, so that no thread uses the transport
                after its end; without it `call` has to ensure that.

        Returns:
            A request that is done when `call` has returned, with its result.
        """
        thread = ThreadRequest(self._peer, name, call, stop)
        self._begun = [*self._begun, thread]
        return thread

    def event(self) -> Event:
        """Return an event that one thread of this rank sets and others wait for."""
        return ThreadEvent(self._peer)

    def wake(self) -> Wake:
        """Return a wake-up for one thread to sleep on; other ranks can ring it once it is connected to theirs."""
        from hocket.transport.host.wake import HostWake

        return HostWake()

    def check_ended(self) -> None:
        """Raise TransportError if a thread of `spawn` still runs."""
        running = [thread.name for thread in self._begun if not thread.done()]
        if running:
            raise TransportError(
                f"rank {self._peer.rank}: the peer was closed while its threads run: {', '.join(running)}. Wait for "
                "them first"
            )


class ThreadEvent(Event):
    """An event between threads of a process.

    Args:
        peer: the rank's endpoint, for its timeout.
    """

    __slots__ = ("_event", "_peer")

    def __init__(self, peer: Rank) -> None:
        self._peer = peer
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    def wait(self, describe: Callable[[], str], timeout_s: float | None = None) -> None:
        # Who should set it may wait for a dead rank.
        wait_until(self._peer, self._event.is_set, describe, timeout_s, lambda _, s: self._event.wait(s))


def wait_until(
    peer: Rank,
    until: Callable[[], bool],
    describe: Callable[[], str],
    timeout_s: float | None = None,
    sleep: Callable[[float, float], object] = back_off,
    *,
    now: Callable[[], float] = time.monotonic,
) -> None:
    """Block until `until()`, and look meanwhile whether all ranks live.

    Args:
        peer: this rank's endpoint.
        until: says whether the wait has ended.
        describe: says what this rank waits for; called for errors and reports only.
        timeout_s: seconds to wait at most; None for the peer's.
        sleep: given how long the wait has lasted and for how long to sleep at most, in seconds.
        now: the clock, in seconds.

    Raises:
        ExchangeTimeoutError: not in time; says what the other ranks do.
        PeerLostError: a rank has died.
    """

    def report(outcome: str) -> str:
        sentences = [f"rank {peer.rank} waits for {describe()}: {outcome}", peer.status.describe()]
        return "; ".join(filter(None, sentences))

    longest_s = peer.timeout_s if timeout_s is None else timeout_s
    wait(until, longest_s, report, sleep, check=peer.status.check_lost, now=now)


class ThreadRequest(Request[T_co]):
    """A call in a thread of its own, begun at once. The thread is a daemon: it never keeps a process alive.

    Args:
        peer: the rank's endpoint.
        name: the thread's role.
        call: the function that it runs.
        stop: makes `call` return soon; called, and the thread waited for, when the process ends.
    """

    def __init__(
        self, peer: Rank, name: str, call: Callable[[], T_co], stop: Callable[[], None] | None
    ) -> None:
        self.name = name
        self._peer = peer
        self._call = call
        self._stop = stop
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._live, name=f"hocket {name}", daemon=True)
        self._thread.start()
        if stop is not None:
            atexit.register(self._end_with_process)

    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> T_co:
        wait_until(
            self._peer,
            self.done,
            lambda: f"its thread {self.name!r} to end",
            timeout_s,
            lambda _, longest_s: self._thread.join(longest_s),
        )
        if self._error is not None:
            raise self._error
        return self.result

    @property
    def result(self) -> T_co:
        result: T_co = self._result
        return result

    def _live(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:
            self._error = error
        finally:
            atexit.unregister(self._end_with_process)

    def _end_with_process(self) -> None:
        assert self._stop is not None
        if self.done():
            return  # also in a forked process, which has none of its parent's threads
        self._stop()
        self._thread.join(_LEAVING_TIMEOUT_S)
