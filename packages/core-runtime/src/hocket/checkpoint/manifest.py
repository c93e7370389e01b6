"""A checkpoint's manifest, written last: its presence says that everything else is there."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hocket.checkpoint.disk import write_durably
from hocket.errors import CheckpointError

__all__ = ["FORMAT", "MANIFEST", "Manifest", "rank_file"]

#: The name of the file.
MANIFEST = "manifest.json"

#: Counts up with each change that an older version could not read.
FORMAT = 2


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself.

    Attributes:
        run: the id of whoever has saved, which every rank's file repeats.
        step: the session's, when it was saved.
        ranks: how many have saved.
        replicas_equal: whether all ranks' models and optimizers are the same, to the bit.
        optimizer: the class's name.
        strategy: as `Strategy.resolved` gives it.
        versions: of hocket-core, torch and the plugins that were loaded, by package.
        files: the size of each rank's file in bytes, by name.
        format: of all this.
    """

    run: str
    step: int
    ranks: int
    replicas_equal: bool
    optimizer: str
    strategy: dict[str, Any]
    versions: dict[str, str]
    files: dict[str, int]
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
            CheckpointError: it is missing, damaged or of another format, or a file is missing or cut off.
        """
        path = folder / MANIFEST
        try:
            content = json.loads(path.read_text())
            written = content["format"]
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{folder} is no complete checkpoint: it has no {MANIFEST}, which is written last"
            ) from error
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error
        if written != FORMAT:
            by = content.get("versions", {}).get("hocket-core", "an unknown version")
            raise CheckpointError(
                f"{path}: format: found {written}, written by hocket-core {by}; this version reads {FORMAT}"
            )
        try:
            manifest = cls(**content)
        except TypeError as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error
        manifest.check_files(folder, "the checkpoint is damaged: use another one")
        return manifest

    def check_files(self, folder: Path, hint: str) -> None:
        """Raise CheckpointError where a rank's file is not there, or not of its size."""
        for name, size in self.files.items():
            path = folder / name
            found = path.stat().st_size if path.exists() else None
            if found != size:
                is_there = "it is missing" if found is None else f"found {found}"
                raise CheckpointError(f"{path}: expected {size} bytes, {is_there}; {hint}")


def rank_file(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank:04d}.safetensors"
