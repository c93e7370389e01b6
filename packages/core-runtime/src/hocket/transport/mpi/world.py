"""This process's endpoint in MPI's world."""

from __future__ import annotations

from mpi4py import MPI

from hocket.errors import TransportError
from hocket.transport.mpi.board import Board
from hocket.transport.mpi.endings import Endings
from hocket.transport.mpi.peer import MPIPeer

__all__ = ["join"]

_world: MPIPeer | None = None


def join() -> MPIPeer:
    """Return this process's endpoint in MPI's world, the same object each time; collective the first time.

    From then on an uncaught exception, `sys.exit` or Ctrl-C on one rank ends the whole job (see `endings`).

    Raises:
        TransportError: MPI does not allow calls from several threads.
    """
    global _world
    if _world is None:
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise TransportError(
                "MPI was initialised without THREAD_MULTIPLE: import hocket before mpi4py.MPI, or set "
                "mpi4py.rc.thread_level = 'multiple'"
            )
        comm = MPI.COMM_WORLD.Dup()
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        board = Board(comm) if comm.size > 1 else None
        _world = MPIPeer(comm, board)
        if comm.size > 1:
            Endings(_world, board).install()
    return _world
