"""Memory that all ranks of a host can read, in arenas: each rank maps a memfd_create(2) of every rank.

It has no name, and a small /dev/shm (64 MB in many containers) does not limit it: it lives as long as a process maps
it, however that process ends. Its pages are reserved when an arena is made, so that a limit shows as an error, and not
as a SIGBUS in the middle of training. If one rank cannot have or see the memory, all send messages.
"""

from __future__ import annotations

import logging
import mmap
import os
import platform
import uuid
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from hocket.arrays import Array
from hocket.transport.host.descriptors import Descriptor
from hocket.transport.peer import Memory, Peer, gather

#: Below this messages are faster: their waits are not Python's. (From 512 KiB on they are equals.)
SMALLEST_BYTES = 1 << 20

_log = logging.getLogger("hocket")

#: Whether what one process writes the others see in the order in which it was written: elsewhere that needs fences,
#: which neither Python nor NumPy has.
ORDERED = platform.machine() in ("x86_64", "AMD64")
_ARENA_BYTES = 1 << 20
_ALIGNMENT = 64

_arenas: weakref.WeakSet[_Arena] = weakref.WeakSet()


class _Arena(mmap.mmap):
    """The part of an arena that is this rank's; arrays in it keep it, and so the others' parts, alive.

    Attributes:
        parts: the other ranks' parts, by rank in the job, as uint8.
        address: start of this rank's part.
        name: the same on all ranks, and unique to the arena.
    """

    parts: dict[int, Array]
    address: int
    name: str


@dataclass(frozen=True)
class Shared:
    """An array in shared memory, as each of some ranks has it.

    Attributes:
        views: the arrays, flat, by rank.
        addresses: starts of the arrays in this process, by rank.
        what: dtype, size and place, the same on all ranks.
    """

    views: list[Array]
    addresses: list[int]
    what: str


class HostMemory(Memory):
    """An allocator of shared memory for all ranks of a peer, which are on one host.

    Every rank allocates the same sizes in the same order, so that places can be translated between ranks.

    Args:
        peer: the ranks, to exchange the places of their memory.
        world_ranks: the peer's ranks in the job.
    """

    def __init__(self, peer: Peer, world_ranks: Sequence[int]) -> None:
        self._peer = peer
        self._world_ranks = world_ranks
        self._current: Array = np.empty(0, dtype=np.uint8)
        self._used = 0
        #: Why memory is not shared (any more), in words; empty while it is.
        self.refused = ""

    def allocate(self, nbytes: int) -> Array:
        memory = self._allocate(nbytes)
        return super().allocate(nbytes) if memory is None else memory

    def share(self, nbytes: int) -> Sequence[Array] | None:
        own = self._allocate(nbytes)
        shared = None if own is None else self._find(own)
        return None if shared is None else shared.views

    def works_in_place(self, data: Array) -> bool:
        return data.nbytes >= SMALLEST_BYTES and self._find(data) is not None

    def _find(self, array: Array) -> Shared | None:
        return find_shared(array, self._world_ranks, self._world_ranks[self._peer.rank])

    def _allocate(self, nbytes: int) -> Array | None:
        """Return `nbytes` zeroed bytes, uint8, that the others can read; None if impossible; collective."""
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
        name = f"hocket-{uuid.uuid4().hex}"
        own, failure = _reserve(name, nbytes)
        try:
            gathered = gather(self._peer, [name, own and Descriptor.of(own), failure])
            if self._refuse([failure for _, _, failure in gathered]) or own is None:
                return None
            parts, failure = self._open([Descriptor(*descriptor) for _, descriptor, _ in gathered], nbytes)
            # From here on everybody has opened it.
            if self._refuse(gather(self._peer, failure)):
                return None
            arena = _Arena(own, nbytes)
        finally:
            if own is not None:
                os.close(own)
        arena.name, arena.parts = gathered[0][0], parts
        memory = np.frombuffer(arena, dtype=np.uint8)
        arena.address = memory.ctypes.data
        _arenas.add(arena)
        return memory

    def _open(self, descriptors: Sequence[Descriptor], nbytes: int) -> tuple[dict[int, Array], str]:
        """Map the other ranks' parts, by rank in the job; also return an error's text, or an empty one."""
        parts = {}
        try:
            for rank, descriptor in enumerate(descriptors):
                if rank != self._peer.rank:
                    parts[self._world_ranks[rank]] = _map(descriptor, nbytes)
        except OSError as error:
            whose = f"memory of rank {self._world_ranks[rank]}"
            return (
                {},
                f"{whose} cannot be opened through /proc: {error.strerror} (another container, or another user?)",
            )
        return parts, ""

    def _refuse(self, failures: Sequence[str]) -> bool:
        """Stop sharing memory if any rank has failed, with one warning; return whether one has."""
        self.refused = next(filter(None, failures), "")
        if self.refused and self._peer.rank == 0:
            _warn_once(self.refused)
        return bool(self.refused)


def find_shared(array: Array, world_ranks: Sequence[int], world_rank: int) -> Shared | None:
    """Return the arrays at `array`'s place on each of `world_ranks`, in order; None if it is not shared.

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


def why_unshared() -> str:
    """Return the reason why this process cannot share memory; empty if it can."""
    descriptor, failure = _reserve("hocket-probe", mmap.PAGESIZE)
    if descriptor is not None:
        os.close(descriptor)
    return failure


@cache
def _warn_once(why: str) -> None:
    _log.warning("ranks of this host send messages, which is slower than shared memory: %s", why)


def _reserve(name: str, nbytes: int) -> tuple[int | None, str]:
    if not ORDERED:
        return None, f"on {platform.machine()} writes of ranks to shared memory have no order"
    return reserve(name, nbytes)


def reserve(name: str, nbytes: int) -> tuple[int | None, str]:
    """Return a descriptor of `nbytes` bytes of reserved memory, or None and an error's text."""
    if not hasattr(os, "memfd_create"):
        return None, "this system has no memfd_create"
    descriptor = None
    try:
        descriptor = os.memfd_create(name)
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        if descriptor is not None:
            os.close(descriptor)
        return None, f"shared memory: {error.strerror} ({nbytes >> 20} MiB asked for)"
    return descriptor, ""


def _map(descriptor: Descriptor, nbytes: int) -> Array:
    number = descriptor.open(os.O_RDWR)
    try:
        return np.frombuffer(mmap.mmap(number, nbytes), dtype=np.uint8)
    finally:
        os.close(number)
