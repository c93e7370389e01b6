"""The `mpi` transport: mpi4py with THREAD_MULTIPLE, over Open MPI or MPICH.

Each lane is a communicator of its own: native collectives match by call order within it, and messages by
(source, round), the round being the tag. Nothing blocks inside MPI but Init and Finalize: calls that have no
non-blocking form (splitting a communicator, freeing one) are made after a barrier that is polled with a timeout, so
that all ranks are there.

MPI is initialised when `MPIPeer` or `join` is first asked for: a process that never does starts no MPI.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

import mpi4py

from hocket.transport import forks
from hocket.transport.job_folder import SEGMENTS_VARIABLE

if TYPE_CHECKING:
    from hocket.transport.mpi.peer import MPIPeer, join

__all__ = ["MPIPeer", "join"]

mpi4py.rc.thread_level = "multiple"


def _finalize() -> None:
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and not forks.forked and not mpi.Is_finalized():
        mpi.Finalize()


if "mpi4py.MPI" not in sys.modules and mpi4py.rc.finalize is not False:
    # mpi4py's own end of MPI comes in forked processes, too, and hangs there.
    mpi4py.rc.finalize = False
    atexit.register(_finalize)
# Over TCP, Open MPI sends messages above 64 KB only after a handshake, which queues behind whatever else is on the
# wire: 54 layers of 234 KB at 100 Mbit/s cost a step 4.5 % that way, and 0.8 % without. A larger limit than this slows
# its allreduce down.
os.environ.setdefault("OMPI_MCA_btl_tcp_eager_limit", str(256 << 10))

# Open MPI's names for its shared memory outlive a killed rank, unless they lie in a folder that the job removes; the
# launcher's host has that.
_segments = os.environ.get(SEGMENTS_VARIABLE, "")
if os.path.isdir(_segments):
    os.environ.setdefault("OMPI_MCA_btl_sm_backing_directory", _segments)


def _initialise() -> None:
    """Initialise MPI unless it is: mpi4py's own call stops all threads while it waits for a rank."""
    if "mpi4py.MPI" in sys.modules or not mpi4py.rc.initialize:
        return
    mpi4py.rc.initialize = False
    try:
        mpi = import_module("mpi4py.MPI")
    finally:
        mpi4py.rc.initialize = True
    if not mpi.Is_initialized():
        wanted = getattr(mpi, f"THREAD_{mpi4py.rc.thread_level.upper()}")
        # Found in the library that mpi4py is linked with. Errors become exceptions, as mpi4py has them.
        ctypes.CDLL(mpi.__file__).MPI_Init_thread(None, None, wanted, ctypes.byref(ctypes.c_int()))
        for comm in (mpi.COMM_WORLD, mpi.COMM_SELF):
            comm.Set_errhandler(mpi.ERRORS_RETURN)


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _initialise()
    return getattr(import_module("hocket.transport.mpi.peer"), name)
