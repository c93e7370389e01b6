"""A request from outside to save and end: SIGTERM or SIGUSR1, as schedulers send them before they take a machine away.

The signal is heard by a thread, through the file descriptor that Python's own handler writes to at once: a handler in
Python runs between two bytecodes of the main thread, which may be waiting or computing elsewhere for long.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable

from hocket.transport.job_notes import PID_FOLDER_VARIABLE

__all__ = ["Listener", "requests"]


def requests() -> tuple[signal.Signals, ...]:
    """Return the signals that ask this process to save and end.

    SIGTERM is none of them where `hocket run` has started it: by that its mpiexec ends ranks at once.
    """
    if PID_FOLDER_VARIABLE in os.environ:
        return (signal.SIGUSR1,)
    return signal.SIGTERM, signal.SIGUSR1


class Listener:
    """Calls `heard` on a thread of its own at the first request.

    Args:
        heard: gets the listener; may take its time until that is closed; later requests are not heard.

    Raises:
        ValueError: this is not the main thread, which alone may set handlers.
    """

    def __init__(self, heard: Callable[[Listener], None]) -> None:
        self._heard = heard
        #: Whether nobody waits for what `heard` does any more.
        self.closed = False
        self._signals = requests()
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._previous = {number: signal.signal(number, self._handle) for number in self._signals}
        self._previous_descriptor = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        if self._previous_descriptor != -1:  # somebody else's, for instance asyncio's
            signal.set_wakeup_fd(self._previous_descriptor)
        _in_use.append(self)
        self._thread = threading.Thread(target=self._listen, name="hocket signals", daemon=True)
        self._thread.start()

    def request(self) -> None:
        """Do as if a signal had come."""
        self._handle(self._signals[0], None)

    def close(self) -> None:
        """Give the signals back to whoever heeded them before, on the main thread, and wait for `heard` to return."""
        self.closed = True
        self._release()
        with contextlib.suppress(BlockingIOError):
            os.write(self._writing, b"\0")
        # What it holds may be the last reference to tensors, which a thread may not free while the process ends.
        self._thread.join()
        os.close(self._reading)
        os.close(self._writing)

    def _release(self) -> None:
        _in_use.remove(self)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._previous_descriptor == -1:
            signal.set_wakeup_fd(-1)

    def _handle(self, number: int, frame: object) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._writing, bytes([number]))

    def _listen(self) -> None:
        while number := os.read(self._reading, 1)[0]:
            if number in self._signals:
                self._heard(self)
                break


_in_use: list[Listener] = []


def _leave_child_alone() -> None:
    """Have a forked process, such as a loader's worker, end when it is told to, and not tell its parent so."""
    for listener in list(_in_use):
        listener._release()


os.register_at_fork(after_in_child=_leave_child_alone)
