"""A rank of the jobs of test_idioms_on_ranks.py: carries out one program after the other.

    hocket launch -n 2 idiom_rank.py FOLDER STRATEGY PROGRAM ...

FOLDER gets a file for each program: for every rank how far its numbers are from one process's, its steps, and those
of its optimizer.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from idioms.corpus import difference, ends_alone, offered, program, strategy
from idioms.side import Side

import hocket
from hocket.errors import AttachError
from hocket.training.startup import defer_dynamo
from hocket.transport.peer import gather

_TIMEOUT_S = 30.0


def main(folder: Path, chosen: str, *names: str) -> None:
    torch.set_num_threads(1)
    peer = hocket.join()
    peer.timeout_s = _TIMEOUT_S
    for name in names:
        try:
            ended = Side(strategy(chosen)).run(program(name).train)
        except AttachError as error:
            ended = Side(offered(chosen, error)).run(program(name).train)
        of_ranks = gather(peer, [difference(ended.told, ends_alone(name).told), ended.steps])
        if peer.rank == 0:
            (folder / f"{name}.json").write_text(json.dumps(of_ranks))


if __name__ == "__main__":
    defer_dynamo()
    main(Path(sys.argv[1]), *sys.argv[2:])
