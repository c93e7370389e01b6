"""The sum of all ranks' contributions on every rank, by the transport's own allreduce or by a schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from hocket.collective.api import (
    Channel,
    Choices,
    Collective,
    CollectiveTraits,
    Cost,
    Ends,
    Messages,
    Outcome,
)
from hocket.collective.packing import Packing, packing_for
from hocket.compressor.api import footprint_of
from hocket.config.component import component_name
from hocket.transport.network import NetworkModel
from hocket.transport.request import Finished

if TYPE_CHECKING:
    from hocket.arrays import Array
    from hocket.compressor.api import Compressor
    from hocket.progress import Execution, ProgressEngine
    from hocket.schedule import Schedule
    from hocket.segment.segment import Segment
    from hocket.segment.shape import SegmentShape
    from hocket.topology import Topology
    from hocket.transport.lane import Lane
    from hocket.transport.peer import Peer
    from hocket.transport.request import Request

#: (rank, size, data) -> this rank's part of summing everybody's `data` in place.
AllreduceBuilder = Callable[[int, int, "Array"], "Schedule"]


class AllreduceAlgorithm(StrEnum):
    """An algorithm that forms the sum."""

    AUTO = "auto"
    NATIVE = "native"
    RABENSEIFNER = "rabenseifner"
    RECURSIVE_DOUBLING = "recursive_doubling"
    RING = "ring"
    TREE = "tree"


@dataclass(frozen=True)
class Allreduce(Collective):
    """Every rank ends with the same mean, bit for bit.

    Of compressed parameters all ranks send the same elements, of which they end with the mean, and each keeps its own
    values of the others.

    Attributes:
        algorithm: `native` is the transport's own, and the fastest where ranks share memory. The others send
            messages, and each adds in a different order: `recursive_doubling` takes the fewest steps, `ring` sends the
            fewest bytes, `rabenseifner` as few bytes in few steps if the number of ranks is a power of two, and a
            binomial `tree` the fewest messages. `auto` chooses the fastest for each segment. When a session opens,
            ranks measure the constants of the cost model. Then they try `native`, and all algorithms whose predicted
            time is at most twice the shortest. All ranks use the same algorithm; another run, or a resumed one, may
            choose a different one. `-v` shows the choice.
    """

    algorithm: AllreduceAlgorithm = AllreduceAlgorithm.NATIVE

    @property
    def traits(self) -> CollectiveTraits:
        return CollectiveTraits(
            Ends.SAME,
            messages=Messages.SUMMED,
            sums=True,
            on_devices=self.algorithm is AllreduceAlgorithm.NATIVE,
        )

    def open(
        self, peer: Peer, segments: Sequence[Segment], progress: ProgressEngine, choices: Choices
    ) -> Channel:
        packing = packing_for(choices.compressor, segments)
        if self.algorithm is not AllreduceAlgorithm.AUTO:
            return self._open(peer, segments, progress, packing, choices)
        from hocket.collective.choosing import ChosenChannel

        collectives = [Allreduce(algorithm) for algorithm in _chosen(peer, segments, packing)]
        algorithms = [collective.algorithm for collective in collectives]

        def open_part(collective: Allreduce, own: Sequence[Segment]) -> Channel:
            return collective._open(peer, own, progress, packing, choices)

        return ChosenChannel(peer, segments, collectives, algorithms, open_part, packing, choices.name)

    def _open(
        self,
        peer: Peer,
        segments: Sequence[Segment],
        progress: ProgressEngine,
        packing: Packing | None,
        choices: Choices,
    ) -> _SummingChannel:
        if self.algorithm is AllreduceAlgorithm.NATIVE:
            return _NativeChannel(peer, segments, packing, choices)
        return _ScheduledChannel(peer, segments, progress, _builder(self.algorithm), packing, choices)

    def check_compressor(self, compressor: Compressor | None) -> None:
        answering = (AllreduceAlgorithm.NATIVE, AllreduceAlgorithm.AUTO)
        if compressor is not None and compressor.traits.answers and self.algorithm not in answering:
            raise ValueError(
                f"{component_name(compressor)} needs the sum of its first message before it sends the second, but "
                f"algorithm {self.algorithm} sums only once: use allreduce with `algorithm: native`"
            )

    def in_place(self, choices: Choices, shared: bool) -> bool:
        if choices.compressor is not None:  # what is sent and summed has buffers of its own
            return True
        # By messages MPI is up to four times slower so.
        return shared and self.algorithm in (AllreduceAlgorithm.NATIVE, AllreduceAlgorithm.AUTO)

    def cost(self, message_bytes: float, size: int, topology: Topology | None, network: NetworkModel) -> Cost:
        """Return the algorithm's cost; the transport's own counts as a ring's bytes in the better one's time."""
        if self.algorithm is AllreduceAlgorithm.AUTO:
            return min((other.cost(message_bytes, size, topology, network) for other in _FIXED), key=_seconds)
        if self.algorithm is not AllreduceAlgorithm.NATIVE:
            return _COSTS[self.algorithm](network, message_bytes, size)
        ring = network.ring_cost(message_bytes, size)
        return replace(ring, seconds=network.allreduce_seconds(message_bytes, size), memory=0.0)

    def notes(
        self,
        compressor: Compressor | None,
        shapes: Sequence[SegmentShape],
        size: int,
        network: NetworkModel,
    ) -> list[str]:
        """Return what `auto` would take on the network that is planned with."""
        if self.algorithm is not AllreduceAlgorithm.AUTO or size == 1:
            return []
        from hocket.collective.choosing import describe_choice

        sizes = [footprint_of(compressor, shape).message_bytes for shape in shapes]
        taken = [
            min(_FIXED, key=lambda other: other.cost(nbytes, size, None, network).seconds).algorithm
            for nbytes in sizes
        ]
        return [
            f"allreduce with `algorithm: auto` takes {describe_choice(taken, sizes)} among {size} ranks on "
            "the network above. When a session opens, it measures the likely algorithms, and the "
            "transport's own."
        ]


#: What `auto` chooses among, the transport's own where another is as fast.
_FIXED = [
    Allreduce(algorithm)
    for algorithm in (
        AllreduceAlgorithm.NATIVE,
        AllreduceAlgorithm.RABENSEIFNER,
        AllreduceAlgorithm.RECURSIVE_DOUBLING,
        AllreduceAlgorithm.RING,
        AllreduceAlgorithm.TREE,
    )
]


def _seconds(cost: Cost) -> float:
    return cost.seconds


def _chosen(peer: Peer, segments: Sequence[Segment], packing: Packing | None) -> list[AllreduceAlgorithm]:
    """Return the algorithm that each segment takes, the same on all ranks; collective."""
    if peer.size == 1 or (packing is not None and packing.traits.answers):
        return [AllreduceAlgorithm.NATIVE] * len(segments)
    from hocket.collective.choosing import Candidate, fastest

    sizes = [
        max(segment.outgoing_array.nbytes if packing is None else packing.capacity_bytes(segment), 8)
        for segment in segments
    ]
    candidates = {
        each.algorithm: Candidate(
            lambda nbytes, size, network, each=each: each.cost(nbytes, size, None, network),  # type: ignore[misc]
            None if each.algorithm is AllreduceAlgorithm.NATIVE else _builder(each.algorithm),
        )
        for each in _FIXED
    }
    taken = fastest(peer, sizes, candidates)
    return [taken[nbytes] for nbytes in sizes]


_COSTS: dict[AllreduceAlgorithm, Callable[[NetworkModel, float, int], Cost]] = {
    AllreduceAlgorithm.RABENSEIFNER: NetworkModel.rabenseifner_cost,
    AllreduceAlgorithm.RECURSIVE_DOUBLING: NetworkModel.recursive_doubling_cost,
    AllreduceAlgorithm.RING: NetworkModel.ring_cost,
    AllreduceAlgorithm.TREE: NetworkModel.binomial_cost,
}


def _builder(algorithm: AllreduceAlgorithm) -> AllreduceBuilder:
    from hocket import schedule

    return {
        AllreduceAlgorithm.RABENSEIFNER: schedule.rabenseifner_allreduce,
        AllreduceAlgorithm.RECURSIVE_DOUBLING: schedule.recursive_doubling_allreduce,
        AllreduceAlgorithm.RING: schedule.ring_allreduce,
        AllreduceAlgorithm.TREE: schedule.binomial_allreduce,
    }[algorithm]


class _SummingChannel(Channel):
    """A channel that unpacks sums of messages.

    Args:
        size: number of ranks that take part.
        segments, lanes: as for every channel.
        packing: whose messages are summed in compressed form; None where segments are, as they are.
        choices: the exchange's others.
    """

    def __init__(
        self,
        size: int,
        segments: Sequence[Segment],
        lanes: Mapping[int, Lane],
        packing: Packing | None,
        choices: Choices,
    ) -> None:
        super().__init__(segments, lanes, packing)
        self._size = size
        self.averages = packing is not None and choices.keeps_own

    def _unpack(self, total: Array, segment: Segment, round: int) -> Outcome:
        """Put the result of a round's messages into `incoming`."""
        assert self.packing is not None
        if self.averages:
            self.packing.put_mean(total, self._size, segment, round)
        else:
            segment.incoming.zero_()
            self.packing.add(total, 1.0, segment, round)
        return Outcome(round, included=True, num_active=self._size)


