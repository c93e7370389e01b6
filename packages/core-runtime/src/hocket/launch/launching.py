"""The start of ranks, and one line on why they ended."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol, TextIO

from hocket.errors import UserError
from hocket.launch.hosts import Host, are_here
from hocket.launch.job_output import JobOutput, Report
from hocket.launch.mpi_there import why_no_mpi4py
from hocket.launch.mpiexec import Mpiexec, find_mpiexec
from hocket.launch.rank_process import allow_files, variables_of_ranks
from hocket.transport.job_notes import (
    PID_FOLDER_VARIABLE,
    ask_ranks,
    has_noted_ending,
    note_host,
    note_terminating,
    noted_status,
    num_died,
    processes_of,
)

_log = logging.getLogger("hocket")

# Seconds that the launcher may take to end a job. Open MPI's has been seen to wait for a lock that nobody holds
# (5.0.11, in MPI_Abort, once in thousands of jobs).
_TERMINATION_TIMEOUT_S = 15.0
#: The status of ssh, and so of a launcher, where a host cannot be reached.
_NOT_REACHED = 255
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGHUP)
#: Those by which schedulers announce that they take the machine; ranks may save first.
_ASKING_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
#: That of ranks that were asked to end.
_ASKED_STATUS = 128 + signal.SIGTERM
# Ranks give up after 25 s by themselves, and Kubernetes kills after 30.
_SAVING_TIMEOUT_S = 27.0
# Seconds that ranks may take to end by themselves after one has died: they learn it at once, and agree on one to say
# so. Open MPI's launcher has been seen to wait for ever (5.0.11, once in hundreds of jobs killed).
_OUTLIVING_TIMEOUT_S = 20.0
# Seconds for the launcher where all have died: it waits for what holds their output open, such as a loader's worker.
_ORPHANED_TIMEOUT_S = 5.0
# Seconds that a rank may take to end by itself after SIGTERM.
_STRAGGLING_TIMEOUT_S = 3.0
_STRAGGLING_POLL_S = 0.1

_NO_PROCESS_GROUP = (
    "the script uses torch.distributed's process group, which Hocket does not need: use hocket.attach instead of "
    "init_process_group and DistributedDataParallel, and hocket.loader instead of DistributedSampler. If you or a "
    "library need it, call hocket.join(torch_variables=True) before init_process_group, or start the script with "
    "`hocket launch --transport torch` or torchrun"
)


class RunningJob(Protocol):
    """The running ranks of a job, with the interface of a `subprocess` process."""

    @property
    def stdout(self) -> IO[bytes] | None: ...
    @property
    def stderr(self) -> IO[bytes] | None: ...
    @property
    def returncode(self) -> int | None: ...

    def wait(self, timeout: float, /) -> object: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...
    def send_signal(self, number: int, /) -> None: ...


class Starter(Protocol):
    """A starter of ranks: an mpiexec, or this process itself.

    Attributes:
        transport: the ranks' transport.
        hosts: the hosts that they run on; none for this host.
    """

    @property
    def transport(self) -> str: ...
    @property
    def hosts(self) -> Sequence[Host]: ...

    def start(
        self,
        ranks: int,
        program: Sequence[str],
        variables: Mapping[str, str],
        report: Report,
        ready: Callable[[], None] | None,
        /,
    ) -> RunningJob: ...


def usable_mpiexec() -> Mpiexec | None:
    """Return the mpiexec whose ranks can use MPI; None if mpi4py or an mpiexec is missing."""
    why = why_no_mpi4py()
    if why:
        _log.warning(
            "mpi4py is installed but cannot be imported (%s): ranks use transport torch; `hocket doctor` says more",
            why,
        )
    if why is not None:
        return None
    try:
        return find_mpiexec()
    except UserError:
        return None


def launch(
    starter: Starter,
    ranks: int,
    program: Sequence[str],
    *,
    folder: Path,
    environment: Mapping[str, str] | None = None,
    ready: Callable[[], None] | None = None,
) -> int:
    """Run `program` on `ranks` ranks and return the exit status.

    A launcher's output about a failed rank is replaced by one line that names the rank. Ranks share the
    cores (OMP_NUM_THREADS), keep memory that they free for their next step, and ask for large pages, unless the
    environment says otherwise.

    Args:
        starter: an `Mpiexec`, or `OwnRanks` for ranks over transport `torch`.
        ranks: number of ranks.
        program: the command of one rank.
        folder: an existing folder for the ranks' process numbers and the launcher's own files.
        environment: variables to add.
        ready: called before a rank begins, while `program` is imported where that forks ranks (`in_each_rank`); None
            for other programs.
    """
    allow_files(ranks)
    hosts = starter.hosts
    here = sum(host.ranks for host in hosts if are_here([host])) if hosts else ranks
    variables = variables_of_ranks(max((host.ranks for host in hosts), default=ranks))
    variables |= {PID_FOLDER_VARIABLE: str(folder), **(environment or {})}
    note_host(folder)
    report = Report(folder, here)
    job = starter.start(ranks, program, variables, report, ready)
    ended_by = _JobEnd(job, folder)
    report.end = ended_by.terminate
    readers = _copy_output(job, report)
    ask = (lambda: ask_ranks(folder, ranks)) if here == ranks else (lambda: _ask_all(job))
    interrupted = _wait(ended_by, report, ask, ranks)
    if job.returncode != 0 or report.status != 0:
        _end_stragglers(folder)
    for reader in readers:
        reader.join(_TERMINATION_TIMEOUT_S)
    return _conclude(ended_by, report, interrupted, hosts, here)


def _copy_output(job: RunningJob, report: Report) -> list[threading.Thread]:
    """Begin to copy the launcher's output to this process's, but for what the report takes; return the threads."""
    readers = [
        threading.Thread(target=JobOutput(report, rule, _writer(ours)).copy, args=(theirs,), daemon=True)
        for theirs, rule, ours in ((job.stdout, "=", sys.stdout), (job.stderr, "-", sys.stderr))
        if theirs is not None
    ]
    for reader in readers:
        reader.start()
    return readers


def _conclude(
    job: _JobEnd, report: Report, interrupted: signal.Signals | None, hosts: Sequence[Host], here: int
) -> int:
    """Say in a line why the ranks have ended, and return the exit status.

    Args:
        job: the ended job.
        report: on the ranks' ends.
        interrupted: the signal that arrived meanwhile, if any.
        hosts: those that they ran on; none for this host.
        here: number of ranks of this host.
    """
    if report.saved and (interrupted in _ASKING_SIGNALS or report.status == _ASKED_STATUS):
        return _ASKED_STATUS
    code = job.launcher.returncode
    if interrupted is not None and (job.terminated or code != 0 or report.message):
        _say(f"{interrupted.name}: all ranks were ended")
        return 128 + interrupted
    status = report.status or noted_status(report.folder) or _as_shells_say(code)
    elsewhere = [host.name for host in hosts if not are_here([host])]
    if report.message:
        _say(report.message)
    elif status != 0 and not report.has_reason:
        if elsewhere and report.num_joined == 0 and (here or status == _NOT_REACHED):
            _say(
                f"no rank has started (exit code {status}): see the launcher's message above. Each of "
                f"{', '.join(elsewhere)} has to be reachable without a password: `ssh {elsewhere[-1]} true`"
            )
        else:
            _say(_silent_end(status))
    if status == 0 and report.num_joined == 0 and here > 1:
        _say(
            f"no rank has called hocket.attach or hocket.join, so each of these {here} processes has run the script "
            "alone"
        )
    if status != 0 and report.wants_process_group:
        _say(_NO_PROCESS_GROUP)
    return status


def _silent_end(status: int) -> str:
    """Return a sentence on ranks that ended with an exit status and said nothing."""
    if status == 128 + signal.SIGKILL:
        return (
            f"the ranks were killed by SIGKILL (exit code {status}), without an error message: out of memory? See "
            "the kernel's log"
        )
    return f"the ranks ended with exit code {status}, without an error message"


def _say(text: str) -> None:
    print(f"hocket: {text}", file=sys.stderr)


def _ask_all(job: RunningJob) -> bool:
    """Make the launcher pass a request to end on to the ranks of all hosts."""
    job.send_signal(signal.SIGUSR1)
    return True


def _writer(stream: TextIO) -> Callable[[str], None]:
    def write(text: str) -> None:
        stream.write(text)
        stream.flush()

    return write


def _as_shells_say(status: int | None) -> int:
    """Return a process's exit status as shells do, 128 + n for one killed by signal n."""
    status = status or 0
    return status if status >= 0 else 128 - status


