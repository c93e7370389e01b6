"""A rank of the job of test_mpi.py: trains with one strategy after the other.

    mpiexec -n 4 python mpi_rank.py FOLDER STEPS

FOLDER holds `strategies.json`, a list of arguments for `hocket.compose`, and gets a file for each of them, by its place
in the list: for every rank its parameters, its losses and the bytes that it sent.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from trial import train

import hocket
from hocket.training.startup import defer_dynamo
from hocket.transport.peer import gather

_TIMEOUT_S = 30.0


def main(folder: Path, steps: int) -> None:
    torch.set_num_threads(1)
    peer = hocket.join()
    peer.timeout_s = _TIMEOUT_S
    for number, target in enumerate(json.loads((folder / "strategies.json").read_text())):
        told = train(hocket.compose(*target), steps)
        of_ranks = gather(peer, [told.parameters.tolist(), told.losses, told.bytes_sent])
        if peer.rank == 0:
            (folder / f"{number}.json").write_text(json.dumps(of_ranks))


if __name__ == "__main__":
    defer_dynamo()
    main(Path(sys.argv[1]), int(sys.argv[2]))
