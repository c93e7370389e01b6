"""The partial allreduce as a component of strategies.

Source: eager-SGD (Li et al.), Alg. 2: in each step a local gradient goes into a partial allreduce, and the optimizer
steps with the result divided by P.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

from hocket.api import Channel, Collective, RecursiveDoubling, Ring, draws
from hocket_eager.initiative import is_coordinated, num_notices
from hocket_eager.messages import TRAILER_BYTES
from hocket_eager.rules import Missed, Rules, Starts

if TYPE_CHECKING:
    from hocket.api import Array, Exchange, NetworkModel, Peer, ProgressEngine, Schedule, Segment, Topology

__all__ = ["Algorithm", "PartialAllreduce"]

_NOTICE_BYTES = 8


class Algorithm(StrEnum):
    """How messages form the sum."""

    RECURSIVE_DOUBLING = "recursive_doubling"
    RING = "ring"
    STAR = "star"


_COSTS = {
    Algorithm.RECURSIVE_DOUBLING: RecursiveDoubling(),
    Algorithm.RING: Ring(),
}


@dataclass(frozen=True)
class PartialAllreduce(Collective):
    """Whoever starts a round has its sum at once, in which the others take part with what they have ready.

    What comes too late for a round goes into the next, so that nothing is lost; what a rank contributes counts 1/P,
    however many do: late parts come later, and nothing is weighted twice. Each segment has a round for each step. A
    rank that is late takes part, without its application, in the rounds that it misses, and is handed the newest
    result at once until it has caught up. Candidates are drawn per round, the same for all segments.

    Attributes:
        candidates: m, how many ranks are drawn for each round; null for all. At most so many as there are.
        starts: a round starts when the `first` or the `last` of them arrives: the first of all is the paper's solo,
            the one candidate's arrival its majority, and the last of all an allreduce.
        missed: what a rank is handed that was absent from several rounds: the result of the `newest`, as in the paper,
            or the `sum` of all, so that replicas that have done the same steps have been given the same rounds.
            A step whose round came with an earlier one has zero gradients: momentum and weight decay go on.
        staleness: no gradient comes in more than so many rounds late: a round waits until all ranks are as far, 0 or
            more; null for no bound.
        algorithm: how messages form the sum: `recursive_doubling`, as in the paper, takes the fewest steps, a `ring`
            sends the fewest bytes, and a `star` wakes a rank twice only, for where there are more ranks than cores.
        shared: where all ranks are on one host, whoever starts a round takes what the others have from memory that
            they share, and wakes nobody; if not, or elsewhere, messages are sent.
        seed: of the draws.

    Raises:
        ValueError: a number out of its range.
    """

    slots: ClassVar[frozenset[str]] = frozenset({"gradients"})
    carries_messages: ClassVar[bool] = False
    needs_progress_thread: ClassVar[bool] = True
    divides_by_weight: ClassVar[bool] = False

    candidates: int | None = 1
    starts: Starts = Starts.FIRST
    missed: Missed = Missed.NEWEST
    staleness: int | None = None
    algorithm: Algorithm = Algorithm.RECURSIVE_DOUBLING
    shared: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.candidates is not None and self.candidates < 1:
            raise ValueError(f"candidates is {self.candidates}; allowed: 1 or more, or null for all ranks")
        if self.staleness is not None and self.staleness < 0:
            raise ValueError(f"staleness is {self.staleness}; allowed: 0 or more, or null for no bound")
        draws.check_seed(self.seed)

    def rules(self, size: int) -> Rules:
        """Return when rounds among `size` ranks start."""
        candidates = size if self.candidates is None else min(self.candidates, size)
        return Rules(size, candidates, self.starts, self.staleness, self.seed)

    @property
    def depends_on_time(self) -> bool:
        full = self.candidates is None and self.starts is Starts.LAST
        return not full and self.staleness != 0

    def open(
        self, peer: Peer, segments: Sequence[Segment], progress: ProgressEngine, exchange: Exchange
    ) -> Channel:
        from hocket_eager.channel import PartialAllreduceChannel
        from hocket_eager.opening import open_sums

        sums, close = open_sums(
            self,
            peer,
            progress,
            exchange.name,
            [(segment.name, segment.index, segment.outgoing_array) for segment in segments],
        )
        return PartialAllreduceChannel(sums, close)

    def contribution_scale(self, size: float) -> float:
        return 1 / size

    def results(self, values: Sequence[Hashable], leader: int) -> list[Hashable]:
        if not self.depends_on_time:
            return [(self, tuple(values))] * len(values)
        return super().results(values, leader)

    def bytes_per_round(self, message_bytes: float, size: int, topology: Topology | None) -> float:
        """Return the sum's bytes and those of the notices, by messages and with one initiator."""
        notices = num_notices(self.rules(size)) / size * _NOTICE_BYTES
        nbytes = message_bytes + TRAILER_BYTES
        if self.algorithm is Algorithm.STAR:
            return 2 * (size - 1) / size * nbytes + notices
        return _COSTS[self.algorithm].bytes_sent(nbytes, size) + notices

    def channel_bytes(self, message_bytes: float, size: int, topology: Topology | None) -> float:
        """Return what messages need: the send buffer, the sum, the receive buffer, and where the sum's messages go."""
        if self.algorithm is Algorithm.STAR:
            return (3 + (size - 1) / size) * message_bytes
        return 3 * message_bytes + _COSTS[self.algorithm].staging_bytes(message_bytes, size)

    def seconds_per_round(
        self, message_bytes: float, size: int, topology: Topology | None, network: NetworkModel
    ) -> float:
        """Return how long a round takes that all ranks come to at once."""
        nbytes = message_bytes + TRAILER_BYTES
        hops = (size - 1).bit_length() + (size > 1 and is_coordinated(self.rules(size)))
        notices = hops * network.message_seconds(_NOTICE_BYTES)
        if self.algorithm is Algorithm.STAR:
            # The centre's link carries everybody's message, one after the other, in and then out.
            return notices + 2 * (network.latency_s + (size - 1) * network.link_seconds(nbytes))
        return notices + _COSTS[self.algorithm].seconds(nbytes, size, network)

    def schedule_builder(self) -> Callable[[int, int, Array], Schedule]:
        """Return what makes a rank's part of the sum."""
        from hocket.api import recursive_doubling_allreduce, ring_allreduce, tree_allreduce

        if self.algorithm is Algorithm.RING:
            return ring_allreduce
        if self.algorithm is Algorithm.STAR:
            return lambda rank, size, data: tree_allreduce(rank, size, data, arity=max(size - 1, 1))
        return recursive_doubling_allreduce
