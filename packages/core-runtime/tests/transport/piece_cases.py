"""Bodies of the transport's contract elsewhere: MPI in pieces, as it takes 2 GiB at most, and ways between hosts."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from hocket.transport.peer import Peer


def in_small_pieces(peer: Peer, module: str, name: str, args: list[Any]) -> Any:
    """Carry out `name` of `module` in pieces of 4 KiB."""
    from hocket.transport.mpi import pieces

    most, pieces.MOST_BYTES = pieces.MOST_BYTES, 4096
    try:
        return getattr(import_module(module), name)(peer, *args)
    finally:
        pieces.MOST_BYTES = most


def by_sockets(peer: Peer, module: str, name: str, args: list[Any]) -> Any:
    """Carry out `name` of `module` with messages by TCP, as between hosts."""
    wire = peer.wire  # type: ignore[attr-defined]
    near = wire._connections
    peer.control.ibarrier().wait()  # type: ignore[attr-defined]
    wire._connections = {socket.rank: socket for socket in wire._sockets.values()}
    try:
        peer.control.ibarrier().wait()  # type: ignore[attr-defined]
        return getattr(import_module(module), name)(peer, *args)
    finally:
        wire._connections = near


def by_rings(peer: Peer, module: str, name: str, args: list[Any]) -> Any:
    """Carry out `name` of `module` as ranks of several hosts do, which sum by rings of messages."""
    from hocket.transport.host import HostStatus
    from hocket.transport.mpi import lane

    spans, least = HostStatus.spans_hosts, lane.RING_SHARE_BYTES
    HostStatus.spans_hosts = property(lambda self: True)  # type: ignore[method-assign, assignment]
    lane.RING_SHARE_BYTES = 1
    try:
        return getattr(import_module(module), name)(peer, *args)
    finally:
        HostStatus.spans_hosts = spans  # type: ignore[method-assign]
        lane.RING_SHARE_BYTES = least
