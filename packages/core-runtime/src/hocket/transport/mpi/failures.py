"""Which ranks have died, where MPI can tell: Open MPI 5 started with `--with-ft ulfm`, as `hocket run` does.

Elsewhere the launcher ends all ranks when one has died, before they could notice.

Source: the User Level Failure Mitigation proposal to the MPI Forum (W. Bland et al., "Post-failure recovery of MPI
communication capability", IJHPCA 2013). Measured with Open MPI 5.0.11 on one host: a look takes 2 us, and a killed
rank is known after 0.1 s; one that exits with a status other than 0 is not told of at all, so the launcher ends the
job then (see `launching`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from hocket.errors import PeerLostError, TransportError
from hocket.transport.mpi.stall import number_ranks

__all__ = ["Failures"]

_LOOK_EVERY_S = 0.1
_ULFM_VARIABLE = "OMPI_MCA_mpi_ft_enable"


class Failures:
    """The dead among the job's ranks.

    Args:
        comm: an mpi4py communicator over all of them.
    """

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._can_tell = os.environ.get(_ULFM_VARIABLE) in ("1", "true")
        self._next_look_s = 0.0

    def check(self, where: Callable[[], str]) -> None:
        """Look whether a rank has died, at most ten times a second.

        Args:
            where: who asks, and what it waits for.

        Raises:
            PeerLostError: one has.
        """
        now_s = time.monotonic()
        if self._can_tell and now_s >= self._next_look_s:
            self._next_look_s = now_s + _LOOK_EVERY_S
            dead = self._dead()
            if dead:
                raise _lost(where(), dead)

    def explain(self, where: str, error: MPI.Exception) -> TransportError:
        """Return what an error of MPI's own means: PeerLostError if a rank has died."""
        dead = self._dead() if self._can_tell else []
        return _lost(where, dead) if dead else TransportError(f"{where}: {error.Get_error_string()}")

    def _dead(self) -> list[int]:
        """Return the ranks in the job that have died, in the order in which that became known."""
        MPI.COMM_SELF.Iprobe()  # what has happened becomes known in calls that make progress, as this one does
        failed, everyone = self._comm.Get_failed(), self._comm.Get_group()
        ranks: list[int] = MPI.Group.Translate_ranks(failed, None, everyone) if failed.size else []
        failed.Free()
        everyone.Free()
        return ranks


def _lost(where: str, dead: list[int]) -> PeerLostError:
    return PeerLostError(f"{where}: {number_ranks(dead)} {'has' if len(dead) == 1 else 'have'} died")
