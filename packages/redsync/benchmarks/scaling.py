"""Bytes and time of a segment's exchange among many virtual ranks: dense, sparse by a gather, and sparse and scalable.

    python packages/redsync/benchmarks/scaling.py [--ranks 8 16 32 64] [--density 0.001 0.01] [--megabytes 4]
        [--gbit 1]
    python packages/redsync/benchmarks/scaling.py --picture      # writes packages/redsync/docs/break_even.png

Every rank has normally distributed gradients of its own and residuals. Kilobytes are those that a rank sends in a
round; milliseconds those from a barrier to the end on the slowest rank, on the virtual clock, the median of rounds, in
which selecting and adding take no time. In brackets what the cost model says. The last columns are what `redsync.auto`
takes for that network, and how many elements come through a scalable round, in per cent of those of one message.

The picture has the cost model's seconds as lines, by the number of ranks, and as dots what the table in the README has.
"""

from __future__ import annotations

import argparse
import re
import statistics
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from hocket.collective.allreduce import Allreduce, AllreduceAlgorithm
from hocket.collective.api import Choices, Collective
from hocket.collective.sparse import SparseAlgorithm, SparseAllreduce
from hocket.launch.joining import join
from hocket.progress import InlineProgress
from hocket.segment.partition import Model, named_spans, partition
from hocket.segment.segment import Segment, allocate
from hocket.segment.shape import SegmentShape
from hocket.transport.network import Cost, NetworkModel
from hocket.transport.peer import gather
from hocket.transport.virtual import VirtualWorld
from hocket_redsync.choosing import choose
from hocket_redsync.cost import CostModel
from hocket_redsync.hybrid import Trimmed

PACKAGE = Path(__file__).parents[1]
#: By the name in the table; the first sends everything.
WAYS: dict[str, Collective] = {
    "dense ring": Allreduce(AllreduceAlgorithm.RING),
    "gather": SparseAllreduce(),
    "scalable": SparseAllreduce(algorithm=SparseAlgorithm.SCALABLE),
}
ROUNDS, SETTLED = 8, 4
TRAILER = 3


@dataclass(frozen=True)
class Measured:
    """The costs of a way.

    Attributes:
        bytes: sent by a rank in a round.
        seconds: the time of a round.
        survivors: elements that are not 0 in the end.
    """

    bytes: float
    seconds: float
    survivors: int


def compressor_of(way: str, density: float) -> Trimmed | None:
    """Return the compressor of a way."""
    return None if way == "dense ring" else Trimmed(density, dense_below_kb=0.0, correct_momentum=False)


def segment_of(numel: int) -> Segment:
    spans = partition(named_spans([("p", torch.zeros(numel))]), Model())[0]
    buffers = (
        allocate(join(), spans[-1].padded_numel + TRAILER, torch.float32, torch.device("cpu"))
        for _ in range(2)
    )
    return Segment("timed", 0, spans, *buffers)


def exchanged(way: str, numel: int, density: float) -> Measured:
    """Carry out rounds on this rank; collective."""
    peer, progress, collective = join(), InlineProgress(), WAYS[way]
    segment = segment_of(numel)
    generator = torch.Generator().manual_seed(peer.rank)
    choices = Choices("timed", "gradients", compressor=compressor_of(way, density))
    channel = collective.open(peer, [segment], progress, choices)
    lane, seconds = peer.lane("together"), []
    for round in range(ROUNDS):
        segment.outgoing[:numel].normal_(generator=generator)
        segment.outgoing[numel:].zero_()
        lane.ibarrier().wait()
        start_s = peer.clock.now()
        channel.start([segment], round).wait()
        seconds.append(max(gather(peer, peer.clock.now() - start_s)))
    sent = segment.wire_bytes if channel.packing is None else channel.packing.packed_bytes[0]
    nbytes = collective.cost(sent, peer.size, None, NetworkModel()).bytes
    survivors = int(segment.incoming[:numel].count_nonzero())
    channel.close()
    lane.close()
    progress.close()
    return Measured(nbytes, statistics.median(seconds[SETTLED:]), survivors)


def predicted(way: str, shape: SegmentShape, density: float, size: int, network: NetworkModel) -> Cost:
    """Return what the cost model says of a way."""
    collective = WAYS[way]
    nbytes = collective.message_bytes(compressor_of(way, density), shape, size, network)
    return collective.cost(nbytes, size, None, network)


