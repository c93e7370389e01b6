"""Files that are there whole or not at all, also after a power cut."""

from __future__ import annotations

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
    with unfinished.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    unfinished.replace(path)
    sync_folder(path.parent)
    return size


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