class _JobEnd:
    """The end of a job through its launcher, which is killed if it does not end.

    Args:
        launcher: the process that started the ranks.
        folder: of the job's notes.
    """

    def __init__(self, launcher: RunningJob, folder: Path) -> None:
        self.launcher, self._folder = launcher, folder
        self._terminate_s = self._kill_s = math.inf

    @property
    def terminated(self) -> bool:
        return self._kill_s < math.inf

    def terminate(self) -> None:
        """Make the launcher end all ranks, now."""
        self._kill_s = min(self._kill_s, time.monotonic() + _TERMINATION_TIMEOUT_S)
        note_terminating(self._folder)
        self.launcher.terminate()

    def terminate_after(self, seconds: float) -> None:
        """Give the ranks `seconds` to end by themselves, from the first call on."""
        self._terminate_s = min(self._terminate_s, time.monotonic() + seconds)

    def look(self) -> None:
        """End ranks or launcher if their time is over."""
        now_s = time.monotonic()
        if now_s > self._kill_s:
            _say(f"mpiexec did not end the job within {_TERMINATION_TIMEOUT_S:.0f} s, and was killed")
            self.launcher.kill()
        elif now_s > self._terminate_s:
            self.terminate()


def _wait(job: _JobEnd, report: Report, pass_on: Callable[[], bool], ranks: int) -> signal.Signals | None:
    """Wait for the job's end; return the signal that arrived meanwhile, if any.

    End the job on Ctrl-C or a closed terminal. On SIGTERM or SIGUSR1 ask the ranks to end, and end the job where they
    do not. End it too if a rank has noted that it ends the job, and if one has died and the others stay.

    Args:
        job: the job to wait for.
        report: on the ranks' ends.
        pass_on: passes a request to end on to them, or returns False if it cannot.
        ranks: how many there are, on all hosts.
    """
    with _signals(job, pass_on) as received:
        while True:
            try:
                job.launcher.wait(1.0)
                break
            except subprocess.TimeoutExpired:
                job.look()
                if has_noted_ending(report.folder) and not job.terminated:
                    job.terminate()  # Open MPI's takes 5 s and more to end the others, with ULFM
                elif (died := num_died(report.folder)) == ranks:
                    job.terminate_after(_ORPHANED_TIMEOUT_S)
                elif report.cause or died:
                    job.terminate_after(_OUTLIVING_TIMEOUT_S)
    return received[0] if received else None


