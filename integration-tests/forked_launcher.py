"""A job whose launcher, and whose ranks over transport `torch`, are forks of one process that has loaded torch.

`import torch` is nine tenths of a short job's time. As new processes do, a fork begins with its own variables, group
and descriptors and without its parent's handlers; its end is that of a Python program. Ranks of an mpiexec stay new.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import NoReturn
from unittest.mock import patch

import torch

from hocket.launch import own_ranks
from hocket.launch.forking import ForkedRank
from hocket.launch.hosts import Host
from hocket.launch.rank_process import end_with_parent

_LOADED = [
    "hocket.cli.main",
    "hocket.cli.checking",
    "hocket.cli.launching",
    "hocket.cli.running",
    "hocket.cli.ranking",
    "hocket.session.replica_session",
    "hocket.session.stepping_session",
    "hocket.transport.tcp",
    "matplotlib.backends.backend_agg",
    "numpy.ma",
]
_LONGEST_REQUEST = 1 << 17


class ForkedLauncher:
    """A forked launcher, with the interface of a `subprocess` process; one at a time.

    Args:
        command: that of a Python program.
        variables: its environment.
        folder: its working directory.
    """

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], folder: Path) -> None:
        reading, writing = os.pipe()
        request = json.dumps([list(command), dict(variables), str(folder)]).encode()
        socket.send_fds(_server(), [request], [writing])
        os.close(writing)
        self.stdout = os.fdopen(reading, errors="replace")
        self.pid = int(_server().recv(_LONGEST_REQUEST))
        self._status: int | None = None

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for the exit status, and return it.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        if self._status is None:
            if not select.select([_server()], [], [], timeout_s)[0]:
                raise subprocess.TimeoutExpired("launcher", timeout_s or 0.0)
            self._status = int(_server().recv(_LONGEST_REQUEST))
        return self._status


@cache
def _server() -> socket.socket:
    """Return the way to this process's own server, which ends with it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen([sys.executable, __file__], stdin=theirs.fileno())
    atexit.register(process.wait)
    atexit.register(ours.close)  # before
    return ours


def _serve() -> None:
    for name in _LOADED:
        import_module(name)
    with socket.socket(fileno=0) as control, contextlib.suppress(ConnectionResetError):
        while True:
            request, descriptors, _, _ = socket.recv_fds(control, _LONGEST_REQUEST, 1)
            if not request:
                return
            pid = os.fork()
            if not pid:
                _launch(*json.loads(request), *descriptors)
            os.close(*descriptors)
            control.send(str(pid).encode())
            control.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())


def _launch(command: Sequence[str], variables: Mapping[str, str], folder: str, output: int) -> NoReturn:
    os.setsid()
    os.chdir(folder)
    patch.object(own_ranks, "_begin", _begin).start()
    _become(command, variables, {0: os.open(os.devnull, os.O_RDONLY), 1: output, 2: output})


def _begin(
    host: Host,
    program: Sequence[str],
    variables: Mapping[str, str],
    own: Mapping[str, str],
    errors: int,
    descriptors: Sequence[int] = (),
) -> ForkedRank:
    """Fork a rank of this host, which `hocket.launch.own_ranks` would start as a new process."""
    pid = os.fork()
    if not pid:
        os.setpgid(0, 0)
        end_with_parent(signal.SIGKILL)
        torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
        _become(program, {**variables, **own}, {0: os.open(os.devnull, os.O_RDONLY), 2: errors}, descriptors)
    return ForkedRank(pid)


def _become(
    command: Sequence[str],
    variables: Mapping[str, str],
    descriptors: Mapping[int, int],
    kept: Sequence[int] = (),
) -> NoReturn:
    """Become a new Python program in a process that was just forked."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for ours, theirs in descriptors.items():
        os.dup2(theirs, ours)
    for descriptor in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, *kept}:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    os.environ.clear()
    os.environ.update(variables)
    tempfile.tempdir = None
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # its parent's
    faulthandler.enable()
    status = _run(command)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def _run(command: Sequence[str]) -> int:
    """Run `python [-P] -m MODULE ...` or `python SCRIPT ...` in this process; return its status."""
    _, *arguments = [part for part in command if part != "-P"]
    by_module = arguments[0] == "-m"
    sys.argv = arguments[by_module:]
    try:
        if by_module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


if __name__ == "__main__":
    _serve()
