"""Ranks of which one is killed in the middle of a round: `killed.py PATH` starts them, as `hocket run` does."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from hocket.errors import PeerLostError
from hocket.launch.launching import launch
from hocket.launch.mpiexec import find_mpiexec
from hocket.progress import ThreadProgress
from hocket.transport import mpi
from hocket.transport.job_notes import note_pid
from hocket.transport.reduction import TreeSum
from hocket_eager import PartialAllreduce
from hocket_eager.send_buffer import SendBuffer

# Of three ranks the second only hands its part on, and adds nothing.
RANKS, VICTIM, ROUND = 3, 2, 5


def rank(path: str) -> None:
    """Take part in rounds; the victim dies within one, while the others wait for it."""
    peer = mpi.join()
    note_pid(peer.rank)
    peer.timeout_s = 20.0
    like = np.ones(1000, np.float32)
    progress = ThreadProgress()
    # The victim starts the round that it dies in, if it is on time.
    collective = PartialAllreduce(candidates=None, shared=path != "messages")
    sums, _ = collective.open_sums(peer, progress, "gradients.0", [("gradients.0[0]", 0, like)])
    for round in range(ROUND + 10):
        if round == ROUND and peer.rank == VICTIM:
            die_in_round(path)
        elif round == ROUND:
            time.sleep(0.5)  # computing
        try:
            sums[0].propose(like, round)
            sums[0].wait(round)
        except PeerLostError as error:
            os.write(1, f"rank {peer.rank} is told: {error}\n".encode())
            time.sleep(1.0)  # so that all can say so before this rank ends the job
            raise
        sums[0].fetch(round, np.empty_like(like))


def die_in_round(path: str) -> None:
    """Let the next round that takes this process's part, or adds it up, be its end."""

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if path == "messages":
        SendBuffer.take = die  # type: ignore[method-assign, assignment]
    else:
        TreeSum.__call__ = die  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        rank(sys.argv[2])
    else:
        with tempfile.TemporaryDirectory() as folder:
            program = [sys.executable, __file__, "--rank", sys.argv[1]]
            sys.exit(launch(find_mpiexec(), RANKS, program, folder=Path(folder)))
