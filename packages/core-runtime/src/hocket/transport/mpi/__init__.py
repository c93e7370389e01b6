"""The `mpi` transport: mpi4py with THREAD_MULTIPLE, over Open MPI or MPICH.

Importing this package starts nothing; MPI starts when `MPIPeer` or `join` is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hocket.transport.mpi.peer import MPIPeer, join

__all__ = ["MPIPeer", "join"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hocket.transport.mpi import peer

    return getattr(peer, name)