class _NativeChannel(_SummingChannel):
    """One call of the transport's allreduce for each segment."""

    def __init__(
        self, peer: Peer, segments: Sequence[Segment], packing: Packing | None, choices: Choices
    ) -> None:
        lanes = {segment.index: peer.lane(segment.name, segment.wire_bytes) for segment in segments}
        super().__init__(peer.size, segments, lanes, packing, choices)
        self._sums: dict[int, Array] = {}

    def start(self, segments: Sequence[Segment], round: int) -> Request[Outcome]:
        [segment] = segments
        lane, packing = self._lanes[segment.index], self.packing
        if packing is None:
            outcome = Outcome(round, included=True, num_active=self._size)
            return lane.iallreduce(segment.outgoing_array, segment.incoming_array).then(lambda _: outcome)
        message = packing.pack(segment, round)
        if not packing.traits.answers:
            total = self._sums.setdefault(segment.index, np.empty_like(message))
            return lane.iallreduce(message, total).then(lambda _: self._unpack(total, segment, round))
        return self._sum(message, segment, round)

    def _sum(self, message: Array, segment: Segment, round: int) -> Request[Outcome]:
        """Sum one message after the other, until the compressor has no answer to the last sum."""
        assert self.packing is not None
        packing, total = self.packing, np.empty_like(message)

        def answer(_: object) -> Request[Outcome] | Outcome:
            following = packing.answer(total, segment, round)
            if following is None:
                return self._unpack(total, segment, round)
            return self._sum(following, segment, round)

        if not message.size:  # nothing of this segment has a first message
            return Finished().then(answer)
        return self._lanes[segment.index].iallreduce(message, total).then(answer)


