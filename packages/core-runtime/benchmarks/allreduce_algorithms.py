"""Every algorithm of allreduce for some sizes, and what `auto` takes: over the transport at hand, or on virtual ranks.

    python packages/core-runtime/benchmarks/allreduce_algorithms.py --virtual 2 4 8 16 32 64
    tools/netlab --hosts 4 --rate 100mbit run -n 4 -- .venv/bin/python \\
        packages/core-runtime/benchmarks/allreduce_algorithms.py --bytes 1e6 25e6

Milliseconds from a barrier to the end on the slowest rank, the median of rounds in which all take turns, beginning with
another in each; on virtual ranks of the virtual clock. The last column is `auto`'s time as a share of the best's.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial

import torch

from hocket.collective.allreduce import Allreduce, AllreduceAlgorithm
from hocket.collective.api import Choices
from hocket.launch.joining import join
from hocket.progress import InlineProgress
from hocket.segment.partition import Model, named_spans, partition
from hocket.segment.segment import Segment, allocate
from hocket.transport.peer import Peer, gather
from hocket.transport.virtual import VirtualWorld

_ORDER = (
    AllreduceAlgorithm.AUTO,
    *(algorithm for algorithm in AllreduceAlgorithm if algorithm is not AllreduceAlgorithm.AUTO),
)


def measured(peer: Peer, nbytes: int, repeats: int) -> tuple[dict[AllreduceAlgorithm, float], str]:
    """Return each algorithm's seconds for `nbytes` bytes, and what `auto` says that it took; collective."""
    progress = InlineProgress()
    spans = partition(named_spans([("p", torch.zeros(max(nbytes // 4, 1)))]), Model())[0]
    numel, dtype = spans[-1].padded_numel, torch.float32
    segment = Segment(
        "timed", 0, spans, *(allocate(peer, numel, dtype, torch.device("cpu")) for _ in range(2))
    )
    segment.outgoing.fill_(1.0)
    choices = Choices("timed", "gradients")
    channels = {
        algorithm: Allreduce(algorithm).open(peer, [segment], progress, choices) for algorithm in _ORDER
    }
    lane = peer.lane("together")
    seconds: dict[AllreduceAlgorithm, list[float]] = {algorithm: [] for algorithm in _ORDER}
    for round in range(repeats + 1):
        turn = round % len(_ORDER)
        for algorithm in _ORDER[turn:] + _ORDER[:turn]:
            lane.ibarrier().wait()
            lane.ibarrier().wait()
            start_s = peer.clock.now()
            channels[algorithm].start([segment], round).wait()
            seconds[algorithm].append(peer.clock.now() - start_s)
            assert float(segment.incoming[0]) == peer.size
    told = gather(peer, [seconds[algorithm][1:] for algorithm in _ORDER])
    slowest = [[max(times) for times in zip(*ranks, strict=True)] for ranks in zip(*told, strict=True)]
    auto = channels[AllreduceAlgorithm.AUTO].carried_by[0]
    assert isinstance(auto, Allreduce)
    for channel in channels.values():
        channel.close()
    lane.close()
    progress.close()
    medians = {a: statistics.median(s) for a, s in zip(_ORDER, slowest, strict=True)}
    return medians, str(auto.algorithm)


def row(label: str, seconds: dict[AllreduceAlgorithm, float], chosen: str) -> str:
    """Return a line of the table."""
    best = min(second for algorithm, second in seconds.items() if algorithm is not AllreduceAlgorithm.AUTO)
    cells = [f"{1e3 * seconds[algorithm]:.4g}" for algorithm in _ORDER]
    return f"| {label} | {' | '.join(cells)} | {chosen} | {seconds[AllreduceAlgorithm.AUTO] / best:.2f} |"


def main() -> None:
    """Print the table on rank 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--virtual", nargs="+", type=int, metavar="RANKS", help="numbers of virtual ranks")
    parser.add_argument("--bytes", nargs="+", type=float, default=[1e3, 32e3, 1e6, 25e6])
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    head = f"| ranks, bytes | {' | '.join(_ORDER)} | auto takes | auto / best |"
    lines = [head, "|---" * (len(_ORDER) + 3) + "|"]
    if given.virtual:
        for size in given.virtual:
            for nbytes in given.bytes:
                body = partial(measured_here, int(nbytes), 1)
                lines.append(row(f"{size}, {nbytes:,.0f}", *VirtualWorld(size).run(body)[0]))
        print("\n".join(lines))
        return
    with join() as peer:
        for nbytes in given.bytes:
            lines.append(row(f"{peer.size}, {nbytes:,.0f}", *measured(peer, int(nbytes), given.repeats)))
        if peer.rank == 0:
            print("\n".join(lines))


def measured_here(nbytes: int, repeats: int) -> tuple[dict[AllreduceAlgorithm, float], str]:
    """Return `measured` on the peer that this virtual rank has."""
    return measured(join(), nbytes, repeats)


if __name__ == "__main__":
    main()
