"""The partial allreduce as a component of strategies.

Source: eager-SGD (Li et al.), Alg. 2: in each step a local gradient goes into a partial allreduce, and the optimizer
steps with the result divided by P.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from hocket.api import (
    Channel,
    Choices,
    Collective,
    CollectiveTraits,
    Cost,
    Ends,
    draws,
    schedule,
)
from hocket_eager.initiative import is_coordinated, num_notices
from hocket_eager.messages import TRAILER_BYTES
from hocket_eager.rules import Delivery, Quorum, QuorumRules

if TYPE_CHECKING:
    from hocket.api import Array, NetworkModel, Peer, ProgressEngine, Segment, Topology
    from hocket_eager.partial_sum import PartialSum

_NOTICE_BYTES = 8


class Algorithm(StrEnum):
    """Algorithms that form the sum by messages."""

    RECURSIVE_DOUBLING = "recursive_doubling"
    RING = "ring"
    STAR = "star"


@dataclass(frozen=True)
class PartialAllreduce(Collective):
    """A partial allreduce: the rank that starts a round sums the contributions that are ready, and waits for none.

    A gradient that comes too late for a round goes into the next, so nothing is lost. Each contribution counts 1/P,
    however many ranks contribute, and nothing is counted twice. Each segment has a round for each step. A late rank
    takes part in the rounds that it misses, without its application, and is handed the newest result at once until it
    has caught up. Candidates are drawn per round, the same for all segments.

    Parameters are summed as distances from outer parameters (`outer`), with `missed: sum`. A rank's distance counts 1/P
    whenever it comes. Outer parameters are equal on all ranks that have come to equally many rounds.

    Attributes:
        candidates: m, the number of candidates: ranks drawn for each round, at most all; null for all.
        starts: a round starts when the `first` or the `last` candidate arrives. In the paper, solo is the `first` of
            all ranks, and majority has a single candidate; the `last` of all ranks is an ordinary allreduce.
        missed: the result for a rank that missed several rounds: the `newest` round, as in the paper, or the `sum` of
            all, so that replicas at the same step have received the same rounds. A step whose round was already counted
            has zero gradients; momentum and weight decay continue.
        staleness: the largest number of rounds by which a gradient may be late, 0 or more: a round waits for ranks that
            are further behind; null for no bound.
        algorithm: the algorithm that sums through messages: `recursive_doubling`, as in the paper, takes the fewest
            steps, a `ring` sends the fewest bytes, and a `star` wakes each rank only twice, which suits more ranks than
            cores.
        shared: true: the rank that starts a round reads the others' gradients from shared memory, without waking any
            rank; this needs all ranks on one host. false, or on several hosts: ranks send messages.
        seed: the seed of the draws.

    Raises:
        ValueError: a number out of its range.
    """

    candidates: int | None = 1
    starts: Quorum = Quorum.FIRST
    missed: Delivery = Delivery.NEWEST
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

    def rules(self, size: int) -> QuorumRules:
        """Return the rules by which rounds among `size` ranks start."""
        candidates = size if self.candidates is None else min(self.candidates, size)
        return QuorumRules(size, candidates, self.starts, self.staleness, self.seed)

    @property
    def traits(self) -> CollectiveTraits:
        full = self.candidates is None and self.starts is Quorum.LAST
        return CollectiveTraits(
            Ends.SAME if full or self.staleness == 0 else Ends.OWN,
            sums=True,
            needs_thread=True,
            divides_by_weight=False,
            catches_up=self.missed is Delivery.SUM,
        )

    def open(
        self, peer: Peer, segments: Sequence[Segment], progress: ProgressEngine, choices: Choices
    ) -> Channel:
        from hocket_eager.channel import PartialAllreduceChannel

        sums, close = self.open_sums(
            peer,
            progress,
            choices.name,
            [(segment.name, segment.index, segment.outgoing_array) for segment in segments],
        )
        return PartialAllreduceChannel(segments, sums, close)

    def open_sums(
        self, peer: Peer, progress: ProgressEngine, name: str, segments: Sequence[tuple[str, int, Array]]
    ) -> tuple[dict[int, PartialSum], Callable[[], None]]:
        """Open the rounds of each segment, in memory that the ranks share or by messages; collective.

        Args:
            peer: the ranks.
            progress: the progress thread, for messages.
            name: the exchange, for messages to a reader.
            segments: each segment's name, its index and an array like those that are summed, in the same order on all
                ranks.

        Returns:
            The sums by the segments' indices, and a collective call that frees the rest once they have been closed.
        """
        from hocket_eager.host import open_shared_sum
        from hocket_eager.messages import Leaving, MessageSum

        rules, missed = self.rules(peer.size), self.missed
        sums: dict[int, PartialSum] = {}
        leaving: Leaving | None = None
        for segment, index, like in segments:
            shared = None
            if self.shared:
                shared = open_shared_sum(peer, segment, like.size, like.dtype, rules, missed)
            if shared is not None:
                sums[index] = shared
                continue
            if leaving is None:
                leaving = Leaving(peer, progress, name)
            sums[index] = MessageSum(
                peer,
                progress,
                segment,
                like.size,
                like.dtype,
                rules,
                missed,
                index % peer.size,
                self.schedule_builder(),
                leaving,
            )
        end = peer.lane(f"{name} end")

        def close() -> None:
            end.ibarrier().wait()  # until then others may read this rank's memory, and add to their own
            end.close()
            if leaving is not None:
                leaving.close()

        return sums, close

    def cost(self, message_bytes: float, size: int, topology: Topology | None, network: NetworkModel) -> Cost:
        """Return the cost of the sum and of the notices, by messages.

        All ranks come at once, and one starts the round. Memory is for the send buffer, the sum, the receive buffer,
        and for where the sum's messages go.
        """
        of_sum = {
            Algorithm.RECURSIVE_DOUBLING: network.recursive_doubling_cost,
            Algorithm.RING: network.ring_cost,
            Algorithm.STAR: network.star_cost,
        }[self.algorithm]
        of_data = of_sum(message_bytes + TRAILER_BYTES, size)
        rules = self.rules(size)
        hops = (size - 1).bit_length() + (size > 1 and is_coordinated(rules))
        return Cost(
            of_data.bytes + num_notices(rules) / size * _NOTICE_BYTES,
            hops * network.message_seconds(_NOTICE_BYTES) + of_data.seconds,
            3 * message_bytes + of_sum(message_bytes, size).memory,
        )

    def schedule_builder(self) -> Callable[[int, int, Array], schedule.Schedule]:
        """Return the function that makes a rank's part of the sum."""
        if self.algorithm is Algorithm.RING:
            return schedule.ring_allreduce
        if self.algorithm is Algorithm.STAR:
            return lambda rank, size, data: schedule.tree_allreduce(rank, size, data, arity=max(size - 1, 1))
        return schedule.recursive_doubling_allreduce
