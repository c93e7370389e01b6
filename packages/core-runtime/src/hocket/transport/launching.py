"""Start ranks with the mpiexec of the installed MPI, and say in one line why they ended."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from hocket.errors import UserError
from hocket.transport.job_output import JobOutput, Report

__all__ = [
    "Mpiexec",
    "PID_FOLDER_VARIABLE",
    "find_mpiexec",
    "launch",
    "note_ending",
    "note_leaving",
    "note_pid",
    "threads_per_rank",
]

#: Names the folder in which ranks leave their process numbers, for launchers that report these only.
PID_FOLDER_VARIABLE = "HOCKET_PID_FOLDER"

# Seconds that the launcher may take to end a job. Open MPI's has been seen to wait for a lock that nobody holds
# (5.0.11, in MPI_Abort, once in thousands of jobs).
_TERMINATION_TIMEOUT_S = 15.0
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGHUP)
#: Those by which schedulers announce that they take the machine; ranks may save first.
_ASKING_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# Ranks give up after 25 s by themselves, and Kubernetes kills after 30.
_SAVING_TIMEOUT_S = 27.0
_PR_SET_PDEATHSIG = 1
_FIRST_WITH_ULFM = 5
# A user's own choice of where Open MPI's files go: it takes no second one.
_EVERYBODYS_FOLDER = "PRTE_MCA_prte_tmpdir_base"
_LAUNCHERS = "launcher"
_ENDING = "ending"
_LEFT = "left-"
# Seconds that ranks may take to end by themselves after one has died: they are told at once, and then agree on who says
# so. Open MPI's launcher has been seen to wait for ever (5.0.11, once in hundreds of jobs killed).
_OUTLIVING_TIMEOUT_S = 20.0
# Seconds that a rank may take to end by itself after SIGTERM.
_STRAGGLING_TIMEOUT_S = 3.0
_STRAGGLING_POLL_S = 0.1


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

    @property
    def tells_of_deaths(self) -> bool:
        """Whether it can leave the other ranks alive when one has died, and have them told: Open MPI 5's ULFM."""
        version = re.search(r"(\d+)\.\d+", self.version)
        return self.vendor == "openmpi" and version is not None and int(version[1]) >= _FIRST_WITH_ULFM

    def command(
        self, ranks: int, program: Sequence[str], *, folder: Path | None = None, outliving: bool = False
    ) -> list[str]:
        """Return the command that starts `ranks` ranks of `program` here, also more than there are cores.

        Args:
            ranks: how many.
            program: the command of one rank.
            folder: for the launcher's own files, where it has any; its default is the system's temporary folder.
                Open MPI's names them by its process number alone, leaves them there when it is killed, and does not
                start where it finds some ("listener thread failed to start"): numbers come again.
            outliving: when a rank has died leave the others alive, if it can have them told. It then says more
                than a reader wants, in lines that `JobOutput` keeps.
        """
        if self.vendor == "openmpi":
            # Ranks are not bound to cores: a rank's threads would all share its one.
            options = ["--oversubscribe", "--bind-to", "none"]
            if os.geteuid() == 0:
                options.append("--allow-run-as-root")
            if folder is not None and _EVERYBODYS_FOLDER not in os.environ:
                options += ["--prtemca", "prte_local_tmpdir_base", str(folder)]
            if outliving and self.tells_of_deaths:
                # Silent about what a rank died of, unless asked.
                options += ["--with-ft", "ulfm", "--prtemca", "odls_base_verbose", "5"]
                options += ["--prtemca", "errmgr_base_verbose", "5"]
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
            "no mpiexec found: pip install 'hocket-core[mpi]' brings one, or use --transport virtual, "
            "which needs none"
        )
    told = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    text = (told.stdout + told.stderr).strip()
    if "Open MPI" in text or "prterun" in text or "PRRTE" in text:
        return Mpiexec(path, "openmpi", text.splitlines()[0])
    if "HYDRA" in text:
        version = re.search(r"Version:\s*(\S+)", text)
        return Mpiexec(path, "mpich", f"MPICH {version.group(1) if version else ''}".strip())
    raise UserError(
        f"{path} is neither Open MPI's nor MPICH's: {text.splitlines()[0] if text else 'it says nothing'}"
    )


