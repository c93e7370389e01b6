"""Ranks over transport `torch` without an mpiexec: child processes of this host, and of others by ssh."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO, ClassVar

from hocket.launch.forking import FORKS_VARIABLE, ForkedRank, fork_ranks
from hocket.launch.hosts import Host, are_here
from hocket.launch.job_output import Report
from hocket.launch.rank_process import end_with_parent, forwarded

_HOST = "127.0.0.1"
# The variable of the command that reaches other hosts.
_SSH = "HOCKET_SSH"
# The ports of which one is taken where the first host is another one, as no free one can be asked for there.
_PORTS = range(61440, 65536)
# The exit status of an ssh that does not reach its host.
_NOT_REACHED = 255
# Shells say 128 + n of a process that signal n has killed.
_KILLED = 128
# As much as Linux gives a user's pipe.
_PIPE_BYTES = 1 << 20
# Seconds that a rank may take to end by itself after SIGTERM.
_ENDING_TIMEOUT_S = 3.0


@dataclass(frozen=True)
class OwnRanks:
    """A starter of ranks with the variables that torchrun sets, on this host or by ssh.

    Attributes:
        hosts: the hosts of the ranks, with their numbers; none for this host.
    """

    transport: ClassVar[str] = "torch"

    hosts: Sequence[Host] = ()

    def start(
        self,
        ranks: int,
        program: Sequence[str],
        variables: Mapping[str, str],
        report: Report,
        ready: Callable[[], None] | None = None,
    ) -> RankProcesses:
        """Start `ranks` ranks of `program`, with these environment variables.

        Args:
            ranks: number of ranks.
            program: the command of one rank.
            variables: all except those that differ between ranks.
            report: takes the ranks' ends.
            ready: called before a rank begins; None for programs that do not fork ranks (`in_each_rank`).
        """
        return RankProcesses(self.hosts or (Host("", ranks),), program, variables, report, ready)


def ssh() -> list[str]:
    """Return the command that reaches other hosts: `ssh`, or the one that HOCKET_SSH says."""
    return shlex.split(os.environ.get(_SSH, "ssh"))


class RankProcesses:
    """The processes of one job, with the interface of one process.

    Attributes:
        stdout: None: the ranks write to this process's own.
        stderr: the ranks' error output.
        returncode: of the first that failed, as in `subprocess`, 0 if none has; None while one runs.
    """

    stdout: None = None

    def __init__(
        self,
        hosts: Sequence[Host],
        program: Sequence[str],
        variables: Mapping[str, str],
        report: Report,
        ready: Callable[[], None] | None = None,
    ) -> None:
        self.returncode: int | None = None
        self._report = report
        self._failed = 0
        self._kill_s: float | None = None
        self._hosts = [host for host in hosts for _ in range(host.ranks)]
        self._processes: list[subprocess.Popen[bytes] | ForkedRank] = []
        reading, writing = os.pipe()
        # It is read once ranks have begun: what is said while modules are imported must fit.
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self.stderr: IO[bytes] = os.fdopen(reading, "rb", buffering=0)
        try:
            if ready is not None and are_here(hosts):
                self._fork(hosts, program, variables, writing, ready)
            else:
                if ready is not None:
                    ready()
                for host, own in zip(self._hosts, _own_variables(hosts), strict=True):
                    self._processes.append(_begin(host, program, variables, own, writing))
        except BaseException:
            self.kill()
            for process in self._processes:
                process.wait()
                _close(process)
            self.stderr.close()
            raise
        finally:
            os.close(writing)
        # By the descriptor that tells of its end; its number may be another process's by then.
        self._left = {os.pidfd_open(process.pid): rank for rank, process in enumerate(self._processes)}

    def _fork(
        self,
        hosts: Sequence[Host],
        program: Sequence[str],
        variables: Mapping[str, str],
        errors: int,
        ready: Callable[[], None],
    ) -> None:
        """Start a process that imports what the ranks need, and have it fork them; arguments as of `_begin`."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                own = {FORKS_VARIABLE: str(theirs.fileno())}
                process = _begin(hosts[0], program, variables, own, errors, [theirs.fileno()])
            self._processes = [process]
            ready()
            # One that has ended before, and has said why, stands for rank 0.
            self._processes = [*fork_ranks(process, ours, _own_variables(hosts))] or [process]

    def wait(self, timeout_s: float) -> None:
        """Wait until all have ended.

        Raises:
            subprocess.TimeoutExpired: some still run.
        """
        end_s = time.monotonic() + timeout_s
        while self._left:
            now_s = time.monotonic()
            if self._kill_s is not None and now_s >= self._kill_s:
                self.kill()
            elif now_s >= end_s:
                raise subprocess.TimeoutExpired("ranks", timeout_s)
            self._sleep(min(end_s, self._kill_s or end_s) - now_s)
            for descriptor, rank in list(self._left.items()):
                status = self._processes[rank].poll()
                if status is not None:
                    del self._left[descriptor]
                    os.close(descriptor)
                    _close(self._processes[rank])
                    self._note_end(rank, status)
        self.returncode = self._failed

    def terminate(self) -> None:
        """Ask all to end, and kill those that do not, also stopped ones and those that ignore signals."""
        if self._kill_s is None:
            self._kill_s = time.monotonic() + _ENDING_TIMEOUT_S
        for number in (signal.SIGTERM, signal.SIGCONT):
            self._send(number)

    def kill(self) -> None:
        """Kill all."""
        self._kill_s = time.monotonic() + _ENDING_TIMEOUT_S
        self._send(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """Send all a signal."""
        self._send(number)

    def _send(self, number: int) -> None:
        for process in self._processes:
            with contextlib.suppress(OSError, ValueError):  # it has ended
                if process.stdin is None:
                    process.send_signal(number)
                    continue
                process.stdin.write(b"%d\n" % number)
                process.stdin.flush()
                if number == signal.SIGKILL:
                    process.send_signal(number)  # the rank ends where its connection does

    def _sleep(self, longest_s: float) -> None:
        """Sleep until one has ended, at most `longest_s` seconds."""
        poll = select.poll()
        for descriptor in self._left:
            poll.register(descriptor, select.POLLIN)
        poll.poll(max(0.0, 1e3 * longest_s))

    def _note_end(self, rank: int, status: int) -> None:
        """Report how a rank has ended, unless this process has ended it."""
        self._failed = self._failed or status
        host = self._hosts[rank]
        if self._kill_s is not None or status == 0:
            return
        if not are_here([host]) and status == _NOT_REACHED:
            self.terminate()  # ssh has said why
            return
        if not are_here([host]) and status > _KILLED:
            self._report.rank_was_killed(rank, host.name, status - _KILLED)
        elif status < 0:
            self._report.rank_was_killed(rank, socket.gethostname(), -status)
        else:
            self._report.rank_left(rank, status)


def _own_variables(hosts: Sequence[Host]) -> list[dict[str, str]]:
    """Return each rank's own variables."""
    places = [(host, local) for host in hosts for local in range(host.ranks)]
    common = {"WORLD_SIZE": str(len(places)), **_meeting(hosts)}
    return [
        {**common, "RANK": str(rank), "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(host.ranks)}
        for rank, (host, local) in enumerate(places)
    ]


def _meeting(hosts: Sequence[Host]) -> dict[str, str]:
    """Return the variables that name the place where ranks meet, on the first host."""
    first = hosts[0]
    if are_here(hosts):
        return {"MASTER_ADDR": _HOST, "MASTER_PORT": str(_free_port())}
    if not are_here([first]):
        return {"MASTER_ADDR": first.name, "MASTER_PORT": str(random.SystemRandom().choice(_PORTS))}
    return {"MASTER_ADDR": socket.gethostname(), "MASTER_PORT": str(_free_port())}


def _begin(
    host: Host,
    program: Sequence[str],
    variables: Mapping[str, str],
    own: Mapping[str, str],
    errors: int,
    descriptors: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a rank's process, or the ssh that starts it.

    Args:
        host: the rank's host.
        program: its command.
        variables: those of all ranks.
        own: its own ones.
        errors: the descriptor for its error output.
        descriptors: further ones that it gets.
    """
    here = are_here([host])
    command = program if here else _far_command(host, program, {**forwarded(variables), **own})
    # In a process group of its own: a terminal's Ctrl-C goes to who has started the job, and is passed on once.
    return subprocess.Popen(
        command,
        env={**variables, **own} if here else {**variables},
        stdin=subprocess.DEVNULL if here else subprocess.PIPE,
        stderr=errors,
        process_group=0,
        pass_fds=descriptors,
        preexec_fn=partial(end_with_parent, signal.SIGKILL),  # noqa: PLW1509 (it takes no lock)
    )


def _close(process: subprocess.Popen[bytes] | ForkedRank) -> None:
    """Close the way to a process that has ended."""
    if process.stdin is not None:
        with contextlib.suppress(OSError):  # what it has not read is for nobody
            process.stdin.close()


def _far_command(host: Host, program: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """Return the command that starts a rank on another host, with the same Python in the same folder."""
    assignments = [f"{name}={value}" for name, value in variables.items()]
    far = ["env", *assignments, sys.executable, "-m", "hocket.launch.far_rank", os.getcwd(), *program]
    return [*ssh(), "-o", "BatchMode=yes", host.name.strip("[]"), shlex.join(far)]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind((_HOST, 0))
        port: int = listener.getsockname()[1]
        return port
