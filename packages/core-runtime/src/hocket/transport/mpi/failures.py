"""The dead ranks of a job, where MPI detects them: Open MPI 5 with `--with-ft ulfm`.

Elsewhere the launcher ends all ranks when one has died, before they could notice.

Source: the User Level Failure Mitigation proposal to the MPI Forum (W. Bland et al., "Post-failure recovery of MPI
communication capability", IJHPCA 2013). Measured with Open MPI 5.0.11 on one host: a look takes 2 us, and a killed
rank is known after 0.1 s; one that exits with a status other than 0 is not reported at all, so the launcher ends the
job then (see `launching`).
"""

from __future__ import annotations

import os

from mpi4py import MPI

from hocket.transport.host import Failures, StatusBoard

_ULFM_VARIABLE = "OMPI_MCA_mpi_ft_enable"


class MPIFailures(Failures):
    """The dead among the job's ranks, as ULFM reports them.

    Args:
        comm: an mpi4py communicator over all of them.
        board: the status board, which gets this rank's state during looks.
    """

    def __init__(self, comm: MPI.Comm, board: StatusBoard | None = None) -> None:
        self._comm = comm
        self._board = board
        self._can_tell = os.environ.get(_ULFM_VARIABLE) in ("1", "true")

    def dead(self) -> list[int]:
        if self._board is not None:
            self._board.publish_lasting_state()
        if not self._can_tell:
            return []
        MPI.COMM_SELF.Iprobe()  # what has happened becomes known in calls that make progress, as this one does
        failed, everyone = self._comm.Get_failed(), self._comm.Get_group()
        ranks: list[int] = MPI.Group.Translate_ranks(failed, None, everyone) if failed.size else []
        failed.Free()
        everyone.Free()
        return ranks
