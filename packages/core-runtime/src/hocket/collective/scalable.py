"""The sum of all ranks' sparse contributions among any number of ranks for the bytes of a few messages.

A segment is cut into regions, one for each rank, its owner. Each rank sends every owner what it has selected there; the
owner adds, and selects again, so that all regions together keep about as many elements as one rank's message has; the
survivors are gathered. What a rank has sent and no survivor carries goes back into its residual.

p ranks, messages of k elements. A share is k / p elements:

    1.5 shares   from each rank to each owner; what is beyond stays with its sender, the smallest first
    1 share      from each owner to everyone; what is beyond goes back to its senders, the smallest first

so a rank sends 2.5 (p - 1) / p k elements, however many ranks there are. What all ranks have sent goes before what some
have. Boundaries follow where the ranks' elements were in the round before, three parts to one part of a cut into equal
lengths, so that no region gets more than 4 / 3 of its share or becomes longer than 4 times an equal one.

Messages of a share:

    bytes        content
    8            n, how many elements, int64
    8            int64: to owners how many elements the sender had for the region, from owners how many all had
    t * b        the region's part of the trailer, in the segment's dtype
    m * b        the values, in the segment's dtype; the first n count
    m * 4        their indices in the segment, int32

m is how many elements there is room for, t the trailer's length divided by p, rounded up, b the bytes of the dtype.

Source: S. Li, T. Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning" (Ok-Topk), PPoPP 2022,
arXiv:2201.07598, section 3: split and reduce (balanced regions, rotated sends), balance and allgatherv. There,
survivors pass one threshold for all regions, which is estimated every so many steps, and are shared out evenly before
they are gathered; boundaries are agreed every so many steps. Here each region keeps its share: messages have one size,
no threshold can be wrong, and boundaries need no message, as every owner says how many elements there were for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hocket.collective.api import Channel, Outcome
from hocket.compressor.topk import INDEX_BYTES, largest_places
from hocket.plain import Tree
from hocket.transport.network import Cost, NetworkModel

if TYPE_CHECKING:
    from hocket.arrays import Array
    from hocket.collective.packing import Packing
    from hocket.compressor.api import SparseValues
    from hocket.progress import Execution, ProgressEngine
    from hocket.segment.partition import ParameterSpan
    from hocket.segment.segment import Segment
    from hocket.segment.shape import SegmentShape
    from hocket.transport.peer import Peer
    from hocket.transport.request import Request

_COUNTS_BYTES = 16
#: To owners go messages of so many shares: ranks do not select as much as each other in a region.
_ROOM = 1.5
#: So often the last round's elements count beside a cut into equal lengths.
_TRUST = 3


def share_bytes(shape: SegmentShape, num_selected: float, size: int) -> int:
    """Return the bytes of an owner's message; those to owners are 1.5 times as long.

    Args:
        shape: the segment's.
        num_selected: number of elements that a rank selects, on average.
        size: ranks.
    """
    itemsize = shape.dtype.itemsize
    numbers = -(-shape.trailer_numel // size) * itemsize
    elements = int(-(-num_selected // size)) * (itemsize + INDEX_BYTES)
    return -(-(_COUNTS_BYTES + numbers + elements) // 16) * 16


def scalable_cost(message_bytes: float, size: int, network: NetworkModel) -> Cost:
    """Return a rank's bytes sent, seconds and memory for `size` shares of `message_bytes` bytes together."""
    share = message_bytes / size
    seconds = network.message_seconds((size - 1) * _ROOM * share) if size > 1 else 0.0
    return Cost(
        (size - 1) * ScalableChannel.SHARES * share,
        seconds + network.allgather_seconds(share, size),
        (1 + 2 * _ROOM) * message_bytes,
    )


