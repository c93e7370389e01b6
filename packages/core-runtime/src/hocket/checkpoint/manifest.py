"""A checkpoint's manifest, written last: a checkpoint that has one is complete."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from hocket.disk import write_durably
from hocket.errors import CheckpointError, DamagedError, MissingFileError, reason
from hocket.plain import Tree

#: The name of the file.
MANIFEST = "manifest.json"

#: Counts up with each change that an older version could not read.
FORMAT = 4

#: The format before, which named no hosts.
_WITHOUT_HOSTS = 3


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint: its run, step, ranks, versions and files.

    Attributes:
        run: the id of the run that saved it, which every rank's file repeats.
        step: the session's step when it was saved.
        ranks: the number of ranks that saved.
        replicas_equal: True if all ranks' models and optimizers are the same, bit for bit.
        optimizer: the name of the optimizer's class.
        strategy: as `Strategy.resolved` gives it.
        versions: the versions of hocket-core, torch and the loaded plugins, by package.
        files: the size of each rank's file in bytes, by name.
        checksums: the CRC-32 of each rank's file, by name.
        hosts: the host that each rank's file was written on, by name; empty if that is unknown.
        format: the version of this format.
    """

    run: str
    step: int
    ranks: int
    replicas_equal: bool
    optimizer: str
    strategy: Tree
    versions: dict[str, str]
    files: dict[str, int]
    checksums: dict[str, int]
    hosts: dict[str, str]
    format: int = FORMAT

    def write(self, folder: Path, names: Collection[str] | None = None) -> None:
        """Make the checkpoint in `folder` a complete one.

        Args:
            folder: the checkpoint's directory.
            names: the files that are in it; all where None.

        Raises:
            MissingFileError: one of them is not there, or of another size than the rank says.
            OSError: the manifest cannot be written.
        """
        self.check_files(folder, "do all ranks see the same folder?", names)
        text = json.dumps(dataclasses.asdict(self), indent=2) + "\n"
        write_durably(folder / MANIFEST, lambda file: file.write(text.encode()))

    @classmethod
    def read(cls, folder: Path, names: Collection[str] | None = None) -> Manifest:
        """Read a checkpoint's manifest, and check that its files are there.

        Args:
            folder: the checkpoint's directory.
            names: the files to look for; all where None.

        Raises:
            DamagedError: it is missing or damaged, or a file is missing or cut off.
            CheckpointError: it is of another format.
        """
        path = folder / MANIFEST
        try:
            text = path.read_text()
        except FileNotFoundError as error:
            raise MissingFileError(
                f"{folder} is not a complete checkpoint: it lacks {MANIFEST}, the file that is written last, so its "
                "save was interrupted, or is not over; use another checkpoint"
            ) from error
        except OSError as error:
            raise DamagedError(f"{path} cannot be read: {reason(error)}") from error
        except ValueError as error:
            raise DamagedError(f"{path} is damaged: {type(error).__name__}: {error}") from error
        manifest = cls.parse(folder, text)
        manifest.check_files(folder, "the checkpoint lacks files: do all ranks share this disk?", names)
        return manifest

    @classmethod
    def parse(cls, folder: Path, text: str) -> Manifest:
        """Return the manifest with this text; errors name it as that of a folder.

        Raises:
            DamagedError: it is damaged.
            CheckpointError: it is of another format.
        """
        path = folder / MANIFEST
        try:
            content = json.loads(text)
            problem = _problem(content)
        except (ValueError, RecursionError) as error:
            raise DamagedError(f"{path} is damaged: {type(error).__name__}: {error}") from error
        if problem:
            raise DamagedError(f"{path} is damaged: {problem}")
        if content["format"] not in (FORMAT, _WITHOUT_HOSTS):
            by = content["versions"].get("hocket-core", "an unknown version")
            raise CheckpointError(
                f"{path} has format {content['format']}, written by hocket-core {by}, but this version reads {FORMAT}"
            )
        return cls(**{"hosts": {}, **content})

    def whole_files(self, folder: Path) -> list[str]:
        """Return the names of the files that are in a folder, and of the right size."""
        return [name for name in self.files if _size_of(folder / name) == self.files[name]]

    def check_files(self, folder: Path, hint: str, names: Collection[str] | None = None) -> None:
        """Raise MissingFileError if a rank's file, or one of `names`, is missing or of another size."""
        for name in self.files if names is None else names:
            path, size = folder / name, self.files[name]
            found = _size_of(path)
            if found != size:
                is_there = "it is missing" if found is None else f"found {found}"
                raise MissingFileError(f"{path}: expected {size} bytes, {is_there}; {hint}")


def _size_of(path: Path) -> int | None:
    return path.stat().st_size if path.exists() else None


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_number(value: object, least: int) -> bool:
    return type(value) is int and value >= least


def _all_are(is_right: Callable[[object], bool], value: object) -> bool:
    return isinstance(value, dict) and all(map(is_right, value.values()))


#: The description of each field, and its check.
_FIELDS: Mapping[str, tuple[str, Callable[[object], bool]]] = {
    "run": ("text", lambda value: isinstance(value, str) and value != ""),
    "step": ("a number of steps, 0 or more", lambda value: _is_number(value, 0)),
    "ranks": ("a number of ranks, 1 or more", lambda value: _is_number(value, 1)),
    "replicas_equal": ("true or false", lambda value: isinstance(value, bool)),
    "optimizer": ("text", _is_text),
    "strategy": ("a mapping", lambda value: isinstance(value, dict)),
    "versions": ("a mapping of texts", lambda value: _all_are(_is_text, value)),
    "files": (
        "the size of each rank's file",
        lambda value: _all_are(lambda each: _is_number(each, 1), value),
    ),
    "checksums": (
        "the checksum of each rank's file",
        lambda value: _all_are(lambda each: _is_number(each, 0), value),
    ),
    "hosts": ("the hosts of files", lambda value: _all_are(_is_text, value)),
    "format": ("a number", lambda value: type(value) is int),
}


def _problem(content: object) -> str:
    """Return the problem with a manifest's content, in words, or an empty text."""
    if not isinstance(content, dict):
        return f"found {_shown(content)}, expected a mapping"
    if type(content.get("format")) is int and content["format"] not in (FORMAT, _WITHOUT_HOSTS):
        return "" if isinstance(content.get("versions"), dict) else "versions: expected a mapping"
    content = {"hosts": {}, **content} if content.get("format") == _WITHOUT_HOSTS else content
    if content.keys() != _FIELDS.keys():
        return f"found {', '.join(content)}, expected {', '.join(_FIELDS)}"
    for name, (words, is_right) in _FIELDS.items():
        if not is_right(content[name]):
            return f"{name}: found {_shown(content[name])}, expected {words}"
    for name in ("files", "checksums"):
        if content[name].keys() != set(map(rank_file, range(content["ranks"]))):
            return (
                f"{name}: found {_shown(sorted(content[name]))}, expected one for each of "
                f"{content['ranks']} ranks"
            )
    return ""


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def is_own(folder: Path) -> bool:
    """Return whether a folder's manifest is one that Hocket has written, and can be read."""
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return not _problem(content)


def rank_file(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank:04d}.safetensors"
