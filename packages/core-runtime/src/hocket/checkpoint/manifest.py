"""A checkpoint's manifest, written last: a checkpoint that has one is complete."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hocket.disk import write_durably
from hocket.errors import CheckpointError, DamagedError, MissingFileError
from hocket.plain import Tree

__all__ = ["FORMAT", "MANIFEST", "Manifest", "is_own", "rank_file"]

#: The name of the file.
MANIFEST = "manifest.json"

#: Counts up with each change that an older version could not read.
FORMAT = 3


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
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        """Make the checkpoint in `folder` a complete one.

        Raises:
            CheckpointError: a rank's file is not there, or of another size than the rank says.
            OSError: the manifest cannot be written.
        """
        self.check_files(folder, "do all ranks see the same folder?")
        text = json.dumps(dataclasses.asdict(self), indent=2) + "\n"
        write_durably(folder / MANIFEST, lambda file: file.write(text.encode()))

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read a checkpoint's manifest, and check that its files are there.

        Raises:
            DamagedError: it is missing or damaged, or a file is missing or cut off.
            CheckpointError: it is of another format.
        """
        path = folder / MANIFEST
        try:
            content = json.loads(path.read_bytes())
            problem = _problem(content)
        except FileNotFoundError as error:
            raise MissingFileError(
                f"{folder} is no complete checkpoint: it has no {MANIFEST}, which is written last"
            ) from error
        except (OSError, ValueError, RecursionError) as error:
            raise DamagedError(f"{path} is damaged: {type(error).__name__}: {error}") from error
        if problem:
            raise DamagedError(f"{path} is damaged: {problem}")
        if content["format"] != FORMAT:
            by = content["versions"].get("hocket-core", "an unknown version")
            raise CheckpointError(
                f"{path}: format: found {content['format']}, written by hocket-core {by}; this version reads {FORMAT}"
            )
        manifest = cls(**content)
        manifest.check_files(folder, "the checkpoint is not all there: do all ranks share this disk?")
        return manifest

    def check_files(self, folder: Path, hint: str) -> None:
        """Raise MissingFileError if a rank's file is missing or of another size."""
        for name, size in self.files.items():
            path = folder / name
            found = path.stat().st_size if path.exists() else None
            if found != size:
                is_there = "it is missing" if found is None else f"found {found}"
                raise MissingFileError(f"{path}: expected {size} bytes, {is_there}; {hint}")


#: The description of each field, and its check.
_FIELDS: Mapping[str, tuple[str, Callable[[object], bool]]] = {
    "run": ("text", lambda value: isinstance(value, str) and value != ""),
    "step": ("a number of steps, 0 or more", lambda value: type(value) is int and value >= 0),
    "ranks": ("a number of ranks, 1 or more", lambda value: type(value) is int and value >= 1),
    "replicas_equal": ("true or false", lambda value: isinstance(value, bool)),
    "optimizer": ("text", lambda value: isinstance(value, str)),
    "strategy": ("a mapping", lambda value: isinstance(value, dict)),
    "versions": (
        "a mapping of texts",
        lambda value: isinstance(value, dict) and all(isinstance(each, str) for each in value.values()),
    ),
    "files": (
        "the size of each rank's file",
        lambda value: (
            isinstance(value, dict) and all(type(each) is int and each > 0 for each in value.values())
        ),
    ),
    "checksums": (
        "the checksum of each rank's file",
        lambda value: (
            isinstance(value, dict) and all(type(each) is int and each >= 0 for each in value.values())
        ),
    ),
    "format": ("a number", lambda value: type(value) is int),
}


def _problem(content: object) -> str:
    """Return the problem with a manifest's content, in words, or an empty text."""
    if not isinstance(content, dict):
        return f"found {_shown(content)}, expected a mapping"
    if type(content.get("format")) is int and content["format"] != FORMAT:
        return "" if isinstance(content.get("versions"), dict) else "versions: expected a mapping"
    if content.keys() != _FIELDS.keys():
        return f"found {', '.join(content)}, expected {', '.join(_FIELDS)}"
    for name, (words, is_right) in _FIELDS.items():
        if not is_right(content[name]):
            return f"{name}: found {_shown(content[name])}, expected {words}"
    for name in ("files", "checksums"):
        if content[name].keys() != set(map(rank_file, range(content["ranks"]))):
            return f"{name}: found {_shown(sorted(content[name]))}, expected one of each of {content['ranks']} ranks"
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
