"""The folder of an export, whole or absent under its name: it is written beside and renamed."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hocket.disk import LOCK, UNFINISHED, locked, sync_folder, write_text
from hocket.errors import CheckpointError, UserError, some
from hocket.own_files import NOTE, adopt, refuse_foreign
from hocket.plain import TreeView

#: The file that says what an export is of, and that a folder is one.
ABOUT = "hocket-export.json"


@contextmanager
def export_folder(folder: Path, about: TreeView) -> Iterator[Path]:
    """Give a folder to write an export into, which becomes `folder` at the end of a `with` statement.

    An earlier export there is replaced. After an error nothing is left. After a kill, the next export to the same place
    removes what is, and puts back a whole one that was not renamed yet.

    Args:
        folder: the export's place.
        about: plain values that say what is exported, for `ABOUT`.

    Raises:
        CheckpointError: there is something else at the place.
        OSError: it cannot be written.
    """
    if folder.is_symlink() or folder.name in ("", ".."):
        folder = folder.resolve()
    if Path.cwd().is_relative_to(folder.resolve()):
        raise CheckpointError(
            f"{folder} is the working directory, or contains it: name a folder that is only for the export, "
            f"such as {folder / 'export'}"
        )
    if folder.is_mount():
        raise CheckpointError(
            f"{folder} is a mount point, which an export cannot replace: name a folder inside it, such as "
            f"{folder / 'export'}"
        )
    _refuse_others(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_left(folder)
    beside = _beside(folder)
    beside.mkdir()
    try:
        with locked(beside, "export"):
            yield beside
            adopt(beside, [*_names(beside), ABOUT])
            for path in beside.rglob("*"):
                _sync(path)
            write_text(beside / ABOUT, json.dumps(about, indent=1) + "\n")  # last: with it an export is whole
            sync_folder(beside)
            _refuse_others(folder)  # somebody may have written there meanwhile
            _replace(folder, beside)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def _refuse_others(folder: Path) -> None:
    """Refuse a place with anything but an earlier export.

    Raises:
        CheckpointError: names what is there.
    """
    for place in (folder, *folder.parents):
        if os.path.lexists(place) and not place.is_dir():
            raise CheckpointError(f"{place} is a file: name a folder for the export")
    if not folder.is_dir():
        return
    names = _names(folder)
    if names and ABOUT not in names and (folder / NOTE).exists():
        raise CheckpointError(
            f"{folder} holds other results of Hocket, not an export: name a folder that is only for the "
            f"export, such as {folder / 'export'}"
        )
    exports = sorted({name.partition("/")[0] for name in names if name.endswith(f"/{ABOUT}")})
    if exports:
        raise CheckpointError(
            f"{folder} holds exports ({some(exports)}): name a folder inside it, such as {folder / 'export'}"
        )
    try:
        refuse_foreign(folder, names)
    except UserError as error:
        raise CheckpointError(str(error)) from error


def _names(folder: Path) -> list[str]:
    """Return the paths of all files within a folder, but for Hocket's notes."""
    files = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted(path.relative_to(folder).as_posix() for path in files if path.name not in (NOTE, LOCK))


def _beside(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.{secrets.token_hex(4)}{UNFINISHED}")


def whole_beside(folder: Path) -> Path | None:
    """Return the whole export that a kill has left beside its place, the newest; None if there is none."""
    whole = [left for left in _left_beside(folder) if (left / ABOUT).exists()]
    return max(whole, key=lambda left: (left / ABOUT).stat().st_mtime_ns, default=None)


def _left_beside(folder: Path) -> Iterator[Path]:
    return folder.parent.glob(f"{_escaped(folder.name)}.????????{UNFINISHED}")


def _remove_left(folder: Path) -> None:
    """Remove what killed exports to the same place have left, but for a whole one that is nowhere else."""
    whole = None if os.path.lexists(folder) else whole_beside(folder)
    for left in _left_beside(folder):
        with contextlib.suppress(CheckpointError, OSError), locked(left, "export") as is_locked:
            if not is_locked:  # its job may be at work
                continue
            if left == whole:
                left.rename(folder)
                (folder / LOCK).unlink(missing_ok=True)
            else:
                shutil.rmtree(left)


def _escaped(name: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def _replace(folder: Path, beside: Path) -> None:
    """Rename a folder to its final name."""
    earlier = None
    if folder.is_dir() and any(folder.iterdir()):
        earlier = folder.rename(_beside(folder))
    try:
        beside.rename(folder)
    except OSError:
        if earlier is not None:
            earlier.rename(folder)
        raise
    (folder / LOCK).unlink(missing_ok=True)
    sync_folder(folder.parent)
    if earlier is not None:
        shutil.rmtree(earlier)


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    if path.is_dir():
        sync_folder(path)
    elif path.is_file():
        with path.open("rb") as file:
            os.fsync(file.fileno())
