"""Files that are there whole or not at all, also after a power cut."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

__all__ = ["sync_folder", "write_durably"]


def write_durably(path: Path, write: Callable[[BinaryIO], object]) -> int:
    """Write a file under another name, wait until it is on the disk, and give it its name.

    Args:
        path: replaced if it exists.
        write: writes the content.

    Returns:
        The file's size in bytes.

    Raises:
        OSError: the file cannot be written.
    """
    unfinished = path.with_name(path.name + ".tmp")
    try:
        with unfinished.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
    except OSError as error:
        error.filename = str(path)  # which a full disk's error does not name
        raise
    unfinished.replace(path)
    sync_folder(path.parent)
    return size


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk, where its file system lets anyone wait for them."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(descriptor)