@dataclass(frozen=True, eq=False)
class _Share:
    """A message, as views of its memory.

    Attributes:
        counts: int64 [2], the number of elements, and the second number.
        trailer: [t].
        values: [m].
        indices: int32 [m].
    """

    counts: Array
    trailer: Array
    values: Array
    indices: Array

    @classmethod
    def of(cls, payload: Array, trailer_numel: int, dtype: np.dtype[np.generic]) -> _Share:
        """Return the message that lies in uint8 memory, with `trailer_numel` numbers of `dtype` before its values."""
        values_at = _COUNTS_BYTES + trailer_numel * dtype.itemsize
        room = (len(payload) - values_at) // (dtype.itemsize + INDEX_BYTES)
        indices_at = values_at + room * dtype.itemsize
        return cls(
            payload[:_COUNTS_BYTES].view(np.int64),
            payload[_COUNTS_BYTES:values_at].view(dtype),
            payload[values_at:indices_at].view(dtype),
            payload[indices_at : indices_at + room * INDEX_BYTES].view(np.int32),
        )

    @property
    def room(self) -> int:
        """Return the number of elements that there is room for."""
        return len(self.values)

    def put(self, values: Array, indices: Array, number: int) -> None:
        """Write at most `room` elements, and the second number."""
        count = len(values)
        self.counts[:] = count, number
        self.values[:count] = values
        self.indices[:count] = indices

    def elements(self) -> tuple[Array, Array]:
        """Return the valid values and indices."""
        count = int(self.counts[0])
        return self.values[:count], self.indices[:count]


