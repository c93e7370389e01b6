"""A rank that exchanges step after step, and at step 3 does to itself what it is told; no torch, but on devices."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hocket.arrays import Array
from hocket.errors import ConfigError
from hocket.launch.joining import join
from hocket.transport.faults import Faults, KillAt
from hocket.transport.lane import Lane
from hocket.transport.peer import Peer
from hocket.transport.request import Request

_FOR_EVER = 10**9
# Elements of float64 that the ranks of a host sum in their shared memory, without a call of MPI.
_LARGE = 1 << 19


def fail() -> None:
    raise ValueError("broken on purpose.\nThe traceback says more.")


def mistake() -> None:
    raise ConfigError("run.yaml: epochs: got 'x'")


def skip(other: Lane) -> None:
    other.ibarrier().wait()


def compute(seconds: float) -> None:
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        np.sqrt(np.arange(1000.0))


def begin(lane: Lane, operation: str, send: Array, receive: Array, round: int) -> Request:
    """Begin what all ranks do: an allreduce, or an exchange with the next rank and the one before."""
    if operation != "exchange":
        return lane.iallreduce(send, receive)
    following, before = (lane.rank + 1) % lane.size, (lane.rank - 1) % lane.size
    return lane.iexchange([(send, following)], [(receive, before)], round)


def carrier_of(peer: Peer, lanes: str) -> Peer:
    """Return the ranks as their lanes are, those of host memory or on the device that is one."""
    on_device = None if lanes == "host" else peer.on_device("cpu")
    return peer if on_device is None else on_device


def main(
    how: str, who: str, timeout_s: str, ready: Path, lanes: str = "host", operation: str = "allreduce"
) -> None:
    peer = join()
    if how == "kill":
        peer = Faults(kill=KillAt(rank=int(who), step=3)).wrap(peer)
    peer.timeout_s = float(timeout_s)
    numel = _LARGE if how == "large" else 1000
    carrier = carrier_of(peer, lanes)
    lane, other = carrier.lane("gradients.0[0]", 8 * numel), peer.lane("session")
    acts: dict[str, Callable[[], object]] = {
        "fail": fail,
        "mistake": mistake,
        "sys.exit": lambda: sys.exit(3),
        "os._exit": lambda: os._exit(4),
        "skip": lambda: skip(other),
        "compute": lambda: compute(3600.0),
        "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
        "interrupt": lambda: os.kill(os.getpid(), signal.SIGINT),
    }
    send, receive = (
        peer.memory.allocate(8 * numel).view(np.float64),
        peer.memory.allocate(8 * numel).view(np.float64),
    )
    if how == "large":
        assert peer.memory.works_in_place(receive), "no memory is shared here"
    for step in range(3 if how == "finish" else _FOR_EVER):
        if step == 3:
            (ready / str(peer.rank)).touch()
            if who in ("all", str(peer.rank)) and how == "end":
                return
            if who in ("all", str(peer.rank)) and how in acts:
                acts[how]()
            elif how == "kill" and who != str(peer.rank):
                compute(1.0)
        begin(lane, operation, send, receive, step).wait()
        peer.status.note_step(step + 1)
        time.sleep(0.01)


if __name__ == "__main__":
    how, who, timeout_s, ready, *more = sys.argv[1:]
    main(how, who, timeout_s, Path(ready), *more)