# glibc gives freed memory back to the system as soon as 40 MB lie together, and a step frees all gradients: 100 MB of
# them cost 25 to 60 ms of page faults in the next step, or none, as it happens. So ranks keep what they free, and what
# is new comes in pages of 2 MB where the system has them: a heap that others cut up still grows for dozens of steps.
# Other C libraries ignore these. The mapping threshold is the largest that glibc takes; setting either of the first two
# ends its own guesses.
_ALLOCATOR = {
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


def threads_per_rank(local_ranks: int) -> int:
    """Return how many compute threads each of a host's ranks may use: its share of the cores, at least 1."""
    return max(1, len(os.sched_getaffinity(0)) // local_ranks)


def note_pid(rank: int) -> None:
    """Leave this process's number where `launch` finds it."""
    folder = os.environ.get(PID_FOLDER_VARIABLE)
    if folder:
        (Path(folder) / str(os.getpid())).write_text(str(rank))


def note_leaving() -> None:
    """Leave word for `launch` that this process has come to its end as the other ranks have."""
    folder = os.environ.get(PID_FOLDER_VARIABLE)
    if folder:
        with contextlib.suppress(OSError):
            (Path(folder) / f"{_LEFT}{os.getpid()}").touch()


def note_ending(code: int) -> None:
    """Leave word for `launch` that this process is about to have the launcher end the job, with this exit status."""
    folder = os.environ.get(PID_FOLDER_VARIABLE)
    if folder:
        # The first one's counts. On another host the folder may not be there.
        with contextlib.suppress(OSError), open(Path(folder) / _ENDING, "x") as file:
            file.write(str(code))


def launch(
    mpiexec: Mpiexec,
    ranks: int,
    program: Sequence[str],
    *,
    folder: Path,
    environment: Mapping[str, str] | None = None,
) -> int:
    """Run `program` on `ranks` ranks and return the exit status.

    What the launcher prints about a rank that failed is replaced by one line that names the rank. Ranks share the
    cores (OMP_NUM_THREADS), keep memory that they free for their next step, and ask for large pages, unless the
    environment says otherwise.

    Args:
        mpiexec: as `find_mpiexec` returns it.
        ranks: how many.
        program: the command of one rank.
        folder: an existing folder for the ranks' process numbers and the launcher's own files.
        environment: variables to add.
    """
    variables = {
        **_ALLOCATOR,
        "OMP_NUM_THREADS": str(threads_per_rank(ranks)),
        **os.environ,  # what the user has set counts
        PID_FOLDER_VARIABLE: str(folder),
        **(environment or {}),
    }
    # In a process group of its own: a terminal's Ctrl-C comes here, and is passed on once.
    job = subprocess.Popen(
        mpiexec.command(ranks, program, folder=folder / _LAUNCHERS, outliving=True),
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        process_group=0,
        preexec_fn=_end_with_parent,  # noqa: PLW1509 (it takes no lock, and no thread of ours runs yet)
    )
    ended_by = _JobEnd(job)
    report = Report(folder, ranks, end=ended_by.terminate)
    readers = [
        threading.Thread(target=JobOutput(report, rule, _writer(ours)).copy, args=(theirs,), daemon=True)
        for theirs, rule, ours in ((job.stdout, "=", sys.stdout), (job.stderr, "-", sys.stderr))
    ]
    for reader in readers:
        reader.start()
    interrupted = _wait(ended_by, report)
    if job.returncode != 0 or report.status != 0:
        _end_stragglers(folder)
    for reader in readers:
        reader.join(_TERMINATION_TIMEOUT_S)
    if interrupted in _ASKING_SIGNALS and report.saved:
        return 128 + signal.SIGTERM
    came_to_its_end = not ended_by.terminated and job.returncode == 0 and not report.message
    if interrupted is not None and not came_to_its_end:
        print(f"hocket: {interrupted.name}: all ranks were ended", file=sys.stderr)
        return 128 + interrupted
    status = report.status or _told_status(folder / _ENDING) or _as_shells_say(job.returncode)
    if report.message:
        print(f"hocket: {report.message}", file=sys.stderr)
    elif status != 0 and not report.told:
        print(f"hocket: the ranks ended with exit code {status}, without a word", file=sys.stderr)
    return status


def _end_with_parent() -> None:
    """Have the launcher, and so its ranks, ended when this process is killed; Linux only."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _writer(stream: TextIO) -> Callable[[str], None]:
    def write(text: str) -> None:
        stream.write(text)
        stream.flush()

    return write


def _told_status(ending: Path) -> int:
    """Return the exit status with which a rank has ended the job, 0 if none has."""
    try:
        return int(ending.read_text())
    except (OSError, ValueError):
        return 0


def _as_shells_say(status: int) -> int:
    """Return a process's exit status, where `subprocess` gives the negative number of the signal that killed it."""
    return status if status >= 0 else 128 - status


class _JobEnd:
    """Ends a job through its launcher, and the launcher where it does not end.

    Args:
        launcher: the process that started the ranks.
    """

    def __init__(self, launcher: subprocess.Popen[bytes]) -> None:
        self.launcher = launcher
        self._terminate_s = self._kill_s = math.inf

    @property
    def terminated(self) -> bool:
        return self._kill_s < math.inf

    def terminate(self) -> None:
        """Have the launcher end all ranks, now."""
        self._kill_s = min(self._kill_s, time.monotonic() + _TERMINATION_TIMEOUT_S)
        self.launcher.terminate()

    def terminate_after(self, seconds: float) -> None:
        """Leave the ranks so long to end by themselves, from the first call on."""
        self._terminate_s = min(self._terminate_s, time.monotonic() + seconds)

    def look(self) -> None:
        """Do what is due."""
        now_s = time.monotonic()
        if now_s > self._kill_s:
            told = f"mpiexec did not end the job within {_TERMINATION_TIMEOUT_S:.0f} s, and was killed"
            print(f"hocket: {told}", file=sys.stderr)
            self.launcher.kill()
        elif now_s > self._terminate_s:
            self.terminate()


def _wait(job: _JobEnd, report: Report) -> signal.Signals | None:
    """Wait for the job's end; return the signal that came meanwhile, if any.

    End the job on Ctrl-C or a closed terminal. On SIGTERM or SIGUSR1 ask the ranks to end, and end the job where they
    do not. End it too where a rank has left word that it ends the job, and where one has died and the others stay.
    """
    received: list[signal.Signals] = []

    def end(number: int, frame: object) -> None:
        received.append(signal.Signals(number))
        job.terminate()

    def ask(number: int, frame: object) -> None:
        if received:
            return
        received.append(signal.Signals(number))
        if _ask_ranks(report.folder, report.ranks):
            job.terminate_after(_SAVING_TIMEOUT_S)
        else:
            job.terminate()

    # nohup has a closed terminal ignored.
    heeded = [s for s in _ENDING_SIGNALS if signal.getsignal(s) is not signal.SIG_IGN]
    previous = {s: signal.signal(s, end) for s in heeded}
    previous |= {s: signal.signal(s, ask) for s in _ASKING_SIGNALS}
    try:
        while True:
            try:
                job.launcher.wait(1.0)
                break
            except subprocess.TimeoutExpired:
                job.look()
                if (report.folder / _ENDING).exists() and not job.terminated:
                    job.terminate()  # Open MPI's takes 5 s and more to end the others, with ULFM
                elif report.cause or _some_have_died(report.folder):
                    job.terminate_after(_OUTLIVING_TIMEOUT_S)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return received[0] if received else None


def _noted_pids(folder: Path) -> list[int]:
    """Return the process numbers that ranks have left, see `note_pid`."""
    return [int(file.name) for file in folder.iterdir() if file.name.isdigit()]


def _some_have_died(folder: Path) -> bool:
    """Return whether a rank on this host has ended before its script's end, or its launcher has taken no notice."""
    return any(
        _is_unreaped(process)
        or not (Path(f"/proc/{process}").exists() or (folder / f"{_LEFT}{process}").exists())
        for process in _noted_pids(folder)
    )


def _is_unreaped(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return False


def _ask_ranks(folder: Path, ranks: int) -> bool:
    """Pass a request to end on to the ranks; return False where they have not all begun, or are on other hosts."""
    processes = _noted_pids(folder)
    if len(processes) < ranks:
        return False
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGUSR1)
    return True


def _end_stragglers(folder: Path) -> None:
    """End what is left of a job whose launcher has ended: Open MPI's may leave before its ranks have."""
    deadline_s = time.monotonic() + _STRAGGLING_TIMEOUT_S
    while left := _processes_of(folder):
        late = time.monotonic() > deadline_s
        for process in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL if late else signal.SIGTERM)
        if late:
            return
        time.sleep(_STRAGGLING_POLL_S)


def _processes_of(folder: Path) -> list[int]:
    """Return the processes of this host that were started with this folder for their numbers."""
    mark = f"{PID_FOLDER_VARIABLE}={folder}".encode()
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in environment.read_bytes().split(b"\0"):
                found.append(int(environment.parent.name))
    return found