class Regions:
    """The regions of one segment, which are the same on every rank.

    Attributes:
        cuts: int64 [size + 1], in elements of the parameters, padding left out: region i has those from `cuts[i]` to
            before `cuts[i + 1]`.

    Args:
        spans: the parameters whose elements messages hold, one or more.
        size: ranks.
    """

    def __init__(self, spans: Sequence[ParameterSpan], size: int) -> None:
        counts = [span.numel for span in spans]
        self._starts = np.array([span.start for span in spans], np.int64)
        self._before = np.cumsum([0, *counts[:-1]])
        self._numel, self._size = sum(counts), size
        self.cuts = np.arange(size + 1, dtype=np.int64) * self._numel // size

    @property
    def bounds(self) -> Array:
        """Return the start of each region in the segment, and the end of the last, int64 [size + 1]."""
        parameters = np.searchsorted(self._before, self.cuts, side="right") - 1
        places: Array = self._starts[parameters] + self.cuts - self._before[parameters]
        return places

    def balance(self, counts: Sequence[int]) -> None:
        """Move boundaries so that regions would have had equal numbers of elements.

        Within a region elements count as evenly spread. In whole numbers, so that all ranks get the same.

        Args:
            counts: number of elements that all ranks together have selected in each region.
        """
        widths = np.diff(self.cuts).tolist()
        total, numel, size = sum(counts), self._numel, self._size
        if not total:
            return
        weights = [
            _TRUST * count * numel + total * width for count, width in zip(counts, widths, strict=True)
        ]
        together = sum(weights)
        cuts, region, before = [0], 0, 0
        for number in range(1, size):
            # A `size`-th of all weights ends here, times `size` so that it is whole.
            goal = number * together
            while goal > size * (before + weights[region]):
                before += weights[region]
                region += 1
            inside = goal - size * before
            cuts.append(int(self.cuts[region]) + inside * widths[region] // (size * weights[region]))
        self.cuts = np.array([*cuts, numel], np.int64)


@dataclass
class _SegmentSchedule:
    """One segment's memory and schedule.

    Attributes:
        regions: the region of each rank.
        outgoing, incoming: uint8 [size, n], to owners and from the other ranks.
        gathered: uint8 [size, n], from owners, this rank's first, then those after it.
        run: carries out both phases.
        num_started: rounds so far; a run counts its own.
    """

    regions: Regions
    outgoing: Array
    incoming: Array
    gathered: Array
    run: Execution
    num_started: int = 0


class ScalableChannel(Channel):
    """A channel that puts the surviving sums of all ranks' messages into every `incoming`, with equal bits.

    An owner adds in the order of ranks.

    Args:
        peer: the ranks that take part; collective.
        segments: opened in this order on every rank, started later in any order.
        progress: carries the schedules out.
        packing: gives messages that select.
        contents: by the segment's index, the parameters that messages have elements of, and the mean number of these
            elements; the same on every rank.
        of_contributors: whether an element's mean is over those that have sent it, of contributions that count 1 / p.
    """

    #: What a rank sends to each other rank, an owner's message included, in shares.
    SHARES = 1 + _ROOM

    packing: Packing

    def __init__(
        self,
        peer: Peer,
        segments: Sequence[Segment],
        progress: ProgressEngine,
        packing: Packing,
        contents: Mapping[int, tuple[Sequence[ParameterSpan], float]],
        *,
        of_contributors: bool = False,
    ) -> None:
        super().__init__(segments, {}, packing)
        self._peer = peer
        self._of_contributors = of_contributors
        self._ways = {
            segment.index: self._open(segment, progress, *contents[segment.index]) for segment in segments
        }

    def _open(
        self, segment: Segment, progress: ProgressEngine, spans: Sequence[ParameterSpan], num_selected: float
    ) -> _SegmentSchedule:
        from hocket.progress import Execution
        from hocket.schedule import Compute, NoOp, Schedule, allgather, alltoall, chain

        rank, size = self._peer.rank, self._peer.size
        share = share_bytes(segment, num_selected, size)
        outgoing, incoming = (np.zeros((size, int(_ROOM * share)), np.uint8) for _ in range(2))
        gathered = np.zeros((size, share), np.uint8)

        def add(round: int) -> None:
            self._add(segment, way)

        summing = Schedule((NoOp("go"), Compute("add", ("go",), call=add)), ("add",), trigger="go")
        schedule = chain(
            ("to owners", alltoall(rank, size, outgoing, incoming)),
            ("sum", summing),
            ("from owners", allgather(rank, size, gathered)),
        )
        run = Execution(schedule, self._peer, progress, segment.name)
        way = _SegmentSchedule(Regions(spans, size), outgoing, incoming, gathered, run)
        return way

    def start(self, segments: Sequence[Segment], round: int) -> Request[Outcome]:
        [segment] = segments
        way = self._ways[segment.index]
        payload = self.packing.pack(segment, round)
        self.packing.packed_bytes[segment.index] = way.gathered.nbytes
        sent = self.packing.read(payload, segment, round)
        stayed = self._send(sent, segment, way)
        request = way.run.start(way.num_started)
        way.num_started += 1

        def finish(_: int) -> Outcome:
            self._receive(sent, stayed, segment, way)
            return Outcome(round, included=True, num_active=self._peer.size)

        return request.then(finish)

    @classmethod
    def bytes_to_each(cls, shape: SegmentShape, num_selected: float, size: int) -> float:
        """Return the bytes that a rank sends to each other rank, on average; arguments as of `share_bytes`."""
        return cls.SHARES * share_bytes(shape, num_selected, size)

    def _share(self, payload: Array, segment: Segment) -> _Share:
        trailer_numel = -(-segment.trailer_numel // self._peer.size)
        return _Share.of(payload, trailer_numel, segment.outgoing_array.dtype)

    def _send(self, sent: SparseValues, segment: Segment, way: _SegmentSchedule) -> Array:
        """Write the messages to owners; return the places in `sent` of elements without room."""
        size = self._peer.size
        of_region = np.searchsorted(way.regions.bounds[1:-1], sent.indices, side="right")
        order = np.argsort(of_region, kind="stable")
        ends = np.cumsum(np.bincount(of_region, minlength=size))
        stayed = []
        for region, places in enumerate(np.split(order, ends[:-1])):
            share = self._share(way.outgoing[region], segment)
            fitting = largest_places(np.abs(sent.values[places]), min(share.room, len(places)))
            stayed.append(np.delete(places, fitting))
            going = places[fitting]
            share.put(sent.values[going], sent.indices[going], len(places))
            first = region * len(share.trailer)
            part = sent.trailer[first : first + len(share.trailer)]
            share.trailer[: len(part)] = part
        return np.concatenate([np.empty(0, np.int64), *stayed])

    def _add(self, segment: Segment, way: _SegmentSchedule) -> None:
        """Add the elements received for this rank's region, and write the survivors."""
        rank, size = self._peer.rank, self._peer.size
        low, high = way.regions.bounds[rank : rank + 2].tolist()
        own = self._share(way.gathered[0], segment)
        sums, counts = np.zeros(high - low, own.values.dtype), np.zeros(high - low, np.int32)
        own.trailer[:] = 0
        number = 0
        for source in range(size):
            row = way.outgoing[rank] if source == rank else way.incoming[source]
            share = self._share(row, segment)
            values, indices = share.elements()
            places = indices - low
            sums[places] += values
            counts[places] += 1
            own.trailer[:] += share.trailer
            number += int(share.counts[1])
        kept = np.flatnonzero(counts)
        values, contributors = sums[kept], counts[kept]
        if self._of_contributors:
            values = values * size / contributors.astype(values.dtype)
        if len(kept) > own.room:
            sizes = np.abs(values)
            sizes[contributors == size] = np.inf
            surviving = largest_places(sizes, own.room)
            kept, values = kept[surviving], values[surviving]
        own.put(values, (kept + low).astype(np.int32), number)

    def _receive(self, sent: SparseValues, stayed: Array, segment: Segment, way: _SegmentSchedule) -> None:
        """Put the survivors into `incoming`, and return other elements to their residual."""
        import torch

        rank, size = self._peer.rank, self._peer.size
        shares = [self._share(way.gathered[(owner - rank) % size], segment) for owner in range(size)]
        elements = [share.elements() for share in shares]
        # Ascending, as regions are and the elements of each.
        values, indices = (np.concatenate([each[i] for each in elements]) for i in range(2))
        incoming, numel = segment.incoming, segment.numel
        incoming[:numel].zero_()
        places = torch.from_numpy(indices).to(incoming.device).long()
        incoming[:numel].index_copy_(0, places, torch.from_numpy(values).to(incoming.device))
        trailer = np.concatenate([share.trailer for share in shares])[: segment.trailer_numel]
        incoming[numel:].copy_(torch.from_numpy(trailer))
        self.packing.end(segment)
        self._take_back(sent, stayed, indices, segment)
        way.regions.balance([int(share.counts[1]) for share in shares])

    def _take_back(self, sent: SparseValues, stayed: Array, survivors: Array, segment: Segment) -> None:
        # A round with NaN or Inf was sent without what states hold.
        if not np.isfinite(sent.values).all():
            return
        lost = np.ones(len(sent.indices), bool)
        if len(survivors):
            nearest = np.minimum(np.searchsorted(survivors, sent.indices), len(survivors) - 1)
            lost = survivors[nearest] != sent.indices
        lost[stayed] = True
        if lost.any():
            self.packing.take_back(sent.indices[lost], sent.values[lost], segment)

    def close(self) -> None:
        for way in self._ways.values():
            way.run.close()

    def state_dict(self) -> Tree:
        return {"messages": super().state_dict(), "cuts": self.cuts_state()}

    def cuts_state(self) -> dict[str, list[int]]:
        """Return the boundaries of regions, by the segment's index."""
        return {str(index): way.regions.cuts.tolist() for index, way in self._ways.items()}

    def load_cuts(self, saved: Mapping[str, Sequence[int]]) -> None:
        """Continue with the boundaries that `cuts_state` returned; other segments stay as they are."""
        for index, way in self._ways.items():
            if str(index) in saved:
                way.regions.cuts = np.array(saved[str(index)], np.int64)

    def resume(self, rounds: Mapping[int, int], state: Tree | None) -> None:
        if state is not None:
            super().resume(rounds, state["messages"])
            self.load_cuts(state["cuts"])
