"""Folders of checkpoints, which all ranks share, or the ranks of a host each. A shared disk may show files late."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from hocket.checkpoint.collectively import collectively, on_rank_0
from hocket.errors import CheckpointError, MissingFileError, reason, some
from hocket.transport.peer import Peer, gather
from hocket.transport.status import number_ranks

T = TypeVar("T")

_log = logging.getLogger("hocket")

# Network file systems show others' files some seconds late.
LATE_S = 5.0
_LOOK_AT_FILES_EVERY_S = 0.1
_PROBE_BYTES = 4096


@dataclass(frozen=True)
class FoundFolder:
    """A folder of checkpoints, as the ranks have found it before training.

    Attributes:
        path: its path on this rank.
        newest: for each rank that is the first with its folder, the place in words, and the name of the newest complete
            checkpoint; empty for none.
    """

    path: Path
    newest: Sequence[tuple[str, str]]


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
                f"{path.absolute()}, which rank 0 has created, is missing: name a folder that all ranks see"
            )

    patiently(look)


def leaders_of(peer: Peer, folder: Path) -> list[int]:
    """Return for each rank the first rank that has the same folder for checkpoints; collective.

    Rank 0 says in a line which ranks have folders of their own.

    Raises:
        CheckpointError: on all ranks: one of them cannot write there.
    """
    if peer.size == 1:
        return [0]
    where, ranks = ranks_that_see(peer, folder)
    blind = [rank for rank, (sees, _, _) in enumerate(ranks) if not sees]
    if not blind:
        return [0] * peer.size
    leaders = _leaders_among(peer, folder, blind, [host for _, host, _ in ranks])
    if peer.rank == 0:
        each = [
            f"{number_ranks([rank for rank, leader in enumerate(leaders) if leader == first])} on {ranks[first][1]}"
            for first in sorted({*leaders} - {0})
        ]
        _log.warning(
            "%s is not visible to %s, so each host keeps the files of its own ranks; session.load fetches missing "
            "files from other hosts",
            where,
            some(each),
        )
    return leaders


def _leaders_among(peer: Peer, folder: Path, blind: Sequence[int], hosts: Sequence[str]) -> list[int]:
    """Return for each rank the first rank with the same folder, where some do not see rank 0's; collective."""
    token = on_rank_0(peer, lambda: secrets.token_hex(8))
    probes = {rank: folder / f".hocket-{token}-{rank}.unfinished" for rank in blind}
    is_blind, made = peer.rank in probes, _absent(folder)
    try:
        collectively(peer, lambda: _write(probes[peer.rank]) if is_blind else None)
        neighbours = [rank for rank in blind if hosts[rank] == hosts[peer.rank]] if is_blind else []
        end_s = time.monotonic() + LATE_S
        while not all(_is_seen(probes[rank]) for rank in neighbours) and time.monotonic() < end_s:
            time.sleep(_LOOK_AT_FILES_EVERY_S)
        own = min(rank for rank in blind if _is_seen(probes[rank])) if is_blind else 0
        return gather(peer, own)
    finally:
        if is_blind:
            _remove(probes[peer.rank], made)


def _remove(probe: Path, made: Sequence[Path] = ()) -> None:
    """Remove a probe, and the folders that were made for it."""
    for remove in (probe.unlink, *(path.rmdir for path in made)):
        with contextlib.suppress(OSError):
            remove()


def ranks_that_see(peer: Peer, folder: Path) -> tuple[str, list[tuple[bool, str, str]]]:
    """Look for what rank 0 writes into a folder; collective.

    Returns:
        The place of rank 0 in words; and for each rank whether it sees that, its host, and the folder's place there.

    Raises:
        CheckpointError: on all ranks: rank 0 cannot write there.
    """
    made = _absent(folder) if peer.rank == 0 else []
    probe = folder / f".hocket-{secrets.token_hex(8)}.unfinished"
    try:
        name, where = on_rank_0(
            peer, lambda: [_write(probe), f"{folder.absolute()} on {socket.gethostname()}"]
        )
        end_s = time.monotonic() + LATE_S
        while not (seen := _is_seen(folder / name)) and time.monotonic() < end_s:
            time.sleep(_LOOK_AT_FILES_EVERY_S)
        gathered = gather(peer, [seen, socket.gethostname(), str(folder.absolute())])
    finally:
        if peer.rank == 0:
            _remove(probe, made)
    return where, [(sees, host, place) for sees, host, place in gathered]


def try_to_write(peer: Peer, folder: Path) -> None:
    """Write a file into a folder on each rank, and remove it; collective.

    Raises:
        CheckpointError: on all ranks: it cannot be written on one of them; names folder and host.
    """
    probe, made = folder / f".hocket-{secrets.token_hex(8)}.unfinished", _absent(folder)

    def act() -> None:
        try:
            _write(probe)
        finally:
            _remove(probe)

    try:
        collectively(peer, act)
    finally:
        _remove(probe, made)  # once no rank needs them any more


def _absent(folder: Path) -> list[Path]:
    """Return the folders that have to be made, the innermost first."""
    return [path for path in (folder, *folder.parents) if not os.path.exists(path)]


def _write(probe: Path) -> str:
    """Write a file for the others to see, which a full disk does not take; return its name."""
    try:
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(bytes(_PROBE_BYTES))
    except OSError as error:
        raise CheckpointError(
            f"{probe.parent.absolute()} on {socket.gethostname()} cannot be written: {reason(error)}: name another "
            "folder for checkpoints"
        ) from error
    return probe.name


def _is_seen(path: Path) -> bool:
    """Return whether a path is there, after a look at its folder, which asks the disk's host again."""
    with contextlib.suppress(OSError):
        os.listdir(path.parent)
    return os.path.exists(path)  # Path.exists raises where a folder may not be read
