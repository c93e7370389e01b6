"""Wake-ups between the ranks of a host: none is lost, none is cut in two."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hocket.progress import ThreadProgress
from hocket.transport.host.wake import HostWake
from hocket.transport.signals import Bell, Bells
from hocket.transport.single import SinglePeer


class _Two(SinglePeer):
    """One of two ranks of this process, as far as `HostWake.connect` can tell."""

    def __init__(self, rank: int, gathered: Callable[[bytes], list[bytes]]) -> None:
        super().__init__()
        self.rank, self.size = rank, 2
        self._gathered = gathered

    def allgather_bytes(
        self, data: bytes, timeout_s: float | None = None, what: str = "allgather"
    ) -> list[bytes]:
        return self._gathered(data)


@pytest.fixture
def two() -> Iterator[tuple[HostWake, Bells, HostWake]]:
    """Two wakes, and the way from the first to the second."""
    met, told = threading.Barrier(2), {}

    def gather(rank: int) -> Callable[[bytes], list[bytes]]:
        def gathered(value: bytes) -> list[bytes]:
            told[rank] = value
            met.wait()
            values = [told[0], told[1]]
            met.wait()
            return values

        return gathered

    wakes = HostWake(), HostWake()
    other = threading.Thread(target=lambda: wakes[1].connect(_Two(1, gather(1)), 7))
    other.start()
    connection = wakes[0].connect(_Two(0, gather(0)), 3)
    other.join()
    yield wakes[0], connection, wakes[1]
    for wake in wakes:
        wake.close()


def within(call: Callable[[], Any], seconds: float = 10.0) -> Any:
    """Return what `call` does in a thread of its own, which must end."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it still sleeps"
    return results[0]


def test_a_wake_says_who_rang_for_what(two: tuple[HostWake, Bells, HostWake]) -> None:
    _, connection, other = two
    assert connection.reaches(1)
    assert connection.hears(1)
    assert not connection.reaches(0)
    assert connection.ring(1, 5, 2**40)
    assert connection.ring(1, 6, -1)
    assert within(lambda: other.wait(None)) == [Bell(7, 5, 2**40), Bell(7, 6, -1)]
    assert other.wait(0) == ()


def test_a_full_wake_refuses_rings_and_loses_none(two: tuple[HostWake, Bells, HostWake]) -> None:
    _, connection, other = two
    count = 0
    while connection.ring(1, count, 0):
        count += 1
    other.ring()  # by its own rank: it wakes anyway
    rings = within(lambda: other.wait(None))
    assert [ring.message for ring in rings] == list(range(count))
    assert connection.ring(1, 0, 0)


def test_a_closed_wake_is_rung_without_an_error(two: tuple[HostWake, Bells, HostWake]) -> None:
    wake, connection, _ = two
    sleeping = HostWake()
    sleeping.close()
    assert connection.ring(1, 0, 0)
    wake.ring()
    assert within(lambda: wake.wait(None)) == [Bell(-1, 0, 0)]


def test_what_ends_while_somebody_begins_to_wait_is_told() -> None:
    """The last step comes just before the application begins to wait: nothing else would wake it."""
    progress, peer = ThreadProgress(), SinglePeer()
    ended = [False]

    class Over:
        """Ends while it is asked for the first time."""

        def __call__(self) -> bool:
            before, ended[0] = ended[0], True
            return before

    progress._begin(peer)
    over = Over()
    within(lambda: progress.wait_until(over, "it", "test", lambda: "it", 5.0))
    progress.close()
