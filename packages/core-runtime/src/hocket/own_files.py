"""The files of a folder that Hocket has written: a note beside them names them, and no others are replaced."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hocket.disk import write_text
from hocket.errors import UserError, some

#: The name of the note in a folder.
NOTE = ".hocket.json"


@dataclass(frozen=True)
class _Note:
    """The note in a folder that names the files Hocket has written.

    Attributes:
        run: the id of the run that made it; empty if there is no readable note.
        files: the names of the files and folders that Hocket has written there.
        texts: the allowed contents of files that are read back, by name.
        damage: the problem with the note, in words; empty if there is none.
    """

    run: str = ""
    files: frozenset[str] = frozenset()
    texts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    damage: str = ""


def is_marked(folder: Path) -> bool:
    """Return whether a folder has a readable note, and so is Hocket's."""
    return bool(_read(folder).run)


def foreign(folder: Path, names: Iterable[str]) -> list[str]:
    """Return those of `names` that a folder holds and Hocket has not written."""
    own = _read(folder).files
    return [name for name in dict.fromkeys(names) if name not in own and _holds(folder / name)]


def refuse_foreign(folder: Path, names: Iterable[str], option: str = "") -> None:
    """Refuse a folder that holds something of these names which Hocket has not written.

    Args:
        folder: the folder to write into.
        names: the files and folders to be written there.
        option: the command's option that named the folder, for the message.

    Raises:
        UserError: names the files that Hocket has not written.
    """
    others = foreign(folder, names)
    if others:
        note = _read(folder)
        lost = (
            f" ({folder / NOTE}, the list of what Hocket wrote there, is damaged: {note.damage})"
            if note.damage
            else ""
        )
        found = [f"{name}{_leading_nowhere(folder / name)}" for name in others]
        raise UserError(
            f"{option}{' ' * bool(option)}{folder} holds {some(found)}, which Hocket did not write and does not "
            f"replace{lost}: name another folder, or move {'them' if len(others) > 1 else 'it'} away"
        )


def claim(folder: Path, *names: str) -> None:
    """Note, before they are written, that these files of a folder are Hocket's.

    Raises:
        UserError: one of them is there already, and Hocket has not written it.
        OSError: the note cannot be written.
    """
    refuse_foreign(folder, names)
    adopt(folder, names)


def adopt(folder: Path, names: Collection[str]) -> None:
    """Note that these existing files are Hocket's; the caller knows it from something else."""
    note = _read(folder)
    if note.damage:
        set_aside(folder / NOTE)
    if not set(names) <= note.files or not note.run:
        _write(folder, replace(note, run=note.run or uuid.uuid4().hex, files=note.files | set(names)))


def remember(folder: Path, name: str, texts: Iterable[str]) -> None:
    """Note the allowed contents of a file before it is written, in a folder of Hocket's."""
    note, kept = _read(folder), list(dict.fromkeys(texts))
    if note.run and note.texts.get(name) != kept:
        _write(folder, replace(note, texts={**note.texts, name: kept}))


def remembered(folder: Path, name: str) -> Sequence[str]:
    """Return the allowed contents of a file; none without a readable note."""
    return _read(folder).texts.get(name, ())


def release(folder: Path) -> None:
    """Take files that were never written out of the note; remove the note if none is left."""
    note = _read(folder)
    if not note.run:
        return
    there = frozenset(name for name in note.files if os.path.lexists(folder / name))
    if not there:
        (folder / NOTE).unlink(missing_ok=True)
    elif there != note.files:
        _write(folder, replace(note, files=there))


def set_aside(path: Path) -> Path:
    """Rename an unreadable file, so that nothing of it is lost, and return the new path."""
    place = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.damaged-{place}")):
        place += 1
    path.rename(aside)
    return aside


def _holds(path: Path) -> bool:
    """Return whether there is anything, were it a link that leads nowhere; a folder that is empty is nothing."""
    if path.is_dir():
        return any(path.iterdir())
    return os.path.lexists(path)


def _leading_nowhere(path: Path) -> str:
    return (
        f" (a link to {os.readlink(path)}, which is not there)"
        if path.is_symlink() and not path.exists()
        else ""
    )


def _read(folder: Path) -> _Note:
    try:
        content = json.loads((folder / NOTE).read_bytes())
        run, files, texts = content["run"], content["files"], content.get("texts", {})
        if not (isinstance(run, str) and run and _are_names(files)):
            raise ValueError("it has other fields")
        if not (isinstance(texts, dict) and all(map(_are_names, texts.values()))):
            raise ValueError("its texts are not a mapping of names")
    except (FileNotFoundError, NotADirectoryError):
        return _Note()
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        return _Note(damage=str(error).partition("\n")[0] or type(error).__name__)
    return _Note(run, frozenset(files), texts)


def _are_names(names: object) -> bool:
    return isinstance(names, list) and all(isinstance(name, str) and name != "" for name in names)


def _write(folder: Path, note: _Note) -> None:
    content = {"run": note.run, "files": sorted(note.files), "texts": note.texts}
    write_text(folder / NOTE, json.dumps(content, indent=1) + "\n", sync=False)
