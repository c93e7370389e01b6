"""Start a program on ranks as `hocket run` does: `job.py RANKS FOLDER PROGRAM ...`."""

from __future__ import annotations

import sys
from pathlib import Path

from hocket.transport.launching import find_mpiexec, launch

if __name__ == "__main__":
    ranks, folder, *program = sys.argv[1:]
    sys.exit(launch(find_mpiexec(), int(ranks), program, folder=Path(folder)))
