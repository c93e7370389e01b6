"""A lock that keeps the GIL where it is free: else who holds it would wait for the GIL, and compiled code for both."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator

import pytest

from hocket.schedule import Mutex


@pytest.fixture
def greedy_thread() -> Iterator[None]:
    """Let another thread compute, which gives the GIL back after half a second."""
    over = threading.Event()

    def compute() -> None:
        while not over.is_set():
            pass

    before_s = sys.getswitchinterval()
    sys.setswitchinterval(0.5)
    thread = threading.Thread(target=compute)
    thread.start()
    yield
    over.set()
    thread.join()
    sys.setswitchinterval(before_s)


def test_a_free_mutex_is_taken_without_waiting_for_the_gil(greedy_thread: None) -> None:
    mutex = Mutex()
    begin_s = time.monotonic()
    for _ in range(100):
        with mutex:
            pass
    assert time.monotonic() - begin_s < 0.9  # it may lose the GIL once, and not each time


def test_only_one_holds_it() -> None:
    mutex, inside, most = Mutex(), [0], [0]

    def work() -> None:
        for _ in range(50):
            with mutex:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                time.sleep(0)  # lets another thread run
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (inside[0], most[0]) == (0, 1)
