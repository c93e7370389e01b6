"""Hocket's allreduce against Gloo's, MPI_Allreduce and a bare polled MPI_Iallreduce, in one job.

    python packages/core-runtime/benchmarks/allreduce.py [RANKS]

Milliseconds, the slowest rank, median; float32. `in place` is Hocket's with one buffer, as sessions have it where
`Memory.works_in_place`. `ratio` is Gloo's time over the better of Hocket's two, `to MPI` that over the better of MPI's.

`copy` is what memory takes for the same: all ranks at once read and write as much as an allreduce in place does, each
its own buffer into another one; `to copy` is `in place` over it.
"""

from __future__ import annotations

import numpy as np
from measuring import init_gloo, medians, run_ranks

SIZES = [16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 100_000_000]


def rank() -> None:
    """Measure, as one of the ranks."""
    import torch
    import torch.distributed as dist

    from hocket.transport import mpi

    # After the transport, which starts MPI as it needs it.
    # isort: split
    from mpi4py import MPI

    torch.set_num_threads(1)
    peer = mpi.join()
    init_gloo(peer)
    comm = MPI.COMM_WORLD.Dup()
    if peer.rank == 0:
        print(f"{peer.size} ranks, {MPI.Get_library_version().split(',')[0]}, torch {torch.__version__}")
        print(
            f"{'bytes':>11} {'Gloo':>9} {'Allreduce':>9} {'Iallreduce':>10} {'Hocket':>9} {'in place':>9} "
            f"{'copy':>9} {'ratio':>6} {'to MPI':>6} {'to copy':>7}"
        )
    for nbytes in SIZES:
        # As a session does it: its segments lie in the transport's memory, each with a lane of its own.
        send, receive = (peer.memory.allocate(nbytes).view(np.float32) for _ in range(2))
        send[:] = receive[:] = 0  # whose sums stay 0, however often they are summed in place
        lane = peer.lane("allreduce", nbytes)
        tensor = torch.ones(nbytes // 4)

        def polled(send: np.ndarray = send, receive: np.ndarray = receive) -> None:
            request = comm.Iallreduce(send, receive)
            while not request.Test():
                pass

        sides = [
            ("gloo", lambda tensor=tensor: dist.all_reduce(tensor)),
            ("allreduce", lambda send=send, receive=receive: comm.Allreduce(send, receive)),
            ("iallreduce", polled),
            ("hocket", lambda send=send, receive=receive, lane=lane: lane.iallreduce(send, receive).wait()),
            ("in place", lambda send=send, lane=lane: lane.iallreduce(send, send).wait()),
            ("copy", lambda send=send, receive=receive: np.copyto(receive, send)),
        ]
        ms = {
            name: 1e3 * s
            for name, s in medians(
                peer, sides, 101 if nbytes < 2 << 20 else 31 if nbytes < 8 << 20 else 11
            ).items()
        }
        if peer.rank == 0:
            mpis, ours = min(ms["allreduce"], ms["iallreduce"]), min(ms["hocket"], ms["in place"])
            print(
                f"{nbytes:>11} {ms['gloo']:>9.3f} {ms['allreduce']:>9.3f} {ms['iallreduce']:>10.3f} "
                f"{ms['hocket']:>9.3f} {ms['in place']:>9.3f} {ms['copy']:>9.3f} {ms['gloo'] / ours:>6.2f} "
                f"{ours / mpis:>6.2f} {ms['in place'] / ms['copy']:>7.2f}",
                flush=True,
            )
    dist.destroy_process_group()
    peer.close()


if __name__ == "__main__":
    run_ranks(__file__, rank)
