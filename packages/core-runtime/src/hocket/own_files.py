"""Which files of a folder Hocket has written: a note beside them says so, and nothing else is replaced."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hocket.disk import write_text
from hocket.errors import UserError, some

__all__ = [
    "NOTE",
    "adopt",
    "claim",
    "foreign",
    "is_marked",
    "refuse_foreign",
    "release",
    "remember",
    "remembered",
    "set_aside",
]

#: The name of the note in a folder.
NOTE = ".hocket.json"


@dataclass(frozen=True)
class _Note:
    """The note of a folder.

    Attributes:
        run: the id of the run that made it; empty where there is no note that can be read.
        files: the names of what Hocket has written there, files and folders.
        texts: by name, what a file that is read back may hold.
        damage: what is wrong with it, in words.
    """

    run: str = ""
    files: frozenset[str] = frozenset()
    texts: Mapping[str, Sequence[str]] = field(default_factory=dict)
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
        told = [f"{name}{_leading_nowhere(folder / name)}" for name in others]
        raise UserError(
            f"{option}{' ' * bool(option)}{folder} holds {some(told)}, which Hocket has not written there and does "
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
    if note.damage:
        set_aside(folder / NOTE)
    if not set(names) <= note.files or not note.run:
        _write(folder, replace(note, run=note.run or uuid.uuid4().hex, files=note.files | set(names)))


def remember(folder: Path, name: str, texts: Iterable[str]) -> None:
    """Note what a file may hold that is read back, before it is written; the folder is Hocket's."""
    note, kept = _read(folder), list(dict.fromkeys(texts))
    if note.run and note.texts.get(name) != kept:
        _write(folder, replace(note, texts={**note.texts, name: kept}))


def remembered(folder: Path, name: str) -> Sequence[str]:
    """Return what a file may hold; nothing where no note that can be read says so."""
    return _read(folder).texts.get(name, ())


def release(folder: Path) -> None:
    """Forget what has not been written after all; where that is everything, there is no note."""
    note = _read(folder)
    if not note.run:
        return
    there = frozenset(name for name in note.files if os.path.lexists(folder / name))
    if not there:
        (folder / NOTE).unlink(missing_ok=True)
    elif there != note.files:
        _write(folder, replace(note, files=there))


def set_aside(path: Path) -> Path:
    """Give what cannot be read another name beside its own, so that nothing of it is lost; return that."""
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
            raise ValueError("its texts are none")
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