@dataclass
class _Sum:
    """One segment's schedule.

    Attributes:
        total: what the schedule sums in place.
        contribution: what it copies there first; set in each round.
        run: carries it out.
        num_started: rounds so far. A run counts its own, which begin at 0 where the exchange's are resumed.
    """

    total: Array
    contribution: Array
    run: Execution
    num_started: int = 0


class _ScheduledChannel(_SummingChannel):
    """A schedule for each segment, which the progress engine carries out.

    Args:
        build: the algorithm.
        packing: whose messages, of the segment's dtype, are summed in compressed form; None where segments are, as
            they are.
    """

    def __init__(
        self,
        peer: Peer,
        segments: Sequence[Segment],
        progress: ProgressEngine,
        build: AllreduceBuilder,
        packing: Packing | None,
        choices: Choices,
    ) -> None:
        super().__init__(peer.size, segments, {}, packing, choices)
        self._peer = peer
        self._sums = {segment.index: self._open(segment, progress, build) for segment in segments}

    def _open(self, segment: Segment, progress: ProgressEngine, build: AllreduceBuilder) -> _Sum:
        from hocket.progress import Execution
        from hocket.schedule import Compute, NoOp, Schedule, chain

        total = segment.incoming_array
        if self.packing is not None:
            total = np.empty(self.packing.capacity_bytes(segment) // total.itemsize, total.dtype)

        def copy(round: int) -> None:
            np.copyto(total, opened.contribution)

        begin = Schedule((NoOp("go"), Compute("copy", ("go",), call=copy)), ("copy",), trigger="go")
        schedule = chain(("begin", begin), ("sum", build(self._peer.rank, self._peer.size, total)))
        opened = _Sum(total, total, Execution(schedule, self._peer, progress, segment.name))
        return opened

    def start(self, segments: Sequence[Segment], round: int) -> Request[Outcome]:
        [segment] = segments
        opened, packing = self._sums[segment.index], self.packing
        opened.contribution = segment.outgoing_array if packing is None else packing.pack(segment, round)
        request = opened.run.start(opened.num_started)
        opened.num_started += 1

        def unpack(_: int) -> Outcome:
            if packing is not None:
                return self._unpack(opened.total, segment, round)
            return Outcome(round, included=True, num_active=self._peer.size)

        return request.then(unpack)

    def close(self) -> None:
        for opened in self._sums.values():
            opened.run.close()
