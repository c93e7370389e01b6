"""A Python of tests that has imported torch and Hocket: what they start by `python` are its forks.

`import torch` takes two seconds of a core, and CI's tests start several hundred processes. `forks_in_place_of_starts`
has `subprocess` fork them where that makes no difference: a script, `-c`, or a module of Hocket's or torchrun, in an
environment with the same settings of Python. A fork's own starts are its forks in turn, as long as it has one thread.
Ranks of an mpiexec are forks, too: it starts a stand-in for each (`warm_rank.py`).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

#: Of the environment, what Python and libraries read as they are started or imported, but for what a fork sets itself.
_READ_ONCE = ("PYTHON", "NUMBA", "TORCH_", "MKL", "OPENBLAS", "LC_", "LANG", "LD_")
_SET_HERE = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONFAULTHANDLER", "TORCH_CPP_LOG_LEVEL")
#: Signals that a process inherits as ignored.
INHERITED = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1)
_PR_SET_CHILD_SUBREAPER = 36
#: Bytes that a fork's environment may take, for others to see.
_ROOM = 100_000

#: The program of the process that forks.
_SERVER = str(Path(__file__).with_name("warm_server.py"))
#: What this process, and the one that forks, have begun with.
_AT_START = {**os.environ}
start = subprocess.Popen._execute_child  # type: ignore[attr-defined]


def _read_once(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_ONCE) and name not in _SET_HERE
    }


def _can_fork(args: object, executable: object, environment: Mapping[str, str]) -> bool:
    """Return whether a fork does what this command would."""
    if executable is not None or not isinstance(args, list) or len(args) < 2:
        return False
    words = [os.fspath(word) for word in args]
    if words[0] != sys.executable or _read_once(environment) != _read_once(_AT_START):
        return False
    words = words[2:] if words[1] == "-P" else words[1:]
    if words[0] == "-m":
        return words[1].startswith("hocket") or words[1] == "torch.distributed.run"
    if words[0] == "-c":
        return "torch" not in words[1]  # it may be on what imports it, and when
    return words[0].endswith(".py")


def with_stand_ins(
    args: Any, executable: object, env: Mapping[str, str] | None, name: Callable[[], str]
) -> Any:
    """Return an mpiexec's command with stand-ins for its ranks, where forks do what these would; others unchanged.

    Args:
        args: the command, as `Popen._execute_child` gets it.
        executable: the same.
        env: the same.
        name: returns where the process that forks listens for stand-ins.
    """
    if executable is not None or not isinstance(args, list) or not str(args[0]).endswith("/mpiexec"):
        return args
    words = [os.fspath(word) for word in args]
    program = words.index(sys.executable) if sys.executable in words else len(words)
    if not _can_fork(words[program:], None, os.environ if env is None else env):
        return args
    stand_in = str(Path(__file__).with_name("warm_rank.py"))
    return [*words[:program], sys.executable, "-IS", stand_in, name(), *words[program:]]


class _Server:
    """The process that forks for this one, which starts it for the first fork."""

    def __init__(self) -> None:
        self._control: socket.socket | None = None
        self._lock = threading.Lock()

    def fork(self, request: dict[str, Any], descriptors: Sequence[int]) -> int:
        """Return the process number of a new child of this process."""
        prctl = ctypes.CDLL(None).prctl
        with self._lock:
            control = self._begun()
            prctl(_PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(control, [json.dumps(request).encode()], [*descriptors])
                pid = int(control.recv(64))
                control.recv(64)  # its parent has ended
            finally:
                prctl(_PR_SET_CHILD_SUBREAPER, 0)
        return pid

    def name(self) -> str:
        """Return where the process listens for the stand-ins of MPI's ranks."""
        with self._lock:
            self._begun()
        return self._name

    def _begun(self) -> socket.socket:
        if self._control is None:
            self._name = f"hocket-ranks-{os.getpid()}"
            self._control = self._begin()
        return self._control

    def _begin(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as ranks:
            ranks.bind(f"\0{self._name}")
            ranks.listen(64)
            passed = [theirs.fileno(), ranks.fileno()]
            process = subprocess.Popen(
                [sys.executable, "-u", _SERVER, *map(str, passed), self._name],
                env={**_AT_START, "OMP_NUM_THREADS": "1", "ROOM": " " * _ROOM},
                stdin=subprocess.DEVNULL,
                pass_fds=passed,
            )
        process.returncode = 0  # nobody waits for it: it ends with this process
        atexit.register(ours.close)
        return ours


_server = _Server()


def asked_of(
    args: Any, executable: Any, rest: Sequence[Any]
) -> tuple[dict[str, Any], list[int], Sequence[int]] | None:
    """Return what a fork is asked to become, its descriptors and the pipes to close; None where none can be it.

    Args:
        args: the command, as `Popen._execute_child` gets it.
        executable: the same.
        rest: what else it gets, after `preexec_fn`.
    """
    close_fds, passed, cwd, env, _, _, shell, *streams = rest[:13]
    _, gid, gids, uid, umask, session, group = rest[13:]
    environment = {**(os.environ if env is None else env)}
    given = enumerate((streams[0], streams[3], streams[5]))
    standard = [number if own == -1 else own for number, own in given]
    plain = close_fds and not shell and gid is gids is uid is None and umask == -1
    if not plain or any(map(os.isatty, standard)) or not _can_fork(args, executable, environment):
        return None
    request = {
        "args": [os.fspath(word) for word in args],
        "cwd": os.path.abspath(cwd or "."),
        "environment": environment,
        "passed": [*passed],
        "session": session,
        "group": group,
        "ignored": [int(number) for number in INHERITED if signal.getsignal(number) is signal.SIG_IGN],
    }
    return request, [*standard, *passed], streams


@contextlib.contextmanager
def forks_in_place_of_starts() -> Iterator[None]:
    """Have this process's `subprocess` fork Pythons from one that has imported torch, within the context."""

    def execute_child(self: Any, args: Any, executable: Any, preexec_fn: Any, *rest: Any) -> None:
        asked = None if preexec_fn else asked_of(args, executable, rest)
        if asked is None:
            words = with_stand_ins(args, executable, rest[3], _server.name)
            start(self, words, executable, preexec_fn, *rest)
            return
        request, descriptors, streams = asked
        self.pid = _server.fork(request, descriptors)
        self._child_created = True
        self._close_pipe_fds(*streams)

    with _as_child_starter(execute_child):
        yield


def started_afresh() -> contextlib.AbstractContextManager[None]:
    """Have `subprocess` start each Python as it does otherwise, within the context."""
    return _as_child_starter(start)


@contextlib.contextmanager
def _as_child_starter(method: Callable[..., None]) -> Iterator[None]:
    before = subprocess.Popen._execute_child  # type: ignore[attr-defined]
    subprocess.Popen._execute_child = method  # type: ignore[attr-defined]
    try:
        yield
    finally:
        subprocess.Popen._execute_child = before  # type: ignore[attr-defined]
