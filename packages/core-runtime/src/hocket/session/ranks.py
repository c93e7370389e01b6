"""The ranks that a session is attached on, and where they are."""

from __future__ import annotations

from dataclasses import dataclass

from hocket.strategy.placement import Placement
from hocket.transport.peer import Peer

__all__ = ["Ranks", "find_ranks"]


@dataclass(frozen=True)
class Ranks:
    """This rank's endpoints.

    Attributes:
        peer: among all ranks.
        host: among those of this rank's host, whose memory can be shared; `peer` where there is one host.
        placement: which host each rank is on.
    """

    peer: Peer
    host: Peer
    placement: Placement


def find_ranks(peer: Peer) -> Ranks:
    """Find out where the ranks of `peer` are; collective."""
    placement = Placement.of([name.decode() for name in peer.allgather_bytes(peer.memory.host_name.encode())])
    own = placement.hosts[peer.rank]
    neighbours = [rank for rank, host in enumerate(placement.hosts) if host == own]
    host = peer if len(neighbours) == peer.size else peer.group(neighbours)
    assert host is not None  # this rank is its own neighbour
    return Ranks(peer, host, placement)
