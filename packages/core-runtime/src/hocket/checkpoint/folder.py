"""A folder of checkpoints, one directory each: which are complete, where the next one goes, which are removed.

A directory is complete when it has a manifest, which is written last and removed first. So whenever a process is
killed, what was complete stays complete, and what was being written or removed is not. Nothing is overwritten: a
step that is saved again gets a directory of its own, `step-00000100.1`.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from hocket.checkpoint.durable import sync_folder
from hocket.checkpoint.manifest import MANIFEST
from hocket.errors import CheckpointError

__all__ = ["begin", "complete", "incomplete", "keep_newest", "latest_complete", "remove_incomplete"]

_DIRECTORY = re.compile(r"step-(\d{8,})(?:\.(\d+))?")


def complete(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a folder, the oldest first."""
    return [path for path in _directories(folder) if (path / MANIFEST).exists()]


def incomplete(folder: Path) -> list[Path]:
    """Return what a save or a removal that was cut off has left behind."""
    return [path for path in _directories(folder) if not (path / MANIFEST).exists()]


def latest_complete(folder: Path) -> Path:
    """Return the newest complete checkpoint of a folder, or the folder itself if it is one.

    Raises:
        CheckpointError: there is none; names what is incomplete.
    """
    if (folder / MANIFEST).exists():
        return folder
    found = complete(folder)
    if not found:
        left = [path.name for path in incomplete(folder)]
        also = f"; {', '.join(left)} is incomplete: a save was cut off" if left else ""
        raise CheckpointError(f"there is no complete checkpoint in {folder}{also}")
    return found[-1]


def remove_incomplete(folder: Path) -> list[Path]:
    """Remove what was cut off, and return where it was."""
    left = incomplete(folder)
    for path in left:
        shutil.rmtree(path)
    return left


def begin(folder: Path, step: int) -> Path:
    """Make and return the directory for a checkpoint of `step`.

    Raises:
        CheckpointError: the folder has a checkpoint of a later step, so that this one would not be the newest.
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    there = complete(folder)
    if there and _order(there[-1])[0] > step:
        raise CheckpointError(
            f"{folder} holds {there[-1].name}, which is later than step {step}: it is of another run, or this one went "
            "back to an earlier checkpoint. Remove the later ones, or save to another folder"
        )
    name = f"step-{step:08d}"
    again = sum(path.name.partition(".")[0] == name for path in there)
    path = folder / (f"{name}.{again}" if again else name)
    path.mkdir()
    sync_folder(folder)
    return path


def keep_newest(folder: Path, count: int) -> None:
    """Remove all complete checkpoints but the newest `count`, 1 or more."""
    for path in complete(folder)[:-count]:
        (path / MANIFEST).unlink()
        sync_folder(path)
        shutil.rmtree(path)


def _directories(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(filter(lambda path: _DIRECTORY.fullmatch(path.name), folder.iterdir()), key=_order)


def _order(path: Path) -> tuple[int, int]:
    match = _DIRECTORY.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)
