"""No word is lost between the application and a thread that sleeps in compiled code."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hocket.progress.driver import Driver
from hocket.schedule import NoOp, Receive, Schedule
from hocket.transport.host.doorbell import HostDoorbell
from hocket.transport.peer import Peer
from hocket.transport.signals import Connection, Ring
from hocket.transport.single import SinglePeer

# Ends with a notice of the rank itself.
HEARS = Schedule((NoOp("go"), Receive("hear")), ("hear",), trigger="go", persistent=True)


class Bell(HostDoorbell):
    """A bell that can be rung in another's name."""

    def connect(self, peer: Peer, key: int) -> Connection:
        return _Heard()

    def ring_as(self, *ring: int) -> None:
        os.write(self._writing, np.array(ring, np.int64).tobytes())

    def fill(self) -> None:
        while True:
            try:
                self.ring_as(0, 0, 0, 0, 0)
            except BlockingIOError:
                return


class _Heard(Connection):
    largest_bytes = 64

    def reaches(self, rank: int) -> bool:
        return False

    def hears(self, rank: int) -> bool:
        return True

    def ring(self, rank: int, message: int, round: int, data: bytes | None = None) -> bool:
        raise AssertionError("nobody is reached")


class BellPeer(SinglePeer):
    def __init__(self) -> None:
        super().__init__()
        self.bell = Bell()
        self.threads.doorbell = lambda: self.bell  # type: ignore[method-assign]


@pytest.fixture
def peer() -> BellPeer:
    return BellPeer()


def within(call: Callable[[], Any], seconds: float = 10.0) -> Any:
    """Return what `call` does in a thread of its own, which must end."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it still sleeps"
    return results[0]


def test_the_ranks_own_ring_counts_where_others_have_filled_the_bell(peer: BellPeer) -> None:
    driver = Driver(peer)
    driver.open(HEARS, peer, "test")
    driver.step(0)
    peer.bell.fill()
    driver.ring()
    assert list(within(lambda: peer.bell.wait(None))) == []
    driver.close()


def test_rounds_are_told_of_from_when_the_application_closes(peer: BellPeer) -> None:
    """The last round may end before the application waits for the end: then nobody would look whether it has closed."""
    driver = Driver(peer)
    attended = driver.open(HEARS, peer, "test")
    attended.trigger(0)
    driver.step(0)
    attended.close()
    driver.step(0)
    assert not attended.closed
    peer.bell.ring_as(0, 0, 0, 0, 0)  # the notice that ends the last round
    within(lambda: driver.step(None))
    assert attended.closed
    driver.close()


def test_what_ends_while_somebody_begins_to_wait_is_told(peer: BellPeer) -> None:
    driver = Driver(peer)
    over = [False]

    class Lock:
        """Has the driver tell of an end between the first and the second time that it is taken."""

        def __init__(self, held: threading.Lock) -> None:
            self.held, self.taken = held, 0

        def __enter__(self) -> None:
            self.taken += 1
            if self.taken == 2:
                over[0] = True
                driver._tell()
            self.held.acquire()

        def __exit__(self, *_: object) -> None:
            self.held.release()

    driver._lock = Lock(driver._lock)  # type: ignore[assignment]
    assert driver.watch(lambda: over[0]) is None
    driver.close()


def test_rings_for_others_are_returned(peer: BellPeer) -> None:
    driver = Driver(peer)
    driver.open(HEARS, peer, "test")
    driver.step(0)
    peer.bell.ring_as(0, 0, 0, 0, 0)  # for the program
    peer.bell.ring_as(3, 1, 2, 5, 9, 1, 2)  # nine bytes, filled up to words
    peer.bell.ring_as(3, 1, 2, 6, -1)
    message = np.array([1, 2], np.int64).tobytes()[:9]
    assert peer.bell.wait(0) == [Ring(3, 1, 2, 5, message), Ring(3, 1, 2, 6, None)]
    driver.close()
