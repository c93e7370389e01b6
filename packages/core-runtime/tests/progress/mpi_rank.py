"""One rank of `test_mpi`: carries out a function of `bodies` and prints what it returns."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import bodies

from hocket.transport import mpi


def _plain(told: Any) -> Any:
    return dataclasses.asdict(told) if dataclasses.is_dataclass(told) and not isinstance(told, type) else told


if __name__ == "__main__":
    peer = mpi.join()
    peer.timeout_s = 20.0
    result = getattr(bodies, sys.argv[1])(peer, *json.loads(sys.argv[2]))
    print(json.dumps({"rank": peer.rank, "told": _plain(result)}), flush=True)
    peer.allgather_bytes(b"")
