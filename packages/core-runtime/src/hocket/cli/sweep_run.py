"""One run of a sweep, in a folder and in processes of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from hocket.launch.rank_process import own_python, threads_per_rank
from hocket.own_files import claim, is_marked
from hocket.results import SUMMARY, SWEPT_CONFIG
from hocket.results.history import read_summary
from hocket.training.observer import text_of_metrics

#: The file of a run's output, in its folder.
OUTPUT = "output.txt"
#: The exit status of a script that refuses its arguments.
_USAGE = 2


@dataclass(eq=False)
class SweepRun(ABC):
    """One run of a sweep in its folder.

    Attributes:
        is_ended: True once the run was asked to save itself and end, or never to start.
        interrupted: the line that says what an interrupt does to runs of this kind.
    """

    interrupted: ClassVar[str]
    folder: Path
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    is_ended: bool = field(default=False, init=False)
    _starting: threading.Lock = field(default_factory=threading.Lock, init=False)

    @property
    @abstractmethod
    def goes_on(self) -> bool:
        """True if the run was begun and has left something to continue from."""

    @property
    @abstractmethod
    def ranks(self) -> int:
        """The number of its ranks."""

    @abstractmethod
    def check_folder(self) -> None:
        """Refuse a folder that holds another run.

        Raises:
            UserError: it holds a run of other settings, or of other code that would not begin anew; names them.
        """

    @abstractmethod
    def prepare(self) -> tuple[list[str], dict[str, str]]:
        """Write what the run needs into its folder, and return its command and its variables."""

    @property
    def has_ended(self) -> bool:
        """True if the run has ended and its results are complete."""
        return (self.folder / SUMMARY).exists()

    def carry_out(self, lock: int, jobs: int) -> int:
        """Carry out the run, or the rest of it, in processes of its own, and return the exit status."""
        with self._starting:
            if self.is_ended:
                return -signal.SIGTERM
            self._process = self._start(lock, jobs)
        return self._process.wait()

    def _start(self, lock: int, jobs: int) -> subprocess.Popen[bytes]:
        self.folder.mkdir(exist_ok=True)
        resumes = self.goes_on
        if not resumes or is_marked(self.folder):
            claim(self.folder, SWEPT_CONFIG, OUTPUT)
        command, variables = self.prepare()
        print(f"{self.folder.name}: {('continues' if resumes else 'begins')}", flush=True)
        threads = threads_per_rank(jobs * self.ranks)
        with (self.folder / OUTPUT).open("a" if resumes else "w") as output:
            return subprocess.Popen(
                [*own_python(), "-m", "hocket", *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={"OMP_NUM_THREADS": str(threads), **os.environ, **variables},
                pass_fds=(lock,),  # held as long as the run goes on, even if the sweep is killed
                start_new_session=True,  # Ctrl-C reaches the sweep alone, which asks its runs to save and end
            )

    def end(self) -> None:
        """Ask the run to save itself and end, or never to start."""
        with self._starting:
            self.is_ended = True
            if self._process is not None:
                self._process.terminate()

    def outcome(self, status: int) -> str:
        """Return the run's result, or its failure, in one line."""
        if status == 0 and self.has_ended:
            summary = read_summary(self.folder / SUMMARY)
            validated = text_of_metrics(summary)
            warned = "".join(f"; warning: {each}" for each in summary.get("warnings", ()))
            return f"{f'validation {validated} ' if validated else ''}after {summary['steps']} steps{warned}"
        output = self.folder / OUTPUT
        lines = output.read_text(errors="replace").splitlines() or [""]
        said = next((line for line in reversed(lines) if line.startswith("hocket: ")), lines[-1])
        # What argparse and click say of a key that the script does not know.
        usage = (line for line in lines if re.match(r"(\S+: e|E)rror: ", line))
        said = next(usage, said) if status == _USAGE else said
        return (
            f"failed with exit status {status}: {said.removeprefix('hocket: ')} ({os.path.relpath(output)})"
        )
