"""Parts that the benchmarks share: both sides in one job, taking turns, and a table of medians and ratios."""

from __future__ import annotations

import argparse
import os
import random
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from hocket.cli.wanted_ranks import WantedRanks, launch_here
from hocket.transport.peer import Peer, gather


def free_port() -> int:
    """Return a TCP port that nobody uses at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(script: str, rank: Callable[[], None], default_ranks: int = 4) -> None:
    """Be the script: start the ranks its arguments ask for, or, started as one of them (`--rank`), call `rank`."""
    parser = argparse.ArgumentParser(
        description=sys.modules["__main__"].__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ranks", nargs="?", type=int, default=default_ranks, metavar="RANKS")
    parser.add_argument("--transport", choices=("torch", "mpi"), help="by default MPI where it is installed")
    parser.add_argument("--rank", action="store_true", help="a launcher has started this process as a rank")
    given = parser.parse_args()
    if given.rank:
        rank()
        return
    program = [sys.executable, script, "--rank"]
    start_ranks(program, given.ranks, given.transport)


def start_ranks(
    program: Sequence[str], ranks: int, transport: str | None, environment: Mapping[str, str] | None = None
) -> None:
    """Run a benchmark's ranks, each with one thread.

    Args:
        program: the command of a rank.
        ranks: their number.
        transport: by default MPI where it is installed.
        environment: variables to add.

    Raises:
        SystemExit: they have failed, and their last lines say why; has their status.
    """
    variables = {"OMP_NUM_THREADS": "1", **(environment or {})}
    starter = WantedRanks(transport=transport).starter(program)
    status = launch_here(starter, ranks, program, lambda: "start it again", variables)
    if status:
        print(f"{' '.join(program[1:])}: ended with status {status}, see above", file=sys.stderr)
        sys.exit(status)


def init_gloo(peer: Peer) -> None:
    """Start torch.distributed with Gloo among the same ranks; over hosts MASTER_ADDR names rank 0's, netlab's apart."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    port = gather(peer, free_port())[0]
    # A store of our own: under torchrun an address would be taken for that of torchrun's.
    first = os.environ.get("MASTER_ADDR", "host0" if "NETLAB_HOST" in os.environ else "127.0.0.1")
    store = TCPStore(first, port, peer.size, peer.rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=peer.rank, world_size=peer.size)


def medians(
    peer: Peer,
    sides: Sequence[tuple[str, Callable[[], object]]],
    repeats: int,
    before: Callable[[str], object] = lambda name: None,
    after: Callable[[str], object] = lambda name: None,
    in_a_row: int = 1,
) -> dict[str, float]:
    """Return each side's median over repeats of the slowest rank's seconds.

    The sides take turns, so that what else the machine does hits them alike, each time in another order, as what one
    leaves in caches and heap is the next one's to begin with. Ranks start each repeat together.

    Args:
        peer: this rank's.
        sides: what is measured, with a name.
        repeats: how many turns each side has that count; one more comes first, to warm up.
        before: called with the side's name before each repeat, and not measured.
        after: the same, after each repeat.
        in_a_row: how often a side repeats in each of its turns. With more than one, the first third of a turn
            does not count: training repeats one kind of step, and after another kind's the first steps find their
            memory in no cache, or given back to the system.
    """
    barrier = peer.lane("start")
    seconds: dict[str, list[float]] = {name: [] for name, _ in sides}
    settling = in_a_row // 3
    for turn in range(repeats + 1):
        for name, side in random.Random(turn).sample(sides, len(sides)):  # the same on every rank
            for repeat in range(in_a_row):
                before(name)
                barrier.ibarrier().wait()
                start_s = time.perf_counter()
                side()
                if turn and repeat >= settling:  # the first turn warms up
                    seconds[name].append(time.perf_counter() - start_s)
                after(name)
    told = gather(peer, seconds)
    barrier.close()
    result = {}
    for name, _ in sides:
        slowest = sorted(max(repeat) for repeat in zip(*(rank[name] for rank in told), strict=True))
        result[name] = slowest[len(slowest) // 2]
    return result
