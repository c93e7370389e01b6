"""A job whose launcher, and whose ranks over transport `torch`, are forks of one process that has loaded torch.

`import torch` is nine tenths of a short job's time. As new processes do, a fork begins with its own variables, group
and descriptors and without its parent's handlers; its end is that of a Python program. Ranks of an mpiexec stay new.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import torch

from hocket.transport import own_ranks
from hocket.transport.forking import ForkedRank
from hocket.transport.hosts import Host
from hocket.transport.rank_process import end_with_parent

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
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
)


class ForkedLauncher:
    """A forked launcher, with the interface of a `subprocess` process.

    Args:
        command: that of a Python program.
        variables: its environment.
        folder: its working directory.
    """

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], folder: Path) -> None:
        reading, writing = _CONTEXT.Pipe(duplex=False)
        self._process = _CONTEXT.Process(target=_launch, args=(command, variables, folder, writing))
        self._process.start()
        writing.close()
        self.pid = self._process.pid
        self.stdout = os.fdopen(os.dup(reading.fileno()), errors="replace")
        reading.close()

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for the exit status, and return it.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("launcher", timeout_s or 0.0)
        return self._process.exitcode


def _launch(command: Sequence[str], variables: Mapping[str, str], folder: Path, output: Connection) -> None:
    os.setsid()
    os.chdir(folder)
    own_ranks._begin = _begin
    _become(command, variables, {1: output.fileno(), 2: output.fileno()})


def _begin(
    host: Host,
    program: Sequence[str],
    variables: Mapping[str, str],
    own: Mapping[str, str],
    errors: int,
    descriptors: Sequence[int] = (),
) -> ForkedRank:
    """Fork a rank of this host, which `hocket.transport.own_ranks` would start as a new process."""
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
    weakref.finalize._registry.clear()  # its parent's
    faulthandler.enable()
    status = _run(command)
    threading._shutdown()
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
