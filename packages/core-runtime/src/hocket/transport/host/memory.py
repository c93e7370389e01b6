"""Memory that all ranks of a host can read, in arenas: one file per rank and arena, mapped by all, then unlinked.

The pages are reserved when an arena is made. A file system for shared memory that is too small (64 MB in many
containers) is so found out by an error, and not by a SIGBUS in the middle of training; then everybody falls back
to messages.
"""

from __future__ import annotations

import mmap
import os
import uuid
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from hocket.transport.peer import Array

__all__ = ["FOLDER", "HostMemory", "Shared", "find_shared"]

#: Where shared memory lives on Linux.
FOLDER = Path("/dev/shm")

_ARENA_BYTES = 1 << 20
_ALIGNMENT = 64

_Map = TypeVar("_Map", bound=mmap.mmap)

_arenas: weakref.WeakSet[_Arena] = weakref.WeakSet()


class _Arena(mmap.mmap):
    """This rank's part of an arena; arrays made from it keep it, and so the others' parts, alive.

    Attributes:
        parts: the other ranks' parts, by rank in the job, as uint8.
        address: where this rank's part begins.
        name: the same on all ranks, and no other arena's.
    """

    parts: dict[int, Array]
    address: int
    name: str


@dataclass(frozen=True)
class Shared:
    """An array in shared memory, as each of some ranks has it.

    Attributes:
        views: the arrays, flat, by rank.
        addresses: where the arrays begin, in this process, by rank.
        what: dtype, size and place, the same on all ranks.
    """

    views: list[Array]
    addresses: list[int]
    what: str


class _Members(Protocol):
    """Whose memory is shared: a peer, seen from here."""

    rank: int
    size: int

    def gather(self, value: Any) -> list[Any]: ...

    def world_rank_of(self, rank: int) -> int: ...


class HostMemory:
    """Allocates for all ranks of a peer, which are on one host.

    Every rank allocates the same sizes in the same order, so that places can be translated between ranks.
    """

    def __init__(self, members: _Members) -> None:
        self._members = members
        self._current: Array = np.empty(0, dtype=np.uint8)
        self._used = 0
        #: Why memory is not shared (any more), in words; empty while it is.
        self.refused = ""

    def allocate(self, nbytes: int) -> Array | None:
        """Return `nbytes` zeroed bytes [uint8] that the others can read, None where there are none; collective."""
        if self.refused:
            return None
        start = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        if start + nbytes > self._current.size:
            arena = self._arena(max(nbytes, _ARENA_BYTES))
            if arena is None:
                return None
            self._current, start = arena, 0
        self._used = start + nbytes
        return self._current[start : start + nbytes]

    def _arena(self, nbytes: int) -> Array | None:
        path = FOLDER / f"hocket-{uuid.uuid4().hex}"
        try:
            told = self._members.gather([str(path), _reserve(path, nbytes)])
            paths, failures = zip(*told, strict=True)
            if any(failures):
                self.refused = next(filter(None, failures))
                return None
            arena = _map(_Arena, path, nbytes)
            arena.name = Path(paths[0]).name
            arena.parts = {
                self._members.world_rank_of(rank): np.frombuffer(
                    _map(mmap.mmap, name, nbytes), dtype=np.uint8
                )
                for rank, name in enumerate(paths)
                if rank != self._members.rank
            }
            self._members.gather(None)  # everybody has opened it: the name can go
        finally:
            path.unlink(missing_ok=True)
        own = np.frombuffer(arena, dtype=np.uint8)
        arena.address = own.ctypes.data
        _arenas.add(arena)
        return own


def find_shared(array: Array, world_ranks: Sequence[int], world_rank: int) -> Shared | None:
    """Return what lies at `array`'s place on each of `world_ranks`, in their order, or None if it is not shared.

    Args:
        array: this rank's, contiguous, from `HostMemory.allocate`.
        world_ranks: ranks in the job.
        world_rank: this rank in the job.
    """
    address = array.__array_interface__["data"][0]
    for arena in _arenas:
        start = address - arena.address
        if start >= 0 and start + array.nbytes <= len(arena):
            if any(rank != world_rank and rank not in arena.parts for rank in world_ranks):
                return None
            flat = array.reshape(-1)
            views = [
                flat
                if rank == world_rank
                else arena.parts[rank][start : start + array.nbytes].view(array.dtype)
                for rank in world_ranks
            ]
            addresses = [view.ctypes.data for view in views]
            return Shared(views, addresses, f"{flat.dtype}[{flat.size}] at {arena.name}+{start}")
    return None


def _reserve(path: Path, nbytes: int) -> str:
    """Create a file of `nbytes` bytes that are really there; return what went wrong, or nothing."""
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
        finally:
            os.close(descriptor)
    except OSError as error:
        return f"{FOLDER}: {error.strerror} ({nbytes >> 20} MiB asked for)"
    return ""


def _map(kind: type[_Map], path: str | Path, nbytes: int) -> _Map:
    descriptor = os.open(path, os.O_RDWR)
    try:
        return kind(descriptor, nbytes)
    finally:
        os.close(descriptor)
