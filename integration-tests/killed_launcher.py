"""Starts a job of real MPI ranks as `hocket run` does, without torch: `killed_launcher.py RANKS PROGRAM ...`."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import gettempdir

from hocket.launch.launching import launch
from hocket.launch.mpiexec import find_mpiexec
from hocket.transport.job_folder import job_folder, shared_job_folder


def _main(ranks: int, *program: str) -> int:
    command = [sys.executable, *program]
    with job_folder(Path(gettempdir())) as pids, shared_job_folder() as variables:
        return launch(find_mpiexec(), ranks, command, folder=pids, environment=variables)


if __name__ == "__main__":
    sys.exit(_main(int(sys.argv[1]), *sys.argv[2:]))
