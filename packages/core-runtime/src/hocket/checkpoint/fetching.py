"""Files of a checkpoint that a rank's folder lacks, fetched from ranks that have them: hosts may share no disk."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from hocket.checkpoint.collectively import collectively
from hocket.checkpoint.files import StateFile
from hocket.checkpoint.manifest import MANIFEST, Manifest, rank_file
from hocket.disk import write_durably, write_text
from hocket.errors import DamagedError, some
from hocket.transport.lane import Lane
from hocket.transport.peer import Peer, gather

#: Bytes of a message.
_CHUNK_BYTES = 1 << 24


def needed(manifest: Manifest, path: Path, rank: int, size: int) -> list[str]:
    """Return the names of the files that a rank continues from, as far as it can know.

    Args:
        manifest: the checkpoint's.
        path: the checkpoint's directory.
        rank: this rank.
        size: the number of ranks that continue.
    """
    if manifest.ranks != size:
        return list(manifest.files)
    own = rank_file(rank)
    if own in manifest.whole_files(path):
        with contextlib.suppress(DamagedError), StateFile(path / own) as file:
            return [own, rank_file(0)] if file.left else [own]
    return [own]


def fetch(peer: Peer, lane: Lane, path: Path, leaders: Callable[[], Sequence[int]]) -> str:
    """Bring the files that ranks lack into their folders, from ranks that have them; collective.

    A folder that holds some of a checkpoint's files is one of several that hold it together; each has the manifest.

    Args:
        peer: all ranks.
        lane: of all ranks.
        path: the checkpoint's directory, which need not be there.
        leaders: finds out, on all ranks together, which is the first that has the same folder as each rank.

    Returns:
        A description of what no rank has; empty if all that is needed is there now.

    Raises:
        CheckpointError: on all ranks: a file cannot be read or written.
    """
    text = _text_of(path)
    kinds = gather(peer, hashlib.sha256(text.encode()).hexdigest() if text else "")
    having = [rank for rank, kind in enumerate(kinds) if kind]
    if not having:
        return f"no rank has {path / MANIFEST}"
    others = [rank for rank in having if kinds[rank] != kinds[having[0]]]
    if others:
        return (
            f"{path / MANIFEST} differs between ranks {having[0]} and {others[0]}: two jobs have saved into "
            "this folder: load another checkpoint"
        )
    text = gather(peer, text if peer.rank == having[0] else None)[having[0]]
    manifest = Manifest.parse(path, text)
    own = [manifest.whole_files(path), needed(manifest, path, peer.rank, peer.size)]
    gathered = gather(peer, own)
    held = [frozenset(names) for names, _ in gathered]
    wanted = [frozenset(names) for _, names in gathered]
    nowhere = set[str]().union(*wanted) - set[str]().union(*held)
    if nowhere:
        return _of_nobody(manifest, path, sorted(nowhere))
    transfers = _plan(manifest, held, wanted, leaders())
    collectively(peer, lambda: _carry_out(transfers, peer.rank, lane, path, text))
    return ""


@dataclass(frozen=True)
class _Transfer:
    """A file that goes from the folder of one rank to that of another.

    Attributes:
        name: the file's name.
        source, target: the two ranks.
        size: of the file, in bytes.
        round: of the first message.
    """

    name: str
    source: int
    target: int
    size: int
    round: int

    def messages(self) -> Iterator[tuple[int, int]]:
        """Yield the round and the number of bytes of each message."""
        for number, start in enumerate(range(0, self.size, _CHUNK_BYTES)):
            yield self.round + number, min(_CHUNK_BYTES, self.size - start)


def _text_of(path: Path) -> str:
    try:
        return (path / MANIFEST).read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _of_nobody(manifest: Manifest, path: Path, names: Sequence[str]) -> str:
    """Return the description of files that no rank has, with the hosts that had them."""
    first, *others = names
    at = path / first
    found = f"found {at.stat().st_size}" if at.exists() else "it is missing"
    described = (
        f"{at}: expected {manifest.files[first]} bytes, {found}; no rank has it{_saved_on(manifest, first)}"
    )
    return described + (
        f", nor {some([f'{each}{_saved_on(manifest, each)}' for each in others])}" if others else ""
    )


def _saved_on(manifest: Manifest, name: str) -> str:
    return f" (saved on {manifest.hosts[name]})" if name in manifest.hosts else ""


def _plan(
    manifest: Manifest,
    held: Sequence[Collection[str]],
    wanted: Sequence[Collection[str]],
    leaders: Sequence[int],
) -> list[_Transfer]:
    """Return the transfers, equal on all ranks: each folder gets a file once, by its first rank."""
    lacking: dict[int, set[str]] = {}
    for rank, leader in enumerate(leaders):
        lacking.setdefault(leader, set()).update(set(wanted[rank]) - set(held[rank]) - set(held[leader]))
    transfers: list[_Transfer] = []
    round = 0
    for name in sorted(manifest.files):
        for target in sorted(lacking):
            if name in lacking[target]:
                source = next(rank for rank, names in enumerate(held) if name in names)
                made = _Transfer(name, source, target, manifest.files[name], round)
                transfers.append(made)
                round += len(list(made.messages()))
    return transfers


def _carry_out(transfers: Sequence[_Transfer], rank: int, lane: Lane, path: Path, text: str) -> None:
    """Send and receive this rank's files, in the order of all: so no two ranks wait for each other.

    Raises:
        OSError: one of them cannot be read or written; the others have come all the same.
    """
    error: OSError | None = None
    for each in transfers:
        try:
            if each.source == rank:
                _send(each, lane, path / each.name)
            elif each.target == rank:
                _receive(each, lane, path / each.name, text)
        except OSError as failed:
            error = error or failed
    if error is not None:
        raise error


def _send(transfer: _Transfer, lane: Lane, path: Path) -> None:
    """Send a file; the target gets as many bytes where it cannot be read, and notices by the checksum."""
    error: OSError | None = None
    with contextlib.ExitStack() as stack:
        file: BinaryIO | None = None
        try:
            file = stack.enter_context(path.open("rb"))
        except OSError as failed:
            error = failed
        for round, size in transfer.messages():
            chunk = np.zeros(size, dtype=np.uint8)
            try:
                if file is not None:
                    file.readinto(chunk.data)  # type: ignore[attr-defined]
            except OSError as failed:
                error, file = failed, None
            lane.isend(chunk, transfer.target, round).wait()
    if error is not None:
        raise error


def _receive(transfer: _Transfer, lane: Lane, path: Path, text: str) -> None:
    """Receive a file, and write it if that is possible: the source does not wait for a disk's errors."""

    def chunks() -> Iterator[memoryview]:
        for round, size in transfer.messages():
            chunk = np.empty(size, dtype=np.uint8)
            lane.irecv(chunk, transfer.source, round).wait()
            yield chunk.data

    coming = chunks()

    def write(file: BinaryIO) -> None:
        for chunk in coming:
            file.write(chunk)

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not (path.parent / MANIFEST).exists():
            write_text(path.parent / MANIFEST, text)
        write_durably(path, write)
    finally:
        for _ in coming:
            pass
