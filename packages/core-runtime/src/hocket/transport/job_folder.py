"""A job's folder for temporary files: removed at its end, or by the next job if its maker was killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp

#: Names the folder in which a host's ranks keep what MPI shares between them: files that a killed rank leaves.
SEGMENTS_VARIABLE = "HOCKET_SEGMENT_FOLDER"

_PREFIX = "hocket-job-"
# Locked as long as the maker lives. Only what holds this file is removed: a name alone may be somebody else's.
_LOCK = "made-by-hocket"
_SHARED_MEMORY = Path("/dev/shm")


@contextlib.contextmanager
def job_folder(base: Path) -> Iterator[Path]:
    """Make a folder in `base`, and remove it at the end; first remove those of dead makers."""
    _sweep(base)
    folder, lock = _make(base)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


@contextlib.contextmanager
def shared_job_folder() -> Iterator[dict[str, str]]:
    """Make the folder of `SEGMENTS_VARIABLE`, where this system has memory for it; yield the ranks' variables."""
    with contextlib.ExitStack() as stack:
        if not os.access(_SHARED_MEMORY, os.W_OK):
            yield {}
        else:
            yield {SEGMENTS_VARIABLE: str(stack.enter_context(job_folder(_SHARED_MEMORY)))}


def _make(base: Path) -> tuple[Path, int]:
    """Return a new folder, and the open lock in it."""
    while True:
        folder = Path(mkdtemp(prefix=_PREFIX, dir=base))
        lock = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        if _hold(lock) and (folder / _LOCK).exists():
            return folder, lock
        os.close(lock)  # another job has swept it away before it was locked


def _sweep(base: Path) -> None:
    for folder in base.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                if _hold(lock) and folder.lstat().st_uid == os.geteuid():
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _hold(lock: int) -> bool:
    """Lock an open file until it is closed; return False where another process has."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
