"""The process that forks the Pythons of tests: it has imported torch and Hocket. `warm_python.py` starts it."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import functools
import gc
import importlib
import json
import os
import random
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from warm_python import INHERITED, asked_of, start, with_stand_ins

#: What nearly every rank imports.
PRELOADED = (
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "numpy.ma",
    "numpy.random",
    "torch.distributed.run",
    "torch.profiler",
    "torch.utils.data",
    "hocket.api",
    "hocket.cli.launching",
    "hocket.cli.main",
    "hocket.cli.planned",
    "hocket.cli.ranking",
    "hocket.cli.running",
    "hocket.session.attach",
    "hocket.session.engine_session",
    "hocket.session.stepping_session",
    "hocket.testing.job",
    "hocket.transport.meeting",
    "hocket.transport.tcp",
    "hocket.transport.virtual",
)
#: Modules that are commands of Hocket's.
_COMMANDS = ("hocket", "hocket.cli.ranking")
_POLL_S = 1e-3
#: Descriptors that nobody passes on begin here.
_HIGH = 1000


class _Ranks:
    """MPI's ranks, which are forks of this process, and their stand-ins' connections.

    Args:
        listener: where stand-ins connect.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._waits: dict[int, tuple[int, socket.socket]] = {}  # by a descriptor of the rank's process
        self._asks: dict[int, int] = {}  # ranks by their stand-ins' descriptors

    def descriptors(self) -> list[int]:
        """Return what to poll."""
        return [self._listener.fileno(), *self._waits, *self._asks]

    def look(self, descriptor: int) -> Callable[[], None] | None:
        """Fork a rank, pass its end on, or end it with its stand-in; return what a fork is to carry out."""
        if descriptor == self._listener.fileno():
            return self._fork()
        if descriptor in self._waits:
            rank, connection = self._waits.pop(descriptor)
            os.close(descriptor)
            status = os.waitpid(rank, 0)[1]
            self._asks.pop(connection.fileno(), None)
            with contextlib.suppress(OSError), connection:
                connection.send(str(status).encode())
        elif descriptor in self._asks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._asks.pop(descriptor), signal.SIGKILL)
        return None

    def _fork(self) -> Callable[[], None] | None:
        connection, _ = self._listener.accept()
        message, descriptors, *_ = socket.recv_fds(connection, 1 << 20, 3)
        if not message:
            connection.close()
            return None
        rank = os.fork()
        if not rank:
            connection.detach()
            self.forget()
            request = json.loads(message)
            program = _become(request, descriptors)
            resource.setrlimit(resource.RLIMIT_NOFILE, tuple(request["files"]))
            return program
        with contextlib.suppress(OSError):
            os.setpgid(rank, rank)
        for each in descriptors:
            os.close(each)
        self._waits[os.pidfd_open(rank)] = rank, connection
        self._asks[connection.fileno()] = rank
        connection.send(str(rank).encode())
        return None

    def forget(self) -> None:
        """Give a fork's descriptors up, which `_become` closes."""
        self._listener.detach()
        for _, connection in self._waits.values():
            connection.detach()


def _serve(control: socket.socket, ranks: _Ranks) -> Callable[[], None]:
    """Fork what is asked for; return what to carry out, in each fork."""
    while True:
        poll = select.poll()
        for descriptor in (control.fileno(), *ranks.descriptors()):
            poll.register(descriptor, select.POLLIN)
        descriptor = poll.poll()[0][0]  # one at a time: another may have its number by then
        program = _fork(control, ranks) if descriptor == control.fileno() else ranks.look(descriptor)
        if program is not None:
            control.detach()
            return program


def _fork(control: socket.socket, ranks: _Ranks) -> Callable[[], None] | None:
    """Fork what the tests' process asks for; return what to carry out in the fork, None in this process."""
    message, descriptors, *_ = socket.recv_fds(control, 1 << 20, 250)
    if not message:
        os._exit(0)
    between = os.fork()
    if not between:
        between = os.getpid()
        pid = os.fork()
        if pid:
            control.send(str(pid).encode())
            os._exit(0)
        ranks.forget()
        while os.getppid() == between:
            time.sleep(_POLL_S)
        return _become(json.loads(message), descriptors)
    os.waitpid(between, 0)
    control.send(b"ended")
    for descriptor in descriptors:
        os.close(descriptor)
    return None


def _become(request: dict[str, Any], descriptors: Sequence[int]) -> Callable[[], None]:
    """Make a new fork what was asked for, with these descriptors and no others; return what to carry out."""
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _HIGH) for descriptor in descriptors]
    numbers = [0, 1, 2, *request["passed"]]
    for own, number in zip(high, numbers, strict=True):
        os.dup2(own, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in numbers:
            with contextlib.suppress(OSError):
                os.close(int(name))
    if request["session"]:
        os.setsid()
    elif request["group"] >= 0:
        os.setpgid(0, request["group"])
    for number in INHERITED:
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in request["ignored"] else default)
    os.chdir(request["cwd"])
    return _prepare(request["args"], request["environment"])


