"""Bodies of the transport's contract, carried out where a call of MPI takes few bytes, as it takes 2 GiB at most."""

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
