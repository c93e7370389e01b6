"""How bytes move between ranks: the contract in `peer`, and the transports `mpi`, `virtual` and `single`."""

from hocket.transport.joining import join
from hocket.transport.peer import Array, Lane, Peer, Request

__all__ = ["Array", "Lane", "Peer", "Request", "join"]
