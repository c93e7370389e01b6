"""Jobs that are expected to end badly: started, watched, and checked for what they leave behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

#: Nothing may take longer than this to end, in seconds, nor to begin where others use the machine.
LONGEST_S, BEGINNING_S = 60.0, 90.0


@dataclass
class Ended:
    """How a job ended: its exit status, and what it printed on standard error."""

    status: int
    errors: str


class Job:
    """A process that starts ranks, which leave their process numbers in a folder."""

    def __init__(self, command: Sequence[str], folder: Path, **options: object) -> None:
        self.folder = folder
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            **options,  # type: ignore[call-overload]
        )

    def pid_of(self, rank: int) -> int:
        """Return a rank's process number, once it has left it."""
        found: list[int] = []

        def look() -> bool:
            for file in self.folder.glob("[0-9]*"):
                if file.read_text() == str(rank):
                    found.append(int(file.name))
            return bool(found)

        self.wait_for(look)
        return found[0]

    def wait_for(self, condition: Callable[[], bool], longest_s: float = BEGINNING_S) -> None:
        """Wait until something is so, as long as the job runs."""
        deadline_s = time.monotonic() + longest_s
        while not condition():
            assert self._process.poll() is None, self._process.communicate()[1]
            assert time.monotonic() < deadline_s
            time.sleep(0.02)

    def signal(self, number: signal.Signals, *, group: bool = False) -> None:
        """Send a signal to the parent, or as a terminal does to its whole process group."""
        if group:
            os.killpg(self._process.pid, number)
        else:
            self._process.send_signal(number)

    def end(self) -> Ended:
        """Wait for the end, and for that of every rank.

        Raises:
            AssertionError: a rank is still there afterwards.
        """
        _, errors = self._process.communicate(timeout=LONGEST_S)
        pids = [int(file.name) for file in self.folder.glob("[0-9]*")]
        deadline_s = time.monotonic() + 5
        while left := [pid for pid in pids if _is_alive(pid)]:
            assert time.monotonic() < deadline_s, f"processes {left} are left"
            time.sleep(0.02)
        return Ended(self._process.returncode, errors)

    def close(self) -> None:
        """End what a failed test has left."""
        for pid in [self._process.pid, *(int(file.name) for file in self.folder.glob("[0-9]*"))]:
            if _is_alive(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ValueError):
            self._process.communicate()


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


#: Starts a job, with a command and Popen's options.
Start = Callable[..., Job]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts a job, and end the job at last."""
    jobs: list[Job] = []

    def begin(command: Sequence[str], **options: object) -> Job:
        jobs.append(Job(command, tmp_path / "pids", **options))
        return jobs[-1]

    (tmp_path / "pids").mkdir()
    yield begin
    for job in jobs:
        job.close()
