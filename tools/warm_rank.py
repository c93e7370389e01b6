"""A stand-in for one of MPI's ranks: mpiexec starts it, and a Python that has imported torch forks the rank.

`python -IS warm_rank.py NAME COMMAND...` asks the process that listens there, `warm_server.py`, for a fork that carries
the command out. It passes signals on, and ends as the fork ends. Where nobody listens, it becomes the command.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import sys
from types import FrameType

#: Signals that mpiexec, or whoever knows the rank's process group, sends.
_PASSED_ON = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def stand_in(name: str, command: list[str]) -> int:
    """Have a rank forked by the process that listens at a name, and wait for its end.

    Returns:
        The status that the kernel has given on its end, as of `os.wait`.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(f"\0{name}")
    except OSError:  # another network namespace
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
        os.execv(command[0], command)
    request = {
        "args": command,
        "cwd": os.getcwd(),
        "environment": {**os.environ},
        "passed": [],
        "session": False,
        "group": 0,
        "ignored": [int(each) for each in _PASSED_ON if signal.getsignal(each) is signal.SIG_IGN],
        "files": resource.getrlimit(resource.RLIMIT_NOFILE),
    }
    socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
    os.closerange(0, 3)  # the rank's alone, for mpiexec to see their end
    rank = int(connection.recv(64))

    def pass_on(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank, number)

    for each in _PASSED_ON:
        signal.signal(each, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    return int(connection.recv(64) or signal.SIGKILL)


if __name__ == "__main__":
    _code = os.waitstatus_to_exitcode(stand_in(sys.argv[1], sys.argv[2:]))
    if _code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -_code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-_code, signal.SIG_DFL)
        os.kill(os.getpid(), -_code)
    os._exit(_code)
