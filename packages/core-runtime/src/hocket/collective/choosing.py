"""The fastest algorithm of allreduce by size: the cost model leaves a few of them, a trial decides between these.

The model's constants are measured; a trial sees what it leaves out, too: adding, copies, and ranks that share a core.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from hocket.collective.api import Channel, Collective, Outcome
from hocket.progress import Execution, InlineProgress
from hocket.schedule import ring_allreduce
from hocket.transport.network import NetworkModel
from hocket.transport.peer import gather

if TYPE_CHECKING:
    from hocket.arrays import Array
    from hocket.collective.packing import Packing
    from hocket.schedule import Schedule
    from hocket.segment.segment import Segment
    from hocket.transport.network import Cost
    from hocket.transport.peer import Peer
    from hocket.transport.request import Request

_log = logging.getLogger("hocket")

T = TypeVar("T")
C = TypeVar("C", bound="Collective")

_MOST_REPEATS, _LONG_S = 5, 0.5
_SMALL_BYTES, _LARGE_BYTES = 1 << 10, 1 << 20
#: No more is tried: from here on seconds grow with bytes.
_MOST_BYTES = 8 << 20
#: What is predicted to be so many times slower than the best one is not tried.
_WORSE = 2.0


@dataclass(frozen=True)
class Candidate:
    """An algorithm to choose.

    Attributes:
        cost: function from bytes, ranks and the network to the predicted cost.
        build: makes its schedule; None for the transport's own, which the model cannot predict, so it is always tried.
    """

    cost: Callable[[float, int, NetworkModel], Cost]
    build: Callable[[int, int, Array], Schedule] | None


def fastest(peer: Peer, sizes: Iterable[int], candidates: Mapping[T, Candidate]) -> dict[int, T]:
    """Return the fastest candidate for each size, the same on all ranks; collective.

    Sizes up to a power of two are tried together, by the largest. The first of equal ones wins. On virtual ranks
    seconds are virtual.

    Args:
        peer: the ranks that will exchange, two or more.
        sizes: in bytes, the same on all ranks.
        candidates: at least one, in the same order on all ranks.

    Returns:
        A key of `candidates` for each size.
    """
    sizes = sorted(set(sizes))
    network = measured_network(peer)
    largest = {nbytes.bit_length(): nbytes for nbytes in sizes}
    best = {place: _fastest(peer, nbytes, candidates, network) for place, nbytes in largest.items()}
    return {nbytes: best[nbytes.bit_length()] for nbytes in sizes}


def describe_choice(algorithms: Sequence[str], sizes: Sequence[float]) -> str:
    """Return a description, e.g. `ring for 2 segments of 1 to 4.2 MB, native for 1 segment of 0.1 MB`."""
    parts = []
    for algorithm in dict.fromkeys(algorithms):
        own = sorted(nbytes / 1e6 for its, nbytes in zip(algorithms, sizes, strict=True) if its is algorithm)
        few = f"{own[0]:.3g}" if own[0] == own[-1] else f"{own[0]:.3g} to {own[-1]:.3g}"
        parts.append(f"{algorithm} for {len(own)} segment{'s' * (len(own) > 1)} of {few} MB")
    return ", ".join(parts)


class ChosenChannel(Channel):
    """A channel that passes each segment to the channel of its algorithm.

    Args:
        peer: the ranks that take part; the first logs the choice.
        segments: all of the channel.
        collectives: for each segment the collective with its algorithm, which counts its bytes.
        algorithms: their names.
        open_part: opens the channel of one of them, for the segments that take it.
        packing: of all parts.
        name: the exchange's.
    """

    def __init__(
        self,
        peer: Peer,
        segments: Sequence[Segment],
        collectives: Sequence[C],
        algorithms: Sequence[str],
        open_part: Callable[[C, list[Segment]], Channel],
        packing: Packing | None,
        name: str,
    ) -> None:
        super().__init__(segments, {}, packing)
        takers: dict[C, list[Segment]] = {}
        for segment, collective in zip(segments, collectives, strict=True):
            takers.setdefault(collective, []).append(segment)
        self._parts = [open_part(collective, own) for collective, own in takers.items()]
        self.averages = any(part.averages for part in self._parts)
        self._part_of = {segment.index: part for part in self._parts for [segment] in part.groups}
        self.carried_by = {segment.index: its for segment, its in zip(segments, collectives, strict=True)}
        if peer.rank == 0:
            sizes = [segment.outgoing_array.nbytes for segment in segments]
            _log.info("%s: algorithm auto chooses %s", name, describe_choice(algorithms, sizes))

    def start(self, segments: Sequence[Segment], round: int) -> Request[Outcome]:
        [segment] = segments
        return self._part_of[segment.index].start(segments, round)

    def close(self) -> None:
        for part in self._parts:
            part.close()


def _fastest(peer: Peer, nbytes: int, candidates: Mapping[T, Candidate], network: NetworkModel) -> T:
    predicted = {
        name: each.cost(nbytes, peer.size, network).seconds if each.build else 0.0
        for name, each in candidates.items()
    }
    most = _WORSE * min((predicted[name] for name, each in candidates.items() if each.build), default=0.0)
    tried = {
        name: _trial(peer, each.build, min(nbytes, _MOST_BYTES))
        for name, each in candidates.items()
        if predicted[name] <= most
    }
    return min(tried, key=lambda name: tried[name])


def measured_network(peer: Peer) -> NetworkModel:
    """Return a stage's latency and a link's bandwidth while all ranks sum, as a ring measures them.

    The same on all ranks, two or more; collective.
    """
    steps = 2 * (peer.size - 1)
    small_s, large_s = (_trial(peer, ring_allreduce, nbytes) for nbytes in (_SMALL_BYTES, _LARGE_BYTES))
    # Where only latency was seen, a hundredth stands for the link.
    link_s = max(large_s - small_s, large_s / 100)
    return NetworkModel(small_s / steps, 8 * steps / peer.size * (_LARGE_BYTES - _SMALL_BYTES) / link_s)


def _trial(peer: Peer, build: Callable[[int, int, Array], Schedule] | None, nbytes: int) -> float:
    """Return the median seconds of a sum of `nbytes` bytes, by a schedule or the transport's own allreduce."""
    if build is None:
        lane = peer.lane("trial of an algorithm", nbytes)
        send, receive = (peer.memory.allocate(-(-nbytes // 4) * 4).view(np.float32) for _ in range(2))
        send[:] = 0
        seconds = _seconds(peer, lambda: lane.iallreduce(send, receive).wait())
        lane.close()
        return seconds
    progress = InlineProgress()
    data = np.zeros(-(-nbytes // 4), np.float32)
    run = Execution(build(peer.rank, peer.size, data), peer, progress, "trial of an algorithm")
    rounds = iter(range(_MOST_REPEATS + 1))
    seconds = _seconds(peer, lambda: run.start(next(rounds)).wait())
    run.close()
    progress.close()
    return seconds


def _seconds(peer: Peer, exchange: Callable[[], object]) -> float:
    """Return the median seconds of rounds on the slowest rank, without the first; fewer rounds where they take long."""
    lane = peer.lane("trial begins")

    def once() -> float:
        lane.ibarrier().wait()
        start_s = peer.clock.now()
        exchange()
        slowest_s: float = max(gather(peer, peer.clock.now() - start_s))
        return slowest_s

    repeats = max(1, min(_MOST_REPEATS, int(_LONG_S / max(once(), 1e-9))))
    seconds = sorted(once() for _ in range(repeats))
    lane.close()
    return seconds[repeats // 2]
