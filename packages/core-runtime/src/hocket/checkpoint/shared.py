"""Folders that all ranks have to share. A shared disk may show files of other hosts late."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from hocket.checkpoint.collectively import on_rank_0
from hocket.errors import CheckpointError, MissingFileError
from hocket.transport.peer import Peer, gather

__all__ = ["LATE_S", "patiently", "ranks_that_see", "require_folder", "require_shared"]

T = TypeVar("T")

# Network file systems show others' files some seconds late.
LATE_S = 5.0
_LOOK_AT_FILES_EVERY_S = 0.1


def patiently(act: Callable[[], T]) -> T:
    """Return the result of `act`, repeated until the files that it reads are there.

    Raises:
        MissingFileError: a file is still missing after `LATE_S` seconds; names this host.
    """
    end_s = time.monotonic() + LATE_S
    while True:
        try:
            return act()
        except MissingFileError as error:
            if time.monotonic() > end_s:
                raise MissingFileError(
                    f"{error} (looked for {LATE_S:g} s on {socket.gethostname()})"
                ) from error
        time.sleep(_LOOK_AT_FILES_EVERY_S)


def require_folder(path: Path) -> None:
    """Wait until this rank sees a folder that rank 0 has made.

    Raises:
        MissingFileError: it does not, after `LATE_S` seconds.
    """

    def look() -> None:
        if not _is_seen(path):
            raise MissingFileError(
                f"{path.absolute()}, which rank 0 has made, is not there: checkpoints lie on a disk that all ranks "
                "share"
            )

    patiently(look)


def require_shared(peer: Peer, folder: Path) -> None:
    """Check that all ranks see what rank 0 writes into a folder for checkpoints; collective.

    Raises:
        CheckpointError: on all ranks: some do not, or rank 0 cannot write there.
    """
    if peer.size == 1 or peer.threads.shares_process:
        return
    where, ranks = ranks_that_see(peer, folder)
    blind = [
        f"rank {rank} in {place} on {host}" for rank, (sees, host, place) in enumerate(ranks) if not sees
    ]
    if blind:
        raise CheckpointError(
            f"what rank 0 writes into {where} is not seen by {', '.join(blind[:3])}"
            f"{f' and {len(blind) - 3} more' if len(blind) > 3 else ''} (looked for {LATE_S:g} s): a folder for "
            "checkpoints lies on a disk that all ranks share"
        )


def ranks_that_see(peer: Peer, folder: Path) -> tuple[str, list[tuple[bool, str, str]]]:
    """Look for what rank 0 writes into a folder; collective.

    Returns:
        The place of rank 0 in words; and for each rank whether it sees that, its host, and the folder's place there.

    Raises:
        CheckpointError: on all ranks: rank 0 cannot write there.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()] if peer.rank == 0 else []
    probe = folder / f".hocket-{secrets.token_hex(8)}.unfinished"
    try:
        name, where = on_rank_0(peer, lambda: _write(probe))
        end_s = time.monotonic() + LATE_S
        while not (seen := _is_seen(folder / name)) and time.monotonic() < end_s:
            time.sleep(_LOOK_AT_FILES_EVERY_S)
        gathered = gather(peer, [seen, socket.gethostname(), str(folder.absolute())])
    finally:
        if peer.rank == 0:
            for remove in (probe.unlink, *(path.rmdir for path in made)):
                with contextlib.suppress(OSError):
                    remove()
    return where, [(sees, host, place) for sees, host, place in gathered]


def _write(probe: Path) -> tuple[str, str]:
    """Write a file for the others to see; return its name, and its place in words."""
    probe.parent.mkdir(parents=True, exist_ok=True)
    probe.touch()
    return probe.name, f"{probe.parent.absolute()} on {socket.gethostname()}"


def _is_seen(path: Path) -> bool:
    """Return whether a path is there, after a look at its folder, which asks the disk's host again."""
    with contextlib.suppress(OSError):
        os.listdir(path.parent)
    return path.exists()
