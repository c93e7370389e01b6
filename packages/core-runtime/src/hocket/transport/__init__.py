"""Transports, which move bytes between ranks: the contract in `peer`; `mpi`, `virtual` and `single`."""

from hocket.arrays import Array
from hocket.transport.lane import Lane
from hocket.transport.peer import Peer
from hocket.transport.request import Request

__all__ = ["Array", "Lane", "Peer", "Request"]
