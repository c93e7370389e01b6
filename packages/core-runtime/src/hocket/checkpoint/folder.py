"""A folder of checkpoints, one directory each: the complete ones, the next one, and those to remove.

A directory is written under a name with the run's id in it, which no other job uses, and gets its own name when all
of it is there, the manifest last; one that is removed gets such a name first. So whenever a process is killed, a
checkpoint is complete or absent. Nothing is overwritten: a step that is saved again gets a directory of its own,
`step-00000100.1`. What holds anything but Hocket's own files is left alone.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from hocket.checkpoint.manifest import MANIFEST, is_own
from hocket.checkpoint.shared import patiently
from hocket.disk import UNFINISHED, locked, sync_folder
from hocket.errors import CheckpointError, MissingFileError, some
from hocket.own_files import set_aside

_log = logging.getLogger("hocket")

_DIRECTORY = re.compile(r"step-(\d{8,})(?:\.(\d+))?(?:-(\w+)\.unfinished)?")

_OWN_FILE = re.compile(rf"(rank-\d{{4,}}\.safetensors|{re.escape(MANIFEST)})({re.escape(UNFINISHED)})?")


def complete(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a folder, the oldest first."""
    return [path for path in _directories(folder) if not _run_of(path) and (path / MANIFEST).exists()]


def incomplete(folder: Path) -> list[Path]:
    """Return the directories left behind by interrupted saves and removals, and those being written."""
    return [
        path
        for path in _directories(folder)
        if _run_of(path) or (not (path / MANIFEST).exists() and _holds_own_files(path))
    ]


def newest_first(folder: Path, advice: str = "") -> list[Path]:
    """Return the complete checkpoints of a folder, the newest first, or the folder itself if it is one.

    The manifest of the newest may appear some seconds late if another host has written it.

    Args:
        folder: a folder with checkpoints, or a checkpoint.
        advice: the last sentence of the error; empty for none.

    Raises:
        CheckpointError: there is none; names incomplete ones, and ends with `advice`.
    """
    if folder.is_symlink() and not folder.exists():
        raise CheckpointError(
            f"{folder} is a link to {os.readlink(folder)}, which does not exist: is its disk mounted?"
        )
    with contextlib.suppress(MissingFileError):
        patiently(lambda: _require_manifest(folder))
    found = [folder] if (folder / MANIFEST).exists() else complete(folder)
    if not found:
        left = [path.name for path in incomplete(folder)]
        also = f"; {', '.join(left)} is incomplete: a save was interrupted" if left else ""
        raise CheckpointError(f"there is no complete checkpoint in {folder}{also}{advice and f'. {advice}'}")
    return found[::-1]


def _require_manifest(folder: Path) -> None:
    """Raise MissingFileError if the newest directory with a final name has no manifest."""
    named = [path for path in _directories(folder) if not _run_of(path) and _holds_own_files(path)]
    if named and not (named[-1] / MANIFEST).exists():
        raise MissingFileError(
            f"{named[-1]} is not a complete checkpoint: it lacks {MANIFEST}, the file that is written last, so its "
            "save was interrupted, or is not over; use another checkpoint"
        )


