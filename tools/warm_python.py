"""A Python of tests that has imported torch and Hocket: what they start by `python` are its forks.

`import torch` takes two seconds of a core, and CI's tests start several hundred processes. `forks_in_place_of_starts`
has `subprocess` fork them where that makes no difference: a script, `-c`, or a module of Hocket's or torchrun, in an
environment with the same settings of Python. A fork's own starts are its forks in turn, as long as it has one thread.
"""

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
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

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
#: Of the environment, what Python and libraries read as they are started or imported, but for what a fork sets itself.
_READ_ONCE = ("PYTHON", "NUMBA", "TORCH_", "MKL", "OPENBLAS", "LC_", "LANG", "LD_")
_SET_HERE = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONFAULTHANDLER", "TORCH_CPP_LOG_LEVEL")
#: Modules that are commands of Hocket's.
_COMMANDS = ("hocket", "hocket.cli.ranking")
#: Signals that a process inherits as ignored.
_INHERITED = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1)
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 1e-3
#: Bytes that a fork's environment may take, for others to see.
_ROOM = 100_000
#: Descriptors that nobody passes on begin here.
_HIGH = 1000

#: What this process, and the one that forks, have begun with.
_AT_START = {**os.environ}
_start = subprocess.Popen._execute_child  # type: ignore[attr-defined]


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


class _Server:
    """The process that forks for this one, which starts it for the first fork."""

    def __init__(self) -> None:
        self._control: socket.socket | None = None
        self._lock = threading.Lock()

    def fork(self, request: dict[str, Any], descriptors: Sequence[int]) -> int:
        """Return the process number of a new child of this process."""
        prctl = ctypes.CDLL(None).prctl
        with self._lock:
            if self._control is None:
                self._control = self._begin()
            prctl(_PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self._control, [json.dumps(request).encode()], [*descriptors])
                pid = int(self._control.recv(64))
                self._control.recv(64)  # its parent has ended
            finally:
                prctl(_PR_SET_CHILD_SUBREAPER, 0)
        return pid

    def _begin(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-u", __file__, str(theirs.fileno())],
                env={**_AT_START, "OMP_NUM_THREADS": "1", "ROOM": " " * _ROOM},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        process.returncode = 0  # nobody waits for it: it ends with this process
        atexit.register(ours.close)
        return ours


_server = _Server()


def _asked(
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
        "ignored": [int(number) for number in _INHERITED if signal.getsignal(number) is signal.SIG_IGN],
    }
    return request, [*standard, *passed], streams


@contextlib.contextmanager
def forks_in_place_of_starts() -> Iterator[None]:
    """Have this process's `subprocess` fork Pythons from one that has imported torch, within the context."""

    def execute_child(self: Any, args: Any, executable: Any, preexec_fn: Any, *rest: Any) -> None:
        asked = None if preexec_fn else _asked(args, executable, rest)
        if asked is None:
            _start(self, args, executable, preexec_fn, *rest)
            return
        request, descriptors, streams = asked
        self.pid = _server.fork(request, descriptors)
        self._child_created = True
        self._close_pipe_fds(*streams)

    with _as_child_starter(execute_child):
        yield


def started_afresh() -> contextlib.AbstractContextManager[None]:
    """Have `subprocess` start each Python as it does otherwise, within the context."""
    return _as_child_starter(_start)


@contextlib.contextmanager
def _as_child_starter(method: Callable[..., None]) -> Iterator[None]:
    before = subprocess.Popen._execute_child  # type: ignore[attr-defined]
    subprocess.Popen._execute_child = method  # type: ignore[attr-defined]
    try:
        yield
    finally:
        subprocess.Popen._execute_child = before  # type: ignore[attr-defined]


def _serve(control: socket.socket) -> Callable[[], None]:
    """Fork what is asked for; return what to carry out, in each fork."""
    while True:
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
            control.close()
            while os.getppid() == between:
                time.sleep(_POLL_S)
            return _become(json.loads(message), descriptors)
        os.waitpid(between, 0)
        control.send(b"ended")
        for descriptor in descriptors:
            os.close(descriptor)


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
    for number in _INHERITED:
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
    asked = _asked(args, executable, rest) if len(os.listdir("/proc/self/task")) == 1 else None
    if asked is None:
        _start(self, args, executable, preexec_fn, *rest)
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
    sys.modules["warm_python"] = sys.modules["__main__"]
    gc.freeze()
    gc.enable()
    _program = _serve(socket.socket(fileno=int(sys.argv[1])))
    subprocess.Popen._execute_child = _fork_child  # type: ignore[attr-defined]
    os._exit(_carry_out(_program))
