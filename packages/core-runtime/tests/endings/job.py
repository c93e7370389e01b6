"""Start a program on ranks as `hocket run` does: `job.py TRANSPORT RANKS FOLDER PROGRAM ...`.

FOLDER `-` is made and removed.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import gettempdir

from hocket.launch.launching import launch
from hocket.launch.mpiexec import find_mpiexec
from hocket.launch.own_ranks import OwnRanks
from hocket.transport.job_folder import job_folder, shared_job_folder

if __name__ == "__main__":
    transport, ranks, folder, *program = sys.argv[1:]
    with ExitStack() as stack:
        pids = stack.enter_context(job_folder(Path(gettempdir()))) if folder == "-" else Path(folder)
        variables = stack.enter_context(shared_job_folder())
        starter = find_mpiexec() if transport == "mpi" else OwnRanks()
        status = launch(starter, int(ranks), program, folder=pids, environment=variables)
    sys.exit(status)
