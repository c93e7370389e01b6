"""A rank that carries out what rank 0 reads from standard input, a line `[module, function, args]` at a time,
until an empty one: mpiexec does not pass on that its own input has ended."""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from typing import Any

from hocket.transport import mpi

# A rank whose neighbour failed gives up, so that the failure can be told.
_TIMEOUT_S = 20.0
_BETWEEN_S = 600.0


def main() -> None:
    peer = mpi.join()
    peer.timeout_s = _TIMEOUT_S
    while True:
        line = sys.stdin.readline() if peer.rank == 0 else ""
        command = peer.allgather_bytes(line.encode(), _BETWEEN_S)[0]
        if not command.strip():
            return
        module, name, args = json.loads(command)
        told = peer.allgather_bytes(json.dumps(_carry_out(peer, module, name, args)).encode(), _BETWEEN_S)
        if peer.rank == 0:
            print(json.dumps([json.loads(answer) for answer in told]), flush=True)


def _carry_out(peer: mpi.MPIPeer, module: str, name: str, args: list[Any]) -> dict[str, Any]:
    try:
        return {"result": getattr(importlib.import_module(module), name)(peer, *args)}
    except Exception:
        return {"error": f"rank {peer.rank}: {traceback.format_exc()}"}


if __name__ == "__main__":
    main()
