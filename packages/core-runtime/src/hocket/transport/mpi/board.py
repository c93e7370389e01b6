"""The status board of an MPI job; over several hosts it is in a store that rank 0 runs."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hocket.transport.host import StatusBoard
from hocket.transport.launchers import PORTS_VARIABLE
from hocket.transport.meeting.addresses import Address, host_addresses, network_host
from hocket.transport.meeting.board import JobBoard
from hocket.transport.meeting.rendezvous import parse_ports

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

# Reaching a store takes no longer where no firewall drops what is sent.
_REACHING_BOARD_S = 2.0
_KEY = "job"


def open_board(comm: MPI.Comm) -> StatusBoard | None:
    """Return the job's board; collective. None for a job of one rank.

    The states of ranks on other hosts stay unknown if some rank does not reach rank 0's store.

    Args:
        comm: an mpi4py communicator over all ranks.

    Raises:
        UserError: HOCKET_PORTS is not a range of ports.
    """
    if comm.size == 1:
        return None
    if len(set(comm.allgather(network_host()))) > 1 and (store := _open_store(comm)) is not None:
        from hocket.transport.meeting.store import StoreEntries

        return JobBoard(comm.rank, comm.size, comm.allgather, StoreEntries(store))
    return StatusBoard(comm.rank, comm.allgather)


def _open_store(comm: MPI.Comm) -> TCPStore | None:
    """Return the store that rank 0 runs; None, on all ranks alike, if some rank does not reach it."""
    store: TCPStore | None = None
    place = None
    if comm.rank == 0 and (store := _serve()) is not None:
        token = secrets.token_hex()
        store.set(_KEY, token)
        place = ([socket.gethostname(), *host_addresses()], store.port, token)
    place = comm.bcast(place)
    if comm.rank != 0 and place is not None:
        store = _reach(*place)
    return store if all(comm.allgather(store is not None)) else None


def _serve() -> TCPStore | None:
    """Return a store on a port that a firewall lets pass; None if none is free."""
    from hocket.transport.meeting.store import serve_store

    ports = parse_ports(os.environ[PORTS_VARIABLE]) if PORTS_VARIABLE in os.environ else [0]
    for port in ports:
        with contextlib.suppress(RuntimeError):
            return serve_store(port)
    return None


def _reach(addresses: Sequence[Address], port: int, token: str) -> TCPStore | None:
    """Return the store at the first address where it answers; None if it answers at none."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # which torch exports

    for address in addresses:
        with contextlib.suppress(OSError, RuntimeError):
            socket.create_connection(
                (address, port), _REACHING_BOARD_S
            ).close()  # torch's own attempts last longer
            store = TCPStore(address, port, is_master=False, wait_for_workers=False)
            # An address may be one that each host has, such as a bridge's.
            if store.check([_KEY]) and secrets.compare_digest(store.get(_KEY), token.encode()):
                return store
    return None
