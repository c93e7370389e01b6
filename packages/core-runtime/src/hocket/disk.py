"""Durable writes: files that are whole or absent, and one writer of a folder at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from hocket.errors import CheckpointError, UserError, WriteError, reason

#: The name of the file that is locked while a job writes into its folder.
LOCK = ".hocket-lock"

#: The suffix of a file's name while it is being written.
UNFINISHED = ".hocket-tmp"

#: The message about a locked folder.
BUSY = (
    "another job is saving into {folder} ({holder}): a folder can hold the checkpoints of one job only. Save to "
    "another folder, or end the other job"
)

#: The errors of file systems that cannot lock files.
_CANNOT = {errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL, errno.EBADF}

#: The descriptors by which this process holds locks.
_locks: set[int] = set()


def _leave_to_parent() -> None:
    """Close the locks that a fork has from its parent: a loader's worker may outlive that by seconds."""
    while _locks:
        os.close(_locks.pop())


os.register_at_fork(after_in_child=_leave_to_parent)


@contextlib.contextmanager
def locked(folder: Path, run: str, busy: str = BUSY) -> Iterator[bool]:
    """Keep other jobs from writing into `folder` in a `with` statement; the lock ends with its process.

    Args:
        folder: an existing folder.
        run: the holder's id, for others' messages.
        busy: the message if another job holds it, with `{folder}` and `{holder}` in it.

    Yields:
        Whether the folder is locked: some file systems cannot lock files.

    Raises:
        CheckpointError: another job, still alive, holds the lock; names that job.
        OSError: the folder cannot be written.
    """
    path = folder / LOCK
    descriptor, is_locked = _open_locked(path, busy)
    _locks.add(descriptor)
    try:
        _write_holder(descriptor, run, path)
        yield is_locked
    finally:
        try:
            path.unlink(missing_ok=True)
        finally:
            _locks.discard(descriptor)
            os.close(descriptor)


def _write_holder(descriptor: int, run: str, path: Path) -> None:
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"run {run}, process {os.getpid()} on {socket.gethostname()}".encode())
    except OSError as error:
        error.filename = str(path)  # which a full disk's error does not name
        raise


def _open_locked(path: Path, busy: str) -> tuple[int, bool]:
    while True:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
        try:
            is_locked = _lock(descriptor, path, busy)
            # Its last holder may have removed it after it was opened here: then others lock another file.
            if not is_locked or _is_at(path, descriptor):
                return descriptor, is_locked
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _lock(descriptor: int, path: Path, busy: str) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.read(descriptor, 1000).decode(errors="replace")
        text = busy.format(folder=path.parent, holder=holder or "it has just begun")
        raise CheckpointError(text) from error
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


def path_of(given: str | os.PathLike[str], what: str) -> Path:
    """Return a path that the user gives.

    Args:
        given: the path.
        what: the call or setting that takes it, for the error.

    Raises:
        UserError: no file can have that path.
    """
    path = Path(given)
    if "\0" in str(path):
        raise UserError(f"{what}: {str(path)!r} has a NUL byte, which no path can have: name another one")
    return path


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn OSErrors of a `with` statement into WriteErrors that name the file.

    Args:
        path: the file named if the system's error names none.

    Raises:
        WriteError: in place of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise WriteError(f"{error.filename or path} cannot be written: {reason(error)}") from error


def write_durably(path: Path, write: Callable[[BinaryIO], object]) -> int:
    """Write a file under another name, wait until it is on the disk, and rename it.

    Args:
        path: replaced if it exists.
        write: writes the content.

    Returns:
        The file's size in bytes.

    Raises:
        OSError: the file cannot be written.
    """
    size = _write_beside(path, write, sync=True)
    sync_folder(path.parent)
    return size


def write_text(path: Path, text: str, *, sync: bool = True) -> None:
    """Write a small file under another name and rename it, so that readers find the old content or the new.

    Args:
        path: replaced if it exists.
        text: its content.
        sync: wait until the content is on the disk, some milliseconds, so that it outlives a power cut.

    Raises:
        OSError: the file cannot be written.
    """
    _write_beside(path, lambda file: file.write(text.encode()), sync=sync)


def _write_beside(path: Path, write: Callable[[BinaryIO], object], *, sync: bool) -> int:
    unfinished = path.with_name(path.name + UNFINISHED)
    try:
        with unfinished.open("wb") as file:
            write(file)
            file.flush()
            if sync:
                os.fsync(file.fileno())
            size = file.tell()
    except OSError as error:
        error.filename = str(path)  # which a full disk's error does not name
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise
    unfinished.replace(path)
    return size


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk, if its file system supports that.

    Raises:
        OSError: the folder cannot be opened or synchronised.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            error.filename = str(folder)  # which a failed disk's error does not name
            raise
    finally:
        os.close(descriptor)
