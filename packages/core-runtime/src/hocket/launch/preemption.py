"""A request to save and end: SIGTERM or SIGUSR1, which schedulers send before they take a machine away.

A thread reads the signal from the file descriptor that Python's own handler writes to at once: a handler in Python runs
between two bytecodes of the main thread, which may wait or compute in native code for long.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable
from multiprocessing import current_process
from multiprocessing.util import register_after_fork

from hocket.launch.joining import launched
from hocket.transport import forks
from hocket.transport.job_notes import is_terminated

#: What asks a process to save and end. Who has started it may end it by SIGTERM, too, and leaves a note before.
REQUESTS = (signal.SIGTERM, signal.SIGUSR1)

# So often a rank looks whether another one was asked, in milliseconds.
_LOOK_EVERY_MS = 1000
_WORKERS = "torch.utils.data._utils.worker"


def are_free() -> bool:
    """Return whether this is the main thread, and the script handles no request itself."""
    free = all(signal.getsignal(each) == signal.SIG_DFL for each in REQUESTS)
    return free and threading.current_thread() is threading.main_thread()


class Listener:
    """A thread that calls `heard` at the first request.

    Args:
        heard: called with the listener; may run until that is closed; later requests are ignored.
        asked_elsewhere: returns whether another rank was asked, which counts as a request.

    Raises:
        ValueError: this is not the main thread, which alone may set handlers.
    """

    def __init__(
        self, heard: Callable[[Listener], None], asked_elsewhere: Callable[[], bool] = lambda: False
    ) -> None:
        self._heard, self._asked_elsewhere = heard, asked_elsewhere
        self._asked = False
        #: Whether nobody waits for what `heard` does any more.
        self.closed = False
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._previous = {number: signal.signal(number, self._handle) for number in REQUESTS}
        self._previous_descriptor = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        if self._previous_descriptor != -1:  # somebody else's, for instance asyncio's
            signal.set_wakeup_fd(self._previous_descriptor)
        _in_use.append(self)
        register_after_fork(self, _shelter_worker)
        self._thread = threading.Thread(target=self._listen, name="hocket signals", daemon=True)
        self._thread.start()

    def request(self) -> None:
        """Act as on a signal."""
        self._handle(signal.SIGUSR1, None)

    def close(self) -> None:
        """Restore the earlier handlers, on the main thread, and wait for `heard` to return."""
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
        # The launcher may pass on what this process has heard itself, and would kill it at its very end.
        ends = self._asked and launched() is not None and not forks.forked
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_IGN if ends else handler)
        if self._previous_descriptor == -1:
            signal.set_wakeup_fd(-1)

    def _handle(self, number: int, frame: object) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._writing, bytes([number]))

    def _listen(self) -> None:
        poll = select.poll()
        poll.register(self._reading, select.POLLIN)
        while True:
            number = int(signal.SIGUSR1)
            if poll.poll(_LOOK_EVERY_MS):
                number = os.read(self._reading, 1)[0]
                if number == 0:
                    return
            elif not self._asked_elsewhere():
                continue
            if number == signal.SIGTERM and is_terminated():
                os._exit(128 + signal.SIGTERM)
            if number in REQUESTS:
                self._asked = True
                self._heard(self)
                return


_in_use: list[Listener] = []


def _leave_child_alone() -> None:
    """Make a forked process, such as a loader's worker, end on a signal, without notifying its parent."""
    for listener in list(_in_use):
        listener._release()


def _shelter_worker(_: Listener) -> None:
    """Make a loader's worker outlive a request to the process group, as its rank needs it to save.

    It ends by a message or SIGTERM of its rank, and when its rank has ended.
    """
    target = getattr(current_process(), "_target", None)
    if getattr(target, "__module__", "") == _WORKERS and hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS)
        threading.Thread(target=_heed_rank, name="hocket signals", daemon=True).start()


def _heed_rank() -> None:
    while signal.sigwaitinfo(REQUESTS).si_pid != os.getppid():
        pass
    os._exit(0)


os.register_at_fork(after_in_child=_leave_child_alone)
