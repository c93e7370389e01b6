"""A bell that the ranks of a host ring: a pipe, whose writing end the others open through /proc.

Measured on 2 cores: to ring and be woken takes 5 us of CPU and 11 us there and back; a UNIX datagram costs twice
that, and its queue holds as few as 10 rings. A pipe reached through /proc leaves no name behind, however a process
ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hocket.transport.signals import Connection, Doorbell, Ring

if TYPE_CHECKING:
    from hocket.transport.peer import Peer

__all__ = ["HostDoorbell"]

# The connection's key on the rank that is rung, and the ringing rank. Pipes keep so short writes whole.
_RING = struct.Struct("=II")
_OWN = _RING.pack(2**32 - 1, 0)
_READ_BYTES = 1024 * _RING.size
# poll(2) counts in milliseconds; shorter sleeps do not listen.
_POLL_RESOLUTION_S = 1e-3


class HostDoorbell(Doorbell):
    """The bell of one thread of this process, within earshot of the ranks of this host."""

    hears_everything = False

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._reading, select.POLLIN)
        self._others: dict[str, int] = {}

    def connect(self, peer: Peer, key: int) -> _HostConnection:
        host, pipe = _host(), f"/proc/{os.getpid()}/fd/{self._writing}"
        told = peer.allgather_bytes(json.dumps([host, pipe, os.readlink(pipe), key]).encode())
        bells: list[tuple[int, bytes] | None] = []
        for rank, data in enumerate(told):
            their_host, their_pipe, their_inode, their_key = json.loads(data)
            there = rank != peer.rank and their_host == host
            descriptor = self._open(their_pipe, their_inode) if there else None
            bells.append(None if descriptor is None else (descriptor, _RING.pack(their_key, peer.rank)))
        return _HostConnection(bells, peer.rank)

    def ring(self) -> None:
        _write(self._writing, _OWN)

    def wait(self, timeout_s: float | None) -> Sequence[Ring]:
        if timeout_s is not None and 0 < timeout_s < _POLL_RESOLUTION_S:
            time.sleep(timeout_s)
            timeout_s = 0
        if not self._poll.poll(None if timeout_s is None else timeout_s * 1e3):
            return ()
        rung = os.read(self._reading, _READ_BYTES)
        return [Ring(*ring) for ring in _RING.iter_unpack(rung)]

    def close(self) -> None:
        for descriptor in (self._reading, self._writing, *self._others.values()):
            os.close(descriptor)
        self._others.clear()

    def _open(self, pipe: str, inode: str) -> int | None:
        """Open another process's pipe, once; None if it cannot be opened."""
        if inode not in self._others:
            with contextlib.suppress(OSError):
                if os.readlink(pipe) == inode:
                    self._others[inode] = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        return self._others.get(inode)


class _HostConnection(Connection):
    """The bells of a peer's ranks: where to write, and what; None for those that are out of reach."""

    def __init__(self, bells: Sequence[tuple[int, bytes] | None], own_rank: int) -> None:
        self._bells = bells
        self.reaches_all = all(bell is not None for rank, bell in enumerate(bells) if rank != own_rank)

    def ring(self, rank: int) -> None:
        bell = self._bells[rank]
        if bell is not None:
            _write(*bell)


def _write(descriptor: int, ring: bytes) -> None:
    # A full pipe has 8,192 rings in it already, and who has gone needs none.
    with contextlib.suppress(BlockingIOError, BrokenPipeError):
        os.write(descriptor, ring)


def _host() -> list[str]:
    """Return what two processes have in common that see each other's /proc."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return [boot, os.readlink("/proc/self/ns/pid")]