@contextlib.contextmanager
def _signals(job: _JobEnd, pass_on: Callable[[], bool]) -> Iterator[list[signal.Signals]]:
    """Handle signals as `_wait` says, and give the list that they are noted in."""
    received: list[signal.Signals] = []

    def end(number: int, frame: object) -> None:
        received.append(signal.Signals(number))
        job.terminate()

    def ask(number: int, frame: object) -> None:
        if received:
            return
        received.append(signal.Signals(number))
        if pass_on():
            job.terminate_after(_SAVING_TIMEOUT_S)
        else:
            job.terminate()

    # nohup has a closed terminal ignored.
    heeded = [s for s in _ENDING_SIGNALS if signal.getsignal(s) is not signal.SIG_IGN]
    previous = {s: signal.signal(s, end) for s in heeded}
    previous |= {s: signal.signal(s, ask) for s in _ASKING_SIGNALS}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _end_stragglers(folder: Path) -> None:
    """End the rest of a job whose launcher has ended: Open MPI's may end before its ranks."""
    deadline_s = time.monotonic() + _STRAGGLING_TIMEOUT_S
    note_terminating(folder)
    while left := processes_of(folder):
        late = time.monotonic() > deadline_s
        for process in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL if late else signal.SIGTERM)
        if late:
            return
        time.sleep(_STRAGGLING_POLL_S)