def _prepare(args: list[str], environment: Mapping[str, str]) -> Callable[[], None]:
    """Give this process a fresh one's environment, arguments and random numbers; return what to carry out."""
    os.environ.clear()
    os.environ.update(environment)
    _show(environment)
    sys.dont_write_bytecode = bool(environment.get("PYTHONDONTWRITEBYTECODE"))
    (faulthandler.enable if environment.get("PYTHONFAULTHANDLER") else faulthandler.disable)()
    sys.orig_argv = args
    words = args[1:]
    own_folder = words[0] != "-P"
    if not own_folder:
        words = words[1:]
    if words[0] != "-m" or not words[1] not in _COMMANDS:  # by which Hocket tells a script
        for name in [name for name in sys.modules if name.startswith("hocket.cli")]:
            del sys.modules[name]
    random.seed()
    sys.modules["numpy"].random.seed()
    threads = int(environment.get("OMP_NUM_THREADS") or 1)
    if threads > 1:  # which starts them
        sys.modules["torch"].set_num_threads(threads)
    importlib.invalidate_caches()
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    path = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = [*path, *_BARE_PATH]
    if words[0] == "-m":
        folder, sys.argv = os.getcwd(), [words[1], *words[2:]]

        def carry_out() -> None:
            runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
    elif words[0] == "-c":
        folder, sys.argv = "", ["-c", *words[2:]]

        def carry_out() -> None:
            exec(compile(words[1], "<string>", "exec"), main.__dict__)
    else:
        folder, sys.argv = str(Path(words[0]).resolve().parent), words
        main.__file__ = words[0]

        def carry_out() -> None:
            exec(compile(Path(words[0]).read_bytes(), words[0], "exec"), main.__dict__)

    if own_folder:
        sys.path.insert(0, folder)
    return carry_out


def _forget_results() -> None:
    """Clear what Hocket's functions remember of the parent, such as who has launched it."""
    for name, module in list(sys.modules.items()):
        if name.startswith("hocket"):
            for value in vars(module).values():
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()


def _show(environment: Mapping[str, str]) -> None:
    """Write this process's environment where others see it: a launcher looks for its ranks there."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    text = b"".join(os.fsencode(f"{name}={value}\0") for name, value in environment.items())
    assert len(text) <= end - start, "the environment is too large"
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, len(text))


def _fork_child(self: Any, args: Any, executable: Any, preexec_fn: Any, *rest: Any) -> None:
    """Start a fork's own child as its fork, in place of `subprocess.Popen`'s method."""
    asked = asked_of(args, executable, rest) if len(os.listdir("/proc/self/task")) == 1 else None
    if asked is None:
        start(self, with_stand_ins(args, executable, rest[3], lambda: _name), executable, preexec_fn, *rest)
        return
    request, descriptors, streams = asked
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    self.pid = os.fork()
    if self.pid:
        self._child_created = True
        self._close_pipe_fds(*streams)
        return
    status = 1
    try:
        gc.freeze()  # else what the parent has opened would be closed once more, whatever has its number by then
        vars(weakref.finalize)["_registry"].clear()  # its parent's temporary folders
        _forget_results()
        program = _become(request, descriptors)
        if preexec_fn is not None:
            preexec_fn()
        status = _carry_out(program)
    finally:
        os._exit(status)


def _carry_out(program: Callable[[], None]) -> int:
    """Carry a program out to its end as Python does; return the exit status."""
    try:
        status = _status_of(program)
        threading._shutdown()  # type: ignore[attr-defined]
    finally:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status & 0xFF


def _status_of(program: Callable[[], None]) -> int:
    """Run a program; return its exit status, negative for a signal that it is to end by."""
    try:
        program()
    except SystemExit as end:
        return _code_of(end)
    except BaseException as error:
        try:
            sys.excepthook(*sys.exc_info())
        except SystemExit as end:  # Hocket's, where a rank says why
            return _code_of(end)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _code_of(end: SystemExit) -> int:
    if isinstance(end.code, int) or end.code is None:
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1


if __name__ == "__main__":
    gc.disable()
    from hocket.training.startup import defer_dynamo

    defer_dynamo()
    for name in PRELOADED:
        with contextlib.suppress(ModuleNotFoundError):  # not everything is installed everywhere
            importlib.import_module(name)
    for name in ("torch.distributed.run", "hocket.cli.ranking", "hocket.testing.job"):
        del sys.modules[name]  # each becomes a process's main module
    _BARE_PATH = [
        entry for entry in sys.path[1:] if entry not in os.environ.get("PYTHONPATH", "").split(os.pathsep)
    ]
    sys.modules["warm_server"] = sys.modules["__main__"]
    gc.freeze()
    gc.enable()
    _name = sys.argv[3]
    _control, _listener = (socket.socket(fileno=int(word)) for word in sys.argv[1:3])
    _program = _serve(_control, _Ranks(_listener))
    subprocess.Popen._execute_child = _fork_child  # type: ignore[attr-defined]
    os._exit(_carry_out(_program))
