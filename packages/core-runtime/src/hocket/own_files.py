"""Which files of a folder Hocket has written: a note beside them says so, and nothing else is replaced."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from hocket.disk import write_text
from hocket.errors import UserError, some

__all__ = ["NOTE", "adopt", "claim", "foreign", "is_marked", "refuse_foreign", "release", "set_aside"]

#: The name of the note in a folder.
NOTE = ".hocket.json"


@dataclass(frozen=True)
class _Note:
    """The note of a folder.

    Attributes:
        run: the id of the run that made it; empty where there is no note that can be read.
        files: the names of what Hocket has written there, files and folders.
        damage: what is wrong with it, in words.
    """

    run: str = ""
    files: frozenset[str] = frozenset()
    damage: str = ""


def is_marked(folder: Path) -> bool:
    """Return whether a note that can be read says that the folder is Hocket's."""
    return bool(_read(folder).run)


def foreign(folder: Path, names: Iterable[str]) -> list[str]:
    """Return which of these names are there, in a folder, and not by Hocket."""
    own = _read(folder).files
    return [name for name in dict.fromkeys(names) if name not in own and _holds(folder / name)]


def refuse_foreign(folder: Path, names: Iterable[str], option: str = "") -> None:
    """Refuse a folder in which something stands in the way.

    Args:
        folder: to be written into.
        names: of what is to be written there.
        option: that named it, for the message.

    Raises:
        UserError: names what Hocket has not written there.
    """
    others = foreign(folder, names)
    if others:
        note = _read(folder)
        lost = (
            f" ({folder / NOTE}, which names what it has, is damaged: {note.damage})" if note.damage else ""
        )
        raise UserError(
            f"{option}{' ' * bool(option)}{folder} holds {some(others)}, which Hocket has not written there and does "
            f"not replace{lost}: name another folder, or move {'them' if len(others) > 1 else 'it'} away"
        )


def claim(folder: Path, *names: str) -> None:
    """Note that Hocket writes these into a folder, before it does.

    Raises:
        UserError: one of them is there already, and not by Hocket.
        OSError: the note cannot be written.
    """
    refuse_foreign(folder, names)
    adopt(folder, names)


def adopt(folder: Path, names: Collection[str]) -> None:
    """Note that these are Hocket's, as something else has shown."""
    note = _read(folder)
    if not set(names) <= note.files or not note.run:
        _write(folder, note.run or uuid.uuid4().hex, note.files | set(names))


def release(folder: Path) -> None:
    """Forget what has not been written after all; where that is everything, there is no note."""
    note = _read(folder)
    if not note.run:
        return
    there = frozenset(name for name in note.files if os.path.lexists(folder / name))
    if not there:
        (folder / NOTE).unlink(missing_ok=True)
    elif there != note.files:
        _write(folder, note.run, there)


def set_aside(path: Path) -> Path:
    """Give what cannot be read another name beside its own, so that nothing of it is lost; return that."""
    place = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.damaged-{place}")):
        place += 1
    path.rename(aside)
    return aside


def _holds(path: Path) -> bool:
    """Return whether there is anything, were it a link that leads nowhere; an empty folder is nothing."""
    if path.is_dir() and not path.is_symlink():
        return any(path.iterdir())
    return os.path.lexists(path)


def _read(folder: Path) -> _Note:
    try:
        content = json.loads((folder / NOTE).read_bytes())
        run, files = content["run"], content["files"]
        if not (isinstance(run, str) and run and isinstance(files, list) and all(map(_is_name, files))):
            raise ValueError("it has other fields")
    except (FileNotFoundError, NotADirectoryError):
        return _Note()
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        return _Note(damage=str(error).partition("\n")[0] or type(error).__name__)
    return _Note(run, frozenset(files))


def _is_name(name: object) -> bool:
    return isinstance(name, str) and name != ""


def _write(folder: Path, run: str, files: Iterable[str]) -> None:
    text = json.dumps({"run": run, "files": sorted(files)}, indent=1) + "\n"
    write_text(folder / NOTE, text, sync=False)
