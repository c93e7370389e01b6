"""The folders of a session's checkpoints before training: what the first save would refuse is refused before it."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from hocket.checkpoint.collectively import on_ranks
from hocket.checkpoint.folder import complete, foreign, order
from hocket.checkpoint.shared import FoundFolder, leaders_of, try_to_write
from hocket.disk import locked
from hocket.errors import CheckpointError, some
from hocket.transport.peer import gather

if TYPE_CHECKING:
    from hocket.session.engine_session import EngineSession

_ADVICE = "continue from it with session.load, move it away, or save to another folder"


def look_at(session: EngineSession, folder: Path) -> None:
    """Find out before training which ranks have the same folder, and whether all can save there; collective.

    Raises:
        CheckpointError: on all ranks: one of them cannot write there, or another job is saving there; names the host.
    """
    peer = session.peer
    try_to_write(peer, folder)
    if not all(gather(peer, folder in session.leaders)):
        session.leaders[folder] = leaders_of(peer, folder)
    firsts = sorted({*session.leaders[folder]})
    found = on_ranks(peer, firsts, lambda: _newest_in(folder, session.run_id))
    session.found_folders.append(FoundFolder(folder, [(where, name) for where, name in found]))


def _newest_in(folder: Path, run: str) -> tuple[str, str]:
    """Return a folder's place in words, and its newest complete checkpoint's name, once no other job saves there."""
    with locked(folder, run) if folder.exists() else contextlib.nullcontext():
        names = [path.name for path in complete(folder)]
    return f"{folder.absolute()} on {socket.gethostname()}", names[-1] if names else ""


def refuse_later(session: EngineSession, advice: str = _ADVICE) -> None:
    """Refuse folders with checkpoints beyond the step at which training begins; local, the same on all ranks.

    Raises:
        CheckpointError: names the folder, its host and the checkpoint; ends with `advice`.
    """
    passed = {path.resolve() for path in session.passed_over}
    found, session.found_folders = session.found_folders, []
    for folder in found:
        for where, name in folder.newest:
            if not name:
                continue
            is_passed = (folder.path / name).resolve() in passed
            if order(Path(name))[0] > session.step and not is_passed:
                raise CheckpointError(
                    f"{where} holds {name}, which is later than step {session.step}, at which training begins: "
                    f"{advice}"
                )


def take_over(session: EngineSession, *, overwrite: bool) -> bool:
    """Refuse an earlier run's checkpoints where another host than rank 0's has some, unless they go; collective.

    Args:
        session: of a run that begins in the folder of `save_on_signal`.
        overwrite: whether they are to go, after the first step.

    Returns:
        Whether this rank has to remove those of its host.

    Raises:
        CheckpointError: on all ranks: names the host.
    """
    [folder], session.found_folders = session.found_folders, []
    _, *others = folder.newest
    for where, name in others:
        if name and not overwrite:
            raise CheckpointError(
                f"{where} holds {name} of an earlier run: continue that with `hocket resume`, name another folder with "
                "--out, or replace it with --overwrite"
            )
    first = session.leaders[folder.path][session.rank] == session.rank != 0
    kept = gather(session.peer, foreign(folder.path) if first else [])
    for rank, names in enumerate(kept):
        if names:
            raise CheckpointError(
                f"rank {rank}: {folder.path}: {some(names)} holds files that Hocket did not write, or a damaged "
                "manifest, so it is not replaced: name another folder with --out, or move it away"
            )
    return first and overwrite
