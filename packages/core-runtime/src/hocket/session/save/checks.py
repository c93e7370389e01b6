"""Checks that a checkpoint is of this session: its run, step, strategy, model, optimizer and place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hocket.checkpoint.files import StateFile, describe
from hocket.checkpoint.manifest import MANIFEST, Manifest
from hocket.checkpoint.tree import flatten
from hocket.errors import CheckpointError, DamagedError
from hocket.plain import Stateful, flattened
from hocket.session.save.module_state import comparable, not_persistent
from hocket.session.save.saving import place_of

if TYPE_CHECKING:
    from hocket.session.engine_session import EngineSession


def of_this_place(session: EngineSession, files: Sequence[StateFile]) -> Sequence[StateFile]:
    """Return the files of ranks that held the same part of a replica as this rank.

    Raises:
        CheckpointError: replicas were sharded over another number of ranks.
    """
    place, size = place_of(session)
    saved = [file.read("session").get("island", [0, 1]) for file in files]
    for file, (_, saved_size) in zip(files, saved, strict=True):
        if saved_size != size:
            raise CheckpointError(
                f"{file.path} was saved by {_islands(saved_size)}, but this session has {_islands(size)}: shard the "
                "model as before. To change shards, save with torch.distributed.checkpoint within session.consensus()"
            )
    found = [file for file, (saved_place, _) in zip(files, saved, strict=True) if saved_place == place]
    if not found:
        raise CheckpointError(
            f"{files[0].path.parent} has no file for this rank, which is at place {place} of its island: start the "
            "ranks as when it was saved"
        )
    return found


def require_fit(
    session: EngineSession, manifest: Manifest, file: StateFile, more: Mapping[str, Stateful]
) -> None:
    """Refuse a checkpoint of another session, before any change."""
    where = file.path.parent
    if manifest.ranks == session.size:
        _compare(f"{where}: strategy", flattened(session.describe()), flattened(manifest.strategy))
    _compare(f"{where}: optimizer", {"": session.optimizers.kind}, {"": manifest.optimizer})
    expected = {name: describe(tensor) for name, tensor in flatten({"model": session.tensors()})[1].items()}
    found = {name: file.describe(name) for name in file.names("model")}
    if session.places_buffers:
        passing = {*not_persistent(session.model), *file.read("modules")["not_persistent"]}
        expected, found = comparable(expected, found, passing)
    same = manifest.ranks == session.size
    _compare(
        f"{file.path}",
        expected,
        found,
        also="" if same else f", on {manifest.ranks} ranks instead of {session.size}",
    )
    if more.keys() != set(file.keys("more")):
        saved, given = (", ".join(sorted(names)) or "nothing" for names in (file.keys("more"), more))
        raise CheckpointError(
            f"{where} holds {saved} besides model and optimizer, but session.load got {given}: give it the objects "
            "that were saved, by the same names"
        )


def _islands(size: int) -> str:
    return "ranks with whole models" if size == 1 else f"islands of {size} ranks"


def require_run(manifest: Manifest, file: StateFile) -> None:
    """Refuse a checkpoint that another job has written a part of."""
    if file.run != manifest.run:
        raise DamagedError(
            f"{file.path} is of run {file.run}, and {file.path.parent / MANIFEST} of run {manifest.run}: two jobs "
            "wrote into one checkpoint, or files were moved"
        )
    step = file.read("session")["step"]
    if step != manifest.step:
        raise DamagedError(
            f"{file.path} was saved at step {step}, but {file.path.parent / MANIFEST} at step {manifest.step}: files "
            "of two checkpoints were mixed"
        )


def _compare(what: str, expected: Mapping[str, object], found: Mapping[str, object], also: str = "") -> None:
    differing = [key for key in {**expected, **found} if expected.get(key) != found.get(key)]
    if differing:
        key = differing[0]
        others = f" ({len(differing) - 1} more differ)" if len(differing) > 1 else ""
        raise CheckpointError(
            f"{what}{key and ': '}{key}: this session has {expected.get(key, 'nothing')}, the checkpoint "
            f"{found.get(key, 'nothing')}{others}: continue with the saved setting{also}, or start again in another "
            "folder"
        )
