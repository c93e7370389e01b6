"""Start ranks with the mpiexec of the installed MPI, and say in one line why they ended."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from hocket.errors import UserError

__all__ = ["Mpiexec", "PID_FOLDER_VARIABLE", "find_mpiexec", "launch", "note_pid", "threads_per_rank"]

#: Names the folder in which ranks leave their process numbers, for launchers that report these only.
PID_FOLDER_VARIABLE = "HOCKET_PID_FOLDER"

_TERMINATION_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Mpiexec:
    """An mpiexec and whose it is.

    Attributes:
        path: the program.
        vendor: `openmpi` or `mpich`.
        version: its own first line.
    """

    path: str
    vendor: str
    version: str

    def command(self, ranks: int, program: Sequence[str]) -> list[str]:
        """Return the command that starts `ranks` ranks of `program` on this machine, also more than it has cores."""
        if self.vendor == "openmpi":
            # Ranks are not bound to cores: a rank's threads would all share its one.
            options = ["--oversubscribe", "--bind-to", "none"]
            if os.geteuid() == 0:
                options.append("--allow-run-as-root")
        else:
            options = ["-bind-to", "none"]
        return [self.path, *options, "-n", str(ranks), *program]


def find_mpiexec() -> Mpiexec:
    """Return the mpiexec beside this Python, or else the first on PATH.

    Raises:
        UserError: there is none, or it is neither Open MPI's nor MPICH's.
    """
    beside = Path(sys.executable).parent / "mpiexec"
    path = str(beside) if beside.exists() else shutil.which("mpiexec")
    if path is None:
        raise UserError(
            "no mpiexec found: pip install 'hocket-core[mpi]' brings one, or use --transport virtual, which needs none"
        )
    told = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    text = (told.stdout + told.stderr).strip()
    if "Open MPI" in text or "prterun" in text or "PRRTE" in text:
        return Mpiexec(path, "openmpi", text.splitlines()[0])
    if "HYDRA" in text:
        version = re.search(r"Version:\s*(\S+)", text)
        return Mpiexec(path, "mpich", f"MPICH {version.group(1) if version else ''}".strip())
    raise UserError(f"{path} is neither Open MPI's nor MPICH's: {text.splitlines()[0] if text else 'it says nothing'}")


def threads_per_rank(local_ranks: int) -> int:
    """Return how many compute threads each of a host's ranks may use: its share of the cores, at least 1."""
    return max(1, len(os.sched_getaffinity(0)) // local_ranks)


def note_pid(rank: int) -> None:
    """Leave this process's number where `launch` finds it."""
    folder = os.environ.get(PID_FOLDER_VARIABLE)
    if folder:
        (Path(folder) / str(os.getpid())).write_text(str(rank))


def launch(
    mpiexec: Mpiexec, ranks: int, program: Sequence[str], *, folder: Path, environment: Mapping[str, str] | None = None
) -> int:
    """Run `program` on `ranks` ranks and return the exit status.

    What the launcher prints about a rank that failed is replaced by one line that names the rank.

    Args:
        mpiexec: as `find_mpiexec` returns it.
        ranks: how many.
        program: the command of one rank.
        folder: an existing folder for the ranks' process numbers.
        environment: variables to add.
    """
    threads = str(threads_per_rank(ranks))
    variables = {
        **os.environ,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads),
        PID_FOLDER_VARIABLE: str(folder),
        **(environment or {}),
    }
    job = subprocess.Popen(
        mpiexec.command(ranks, program), env=variables, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert job.stderr is not None
    report = _Report(folder)
    reader = threading.Thread(target=report.read, args=(job.stderr,), daemon=True)
    reader.start()
    interrupted = _wait(job)
    reader.join(_TERMINATION_TIMEOUT_S)
    if interrupted is not None:
        print(f"hocket: {interrupted.name}: all ranks were ended", file=sys.stderr)
        return 128 + interrupted
    if report.cause:
        print(f"hocket: {report.cause}", file=sys.stderr)
    return job.returncode


def _wait(job: subprocess.Popen[bytes]) -> signal.Signals | None:
    """Wait for the job; end it on Ctrl-C or SIGTERM and return which it was."""
    received: list[signal.Signals] = []

    def end(number: int, frame: object) -> None:
        received.append(signal.Signals(number))
        job.terminate()

    previous = {s: signal.signal(s, end) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        while True:
            try:
                job.wait(_TERMINATION_TIMEOUT_S if received else 1.0)
                break
            except subprocess.TimeoutExpired:
                if received:
                    job.kill()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return received[0] if received else None


@dataclass
class _Report:
    """What the job prints on standard error, with the launchers' own paragraphs about failed ranks read and left out.

    Attributes:
        folder: the ranks' process numbers.
        cause: why the job ended, if a rank died without a word.
    """

    folder: Path
    cause: str = ""
    _block: list[str] = field(default_factory=list)
    _rule: str = ""
    _after_mpich: bool = False

    def read(self, stream: IO[bytes]) -> None:
        """Copy `stream` to standard error until it ends."""
        for raw in stream:
            line = raw.decode(errors="replace").strip("\0")
            if not self._absorbs(line):
                sys.stderr.write(line)
                sys.stderr.flush()

    def _absorbs(self, line: str) -> bool:
        """Take a line of a launcher's paragraph; return whether it was one."""
        bare = line.strip()
        if self._rule:
            self._block.append(line)
            if bare == self._rule:
                self._close_block()
            return True
        if len(bare) > 60 and set(bare) <= {"-"} or len(bare) > 60 and set(bare) <= {"="}:
            self._rule = bare
            self._block = [line]
            return True
        if self._after_mpich and bare.startswith(("YOUR APPLICATION", "This typically", "Please see")):
            return True
        return bool(re.match(r"Abort\(\d+\) on node \d+", bare)) or bool(
            re.match(r"\[proxy:|\[mpiexec@", bare) and self.cause
        )

    def _close_block(self) -> None:
        text = " ".join("".join(self._block).split())
        self._rule = ""
        killed = re.search(r"process rank (\d+) with PID \d+ on node (\S+) exited on signal (\d+)", text)
        mpich = re.search(r"PID (\d+) RUNNING AT (\S+) = EXIT CODE: (\d+)", text)
        if killed:
            self._blame(killed[1], killed[2], int(killed[3]))
        elif mpich:
            self._after_mpich = True
            if int(mpich[3]) in set(signal.Signals):
                rank = self.folder / mpich[1]
                self._blame(rank.read_text() if rank.exists() else f"(process {mpich[1]})", mpich[2], int(mpich[3]))
        elif "MPI_ABORT was invoked" not in text and 'calling "abort"' not in text:
            sys.stderr.write("".join(self._block))

    def _blame(self, rank: str, host: str, number: int) -> None:
        name = signal.Signals(number).name
        hint = " (out of memory? the kernel's log would tell)" if number == signal.SIGKILL else ""
        self.cause = self.cause or f"rank {rank} on {host} was killed by {name}{hint}; all ranks were ended"
