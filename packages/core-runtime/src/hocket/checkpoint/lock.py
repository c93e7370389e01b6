"""One job at a time writes into a folder of checkpoints: meanwhile the folder has a locked file, afterwards none."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from hocket.errors import CheckpointError

__all__ = ["LOCK", "locked"]

#: The name of the file.
LOCK = ".hocket-lock"

#: What a file system answers that cannot lock files.
_CANNOT = {errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL, errno.EBADF}


@contextlib.contextmanager
def locked(folder: Path, run: str) -> Iterator[bool]:
    """Keep other jobs from writing into `folder` in a `with` statement; the lock ends with its process.

    Args:
        folder: exists.
        run: the holder's id, for others' messages.

    Yields:
        Whether the folder is locked: some file systems cannot lock files.

    Raises:
        CheckpointError: a living job is writing into it; names that one.
        OSError: the folder cannot be written.
    """
    path = folder / LOCK
    descriptor, is_locked = _open_locked(path)
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"run {run}, process {os.getpid()} on {socket.gethostname()}".encode())
        yield is_locked
    finally:
        try:
            path.unlink(missing_ok=True)
        finally:
            os.close(descriptor)


def _open_locked(path: Path) -> tuple[int, bool]:
    while True:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
        try:
            is_locked = _lock(descriptor, path)
            # Its last holder may have removed it after it was opened here: then others lock another file.
            if not is_locked or _is_at(path, descriptor):
                return descriptor, is_locked
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.read(descriptor, 1000).decode(errors="replace")
        raise CheckpointError(
            f"another job is saving into {path.parent} ({holder or 'it has just begun'}): a folder takes the "
            "checkpoints of one job. Save to another folder, or end the other job"
        ) from error
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
        return False
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