@contextmanager
def begin(
    folder: Path, step: int, run: str, last: Path | None = None, damaged: Collection[Path] = ()
) -> Iterator[Path]:
    """Make the directory for a checkpoint of `step`, and lock the folder, in a `with` statement.

    Remains of interrupted saves are removed, and after an error the new directory, too.

    Args:
        folder: the folder of checkpoints.
        step: the checkpoint's step.
        run: the id of the run that saves.
        last: the checkpoint that the run saved before this one.
        damaged: checkpoints that the run has passed over: those of the folder are renamed.

    Raises:
        CheckpointError: another job saves into the folder, or it has a checkpoint of a later step, so that this one
            would not be the newest.
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, run) as is_locked:
        for path in damaged:
            if path.parent.resolve() == folder.resolve() and path.exists():
                _log.warning("%s is damaged, and was renamed to %s", path, set_aside(path).name)
        _refuse_others(folder, step, last)
        for left in incomplete(folder):
            # Without a lock, its job may still run. A directory with a final name was complete when it got it.
            if _run_of(left) and (is_locked or _run_of(left) == run) and not _foreign_files(left):
                shutil.rmtree(left)
                _log.warning("removed %s, which was incomplete: a save was interrupted", left)
        path = folder / f"step-{step:08d}-{run}.unfinished"
        path.mkdir()
        sync_folder(folder)
        try:
            yield path
        except Exception:
            shutil.rmtree(path, ignore_errors=True)
            raise


def _refuse_others(folder: Path, step: int, last: Path | None) -> None:
    there = complete(folder)
    if not there:
        return
    newest = there[-1]
    if order(newest)[0] > step:
        raise CheckpointError(
            f"{folder} holds {newest.name}, which is later than step {step}: another run saved it, or this run went "
            "back to an earlier checkpoint. Remove the later checkpoints, or save to another folder"
        )
    if last is not None and last.parent.resolve() == folder.resolve() and order(newest) > order(last):
        raise CheckpointError(
            f"another job has saved {newest} since this one saved {last.name}: a folder can hold the checkpoints of "
            "one job only. Save to another folder, or end the other job"
        )


def next_number(path: Path) -> int:
    """Return the number in the name of the next complete checkpoint of a step; 0 stands for none.

    Args:
        path: the directory that `begin` made.
    """
    step = order(path)[0]
    others = [order(other) for other in _directories(path.parent) if not _run_of(other)]
    return max([number + 1 for of_step, number in others if of_step == step], default=0)


def final_path(path: Path, number: int) -> Path:
    """Return the path of the complete checkpoint in the directory that `begin` made; see `next_number`."""
    step = order(path)[0]
    return path.with_name(f"step-{step:08d}.{number}" if number else f"step-{step:08d}")


def finish(path: Path, number: int = 0) -> Path:
    """Give the complete checkpoint in the directory that `begin` made its final name; return its path.

    Args:
        path: the directory.
        number: the least number in the name.

    Raises:
        OSError: the folder cannot be written.
    """
    while True:
        finished = final_path(path, max(number, next_number(path)))
        try:
            path.rename(finished)
        except OSError as error:
            # If files cannot be locked, another job may have been faster.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            sync_folder(path.parent)
            return finished


def keep_newest(folder: Path, count: int, run: str) -> None:
    """Remove all complete checkpoints but the newest `count`; `run` marks those being removed."""
    kept, there = [], complete(folder)
    for path in there[: max(0, len(there) - count)]:
        if not _may_go(path):
            kept.append(path.name)
            continue
        going = path.with_name(f"{path.name}-{run}.unfinished")
        try:
            path.rename(going)
        except FileNotFoundError:  # where files cannot be locked, another job may have removed it
            continue
        sync_folder(folder)
        shutil.rmtree(going)
    if kept:
        _log.warning(
            "%s: %s was not removed: it holds files that Hocket did not write, or its manifest is damaged",
            folder,
            some(kept),
        )


def foreign(folder: Path) -> list[str]:
    """Return the names of complete checkpoints that are never removed: they hold others' files, too."""
    return [path.name for path in complete(folder) if not _may_go(path)]


def _may_go(path: Path) -> bool:
    return not _foreign_files(path) and is_own(path)


def _directories(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _DIRECTORY.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=order)


def order(path: Path) -> tuple[int, int]:
    """Return a directory's step, and the number of earlier saves of that step."""
    match = _DIRECTORY.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)


def _run_of(path: Path) -> str | None:
    """Return the run that writes or removes a directory, or None if it has its final name."""
    match = _DIRECTORY.fullmatch(path.name)
    return match and match[3]


def _holds_own_files(path: Path) -> bool:
    return any(map(_OWN_FILE.fullmatch, _names(path)))


def _foreign_files(path: Path) -> bool:
    """Return whether there is anything in a directory that Hocket has not written."""
    return path.is_symlink() or not all(map(_OWN_FILE.fullmatch, _names(path)))


def _names(path: Path) -> list[str]:
    try:
        return os.listdir(path)
    except FileNotFoundError:  # another job has removed it since it was listed
        return []
