"""Ranks as forks of one process of this host, which imports for all of them what they need.

`import torch` takes a second and a half of a core. The process that imports it ends once it has forked the ranks, so
that they become children of their launcher, as if it had started each of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from hocket.launch.rank_process import end_with_parent

T = TypeVar("T")

#: Names the descriptor over which the launcher gives a process the variables of the ranks that it is to fork.
FORKS_VARIABLE = "HOCKET_FORKS"

_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 1e-3


class ForkedRank:
    """A forked rank, with the interface of a `subprocess` process.

    Args:
        pid: the number of this process's child.
    """

    stdin: None = None

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal's number; None while the rank runs."""
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:  # else a signal's handler may have asked meanwhile
                self._status = os.waitstatus_to_exitcode(status)
        return self._status

    def wait(self) -> int | None:
        """Wait for the exit status, and return it."""
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._status

    def send_signal(self, number: int) -> None:
        """Send the rank a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


def fork_ranks(
    process: subprocess.Popen[bytes], control: socket.socket, variables: Sequence[Mapping[str, str]]
) -> list[ForkedRank]:
    """Have a process that waits in `in_each_rank` fork ranks; they become this process's children.

    Return none if it has ended before.

    Args:
        process: the process; it ends when it has forked them.
        control: the other end of its descriptor.
        variables: each rank's own.
    """
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    pids = []
    try:
        with contextlib.suppress(OSError), control.makefile("rw") as words:
            words.write(json.dumps([dict(own) for own in variables]))
            words.flush()
            control.shutdown(socket.SHUT_WR)
            pids = json.loads(words.readline() or "[]")
        if pids:
            process.wait()
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0)
    return [ForkedRank(pid) for pid in pids]


def in_each_rank(load: Callable[[], T]) -> T:
    """Return what `load` returns, in each rank: this process, or the processes that its launcher wants it to fork."""
    descriptor = os.environ.pop(FORKS_VARIABLE, None)
    if descriptor is None:
        return load()
    launcher, forking = os.getppid(), os.getpid()
    with socket.socket(fileno=int(descriptor)) as control, control.makefile("rw") as words:
        ranks = json.loads(words.read() or "[]")
        loaded = load()
        gc.freeze()  # what is shared stays so: a collection would write to it
        pids = []
        for variables in ranks:
            pid = os.fork()
            if not pid:
                _become_rank(launcher, forking, variables)
                if "mpi4py.MPI" in sys.modules or threading.active_count() > 1:
                    os.execv(sys.executable, sys.orig_argv)  # a plugin has started what no fork takes along
                return loaded
            pids.append(pid)
        words.write(f"{json.dumps(pids)}\n")
        words.flush()
    os._exit(0)


def _become_rank(launcher: int, forking: int, variables: Mapping[str, str]) -> None:
    """Become a rank in a process that was just forked.

    Args:
        launcher: the launcher's process number.
        forking: that of the process that was forked.
        variables: the rank's own.
    """
    os.setpgid(0, 0)
    os.environ.update(variables)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # else all ranks would draw the same
    while os.getppid() == forking:  # whose end must not be this one's
        time.sleep(_POLL_S)
    end_with_parent(signal.SIGKILL)
    if os.getppid() != launcher:
        os._exit(1)