def shape_of(numel: int) -> SegmentShape:
    spans = partition(named_spans([("p", torch.empty(numel, device="meta"))]), Model())[0]
    empty = torch.empty(spans[-1].padded_numel + TRAILER, device="cpu")
    return Segment("planned", 0, spans, empty, empty)


def chosen(shape: SegmentShape, density: float, size: int, network: NetworkModel) -> str:
    """Return what `redsync.auto` takes."""
    compressor = compressor_of("gather", density)
    assert compressor is not None
    costs = CostModel.of_network(network)
    way = choose(compressor, shape, size, costs, auto=True, algorithm=SparseAlgorithm.AUTO).way
    return "dense" if way.dense else str(way.algorithm)


def table(options: argparse.Namespace, network: NetworkModel) -> str:
    """Return the figures as Markdown."""
    lines = [
        f"| density | ranks | {' | '.join(f'{way}: kB | ms' for way in WAYS)} | auto takes | come through |",
        "|" + "---:|" * (2 * len(WAYS) + 4),
    ]
    numel = int(options.megabytes * 1e6) // 4
    shape = shape_of(numel)
    for density in options.density:
        for size in options.ranks:
            cells, came = [], ""
            for way in WAYS:
                told = VirtualWorld(size, network=network).run(partial(exchanged, way, numel, density))[0]
                cost = predicted(way, shape, density, size, network)
                cells.append(f"{told.bytes / 1e3:,.0f} | {1e3 * told.seconds:.3g} ({1e3 * cost.seconds:.3g})")
                if way == "scalable":
                    came = f"{100 * told.survivors / (density * numel):.0f} %"
            auto = chosen(shape, density, size, network)
            lines.append(f"| {100 * density:g} % | {size} | {' | '.join(cells)} | {auto} | {came} |")
            print(lines[-1], flush=True)
    return "\n".join(lines)


def picture(options: argparse.Namespace, network: NetworkModel) -> None:
    """Draw predicted and simulated seconds by the number of ranks."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    shape = shape_of(int(options.megabytes * 1e6) // 4)
    sizes = [2**i for i in range(1, 13)]
    colours = {"dense ring": "#7a7a7a", "gather": "#d98c5f", "scalable": "#2f6db5"}
    figure, both = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained", sharey=True)
    for axes, density in zip(both, options.density, strict=True):
        for place, way in enumerate(WAYS):
            seconds = [predicted(way, shape, density, size, network).seconds for size in sizes]
            axes.plot(sizes, [1e3 * each for each in seconds], color=colours[way], label=way)
            dots = simulated(density, place)
            axes.plot(dots.keys(), dots.values(), "o", color=colours[way], markersize=5)
        axes.set(xscale="log", yscale="log", xlabel="ranks")
        axes.set_title(f"{100 * density:g} % of each gradient is sent", fontsize=10, loc="left")
        axes.set_xticks(sizes[::2], [f"{size:,}" for size in sizes[::2]])
        axes.minorticks_off()
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    both[0].set_ylabel("milliseconds a round")
    both[0].legend(frameon=False, fontsize=9)
    (PACKAGE / "docs").mkdir(exist_ok=True)
    figure.savefig(PACKAGE / "docs" / "break_even.png", dpi=120)


def simulated(density: float, place: int) -> dict[int, float]:
    """Return milliseconds by ranks of the `place`-th way, as the README's table has them."""
    rows = re.findall(
        rf"^\| {100 * density:g} % \| (.+?) \|$", (PACKAGE / "README.md").read_text(), re.MULTILINE
    )
    cells = [row.split(" | ") for row in rows]
    return {int(row[0]): float(row[2 + 2 * place].split(" ")[0]) for row in cells}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--density", type=float, nargs="+", default=[0.001, 0.01])
    parser.add_argument("--megabytes", type=float, default=4.0)
    parser.add_argument("--gbit", type=float, default=1.0)
    parser.add_argument("--picture", action="store_true")
    options = parser.parse_args()
    network = replace(NetworkModel(), bandwidth_bits_per_s=options.gbit * 1e9)
    if options.picture:
        picture(options, network)
    else:
        print("\n" + table(options, network))


if __name__ == "__main__":
    main()
