"""Notes between ranks and their launcher, as files in a folder of the job: process numbers and endings."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from pathlib import Path

#: Names the folder in which ranks leave their process numbers.
PID_FOLDER_VARIABLE = "HOCKET_PID_FOLDER"

_ENDING = "ending"
_TERMINATING = "terminating"
_LEFT = "left-"
_HOST = "host"


def note_host(folder: Path) -> None:
    """Note this host's name, as ranks of other hosts, which may have the same folder, leave no notes there."""
    (folder / _HOST).write_text(socket.gethostname())


def note_pid(rank: int) -> None:
    """Note this process's number for `launch`."""
    _leave(str(os.getpid()), str(rank))


def was_started_by_rank() -> bool:
    """Return whether a rank has started this process, which so is none, though it has the rank's variables."""
    folder = os.environ.get(PID_FOLDER_VARIABLE)
    return folder is not None and (Path(folder) / str(os.getppid())).exists()


def note_leaving() -> None:
    """Note for `launch` that this process has reached its end together with the other ranks."""
    _leave(f"{_LEFT}{os.getpid()}", "")


def note_ending(code: int) -> None:
    """Note for `launch` that this process is about to end the job with this exit status."""
    folder = os.environ.get(PID_FOLDER_VARIABLE)
    if folder:
        # The first one's counts. On another host the folder may not be there.
        with contextlib.suppress(OSError), open(Path(folder) / _ENDING, "x") as file:
            file.write(str(code))


def note_terminating(folder: Path) -> None:
    """Note for this host's ranks that SIGTERM comes from the launcher from now on: they end at once."""
    with contextlib.suppress(OSError):
        (folder / _TERMINATING).touch()


def is_terminated() -> bool:
    """Return whether this process's job is being ended, without time to save."""
    folder = os.environ.get(PID_FOLDER_VARIABLE, "")
    return folder != "" and any((Path(folder) / name).exists() for name in (_TERMINATING, _ENDING))


def _leave(name: str, text: str) -> None:
    folder = Path(os.environ.get(PID_FOLDER_VARIABLE, ""))
    with contextlib.suppress(OSError):
        if folder.name and not _is_elsewhere(folder):
            (folder / name).write_text(text)


def _is_elsewhere(folder: Path) -> bool:
    host = folder / _HOST
    return host.exists() and host.read_text() != socket.gethostname()


def has_noted_ending(folder: Path) -> bool:
    """Return whether a rank has noted that it ends the job."""
    return (folder / _ENDING).exists()


def noted_status(folder: Path) -> int:
    """Return the exit status that a rank has noted for the job, 0 if none has."""
    try:
        return int((folder / _ENDING).read_text())
    except (OSError, ValueError):
        return 0


def noted_pids(folder: Path) -> list[int]:
    """Return the process numbers that ranks have left, see `note_pid`."""
    return [int(file.name) for file in folder.iterdir() if file.name.isdigit()]


def num_died(folder: Path) -> int:
    """Return how many ranks on this host have ended early without their launcher noticing."""
    return sum(
        _is_unreaped(process)
        or not (Path(f"/proc/{process}").exists() or (folder / f"{_LEFT}{process}").exists())
        for process in noted_pids(folder)
    )


def _is_unreaped(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return False


def ask_ranks(folder: Path, ranks: int) -> bool:
    """Pass a request to end on to this host's ranks; return False if not all have begun."""
    processes = noted_pids(folder)
    if len(processes) < ranks:
        return False
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGUSR1)
    return True


def processes_of(folder: Path) -> list[int]:
    """Return the processes of this host that were started with this folder for their notes."""
    mark = f"{PID_FOLDER_VARIABLE}={folder}".encode()
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in environment.read_bytes().split(b"\0"):
                found.append(int(environment.parent.name))
    return found
