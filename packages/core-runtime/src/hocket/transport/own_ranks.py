"""Ranks of this host as child processes over transport `torch`, without an mpiexec."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import IO

from hocket.transport.hosts import Host
from hocket.transport.job_output import Report
from hocket.transport.rank_process import end_with_parent

__all__ = ["OwnRanks", "RankProcesses"]

_HOST = "127.0.0.1"
# Seconds that a rank may take to end by itself after SIGTERM.
_ENDING_TIMEOUT_S = 3.0


class OwnRanks:
    """A starter of ranks with the variables that torchrun sets."""

    transport = "torch"
    hosts: Sequence[Host] = ()

    def start(
        self, ranks: int, program: Sequence[str], variables: Mapping[str, str], report: Report
    ) -> RankProcesses:
        """Start `ranks` ranks of `program`, with these environment variables.

        Args:
            ranks: number of ranks.
            program: the command of one rank.
            variables: all except those that differ between ranks.
            report: takes the ranks' ends.
        """
        return RankProcesses(ranks, program, variables, report)


class RankProcesses:
    """The processes of one job, with the interface of one process.

    Attributes:
        stdout: None: the ranks write to this process's own.
        stderr: the ranks' error output.
        returncode: of the first that failed, as in `subprocess`, 0 if none has; None while one runs.
    """

    stdout: None = None

    def __init__(
        self, ranks: int, program: Sequence[str], variables: Mapping[str, str], report: Report
    ) -> None:
        self.returncode: int | None = None
        self._report = report
        self._failed = 0
        self._kill_s: float | None = None
        common = {**variables, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        common |= {"MASTER_ADDR": _HOST, "MASTER_PORT": str(_free_port())}
        self._processes: list[subprocess.Popen[bytes]] = []
        reading, writing = os.pipe()
        self.stderr: IO[bytes] = os.fdopen(reading, "rb", buffering=0)
        try:
            for rank in range(ranks):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                self._processes.append(_begin(program, {**common, **own}, writing))
        except BaseException:
            self.kill()
            for process in self._processes:
                process.wait()
            self.stderr.close()
            raise
        finally:
            os.close(writing)
        # By the descriptor that tells of its end; its number may be another process's by then.
        self._left = {os.pidfd_open(process.pid): rank for rank, process in enumerate(self._processes)}

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
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    def _sleep(self, longest_s: float) -> None:
        """Sleep until one has ended, at most `longest_s` seconds."""
        poll = select.poll()
        for descriptor in self._left:
            poll.register(descriptor, select.POLLIN)
        poll.poll(max(0.0, 1e3 * longest_s))

    def _note_end(self, rank: int, status: int) -> None:
        """Report how a rank has ended, unless this process has ended it."""
        self._failed = self._failed or status
        if self._kill_s is not None or status == 0:
            return
        if status < 0:
            self._report.rank_was_killed(rank, socket.gethostname(), -status)
        else:
            self._report.rank_left(rank, status)


def _begin(program: Sequence[str], variables: Mapping[str, str], errors: int) -> subprocess.Popen[bytes]:
    # In a process group of its own: a terminal's Ctrl-C goes to who has started the job, and is passed on once.
    return subprocess.Popen(
        program,
        env=variables,
        stdin=subprocess.DEVNULL,
        stderr=errors,
        process_group=0,
        preexec_fn=partial(end_with_parent, signal.SIGKILL),  # noqa: PLW1509 (it takes no lock)
    )


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind((_HOST, 0))
        port: int = listener.getsockname()[1]
        return port
