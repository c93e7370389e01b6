"""The `mpi` transport: mpi4py with THREAD_MULTIPLE, over Open MPI or MPICH."""

from hocket.transport.mpi.peer import MPIPeer, join

__all__ = ["MPIPeer", "join"]
