"""The `mpi` transport: mpi4py with THREAD_MULTIPLE, over Open MPI or MPICH.

Each lane is a communicator of its own: native collectives match by call order within it, and messages by
(source, round), the round being the tag. Nothing blocks inside MPI but Init and Finalize: calls that have no
non-blocking form (splitting a communicator, freeing one) come after a barrier that is polled with a timeout,
so that everyone is there when they are made.

MPI is initialised when this package is imported: a process that never asks for the transport never starts MPI.
"""

import os

import mpi4py

mpi4py.rc.thread_level = "multiple"
# Open MPI's UCX component prints an error for each shared window, and is not used for them.
os.environ.setdefault("OMPI_MCA_osc", "^ucx")

from hocket.transport.mpi.peer import MPIPeer  # noqa: E402
from hocket.transport.mpi.world import join  # noqa: E402

__all__ = ["MPIPeer", "join"]
