"""Pairwise averages with one other rank at a time, which answers while its training thread computes.

Source: X. Lian, W. Zhang, C. Zhang, J. Liu, "Asynchronous Decentralized Parallel Stochastic Gradient Descent", ICML
2018, arXiv:1710.06952 (AD-PSGD).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from hocket.api import (
    Channel,
    Choices,
    Collective,
    CollectiveTraits,
    Cost,
    Ends,
    FunctionRequest,
    Outcome,
    draws,
)

if TYPE_CHECKING:
    from torch import Tensor

    from hocket.api import NetworkModel, Peer, ProgressEngine, Request, Segment, Topology

_NOTICE_BYTES = 8

# Partners change from round to round; what a round costs is the mean over so many draws, at most.
_RANKS_LOOKED_AT = _ROUNDS_LOOKED_AT = 64


@dataclass(frozen=True)
class PairAverage(Collective):
    """Pairwise averages: each rank averages with a neighbour that it draws, and with each rank that draws it.

    Both become (x_i + x_j) / 2.

    No rank waits for another's training thread, but for its first values: a progress thread averages the values that
    the training thread entered last. A rank's round has ended when it has averaged with the neighbour that it has
    drawn. Its outcome holds the averagings that others begin until somebody waits for it; the next outcome holds later
    ones. So with `merge: add` a rank gets each change once, whatever it has trained meanwhile, and the mean over ranks
    is kept.

    The topology is the graph: a neighbour is one of the ranks that it sends to in the round, whatever the weights.

    Attributes:
        seed: the seed of the draws; each depends on (seed, round, segment).

    Raises:
        ValueError: a number out of its range.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        draws.check_seed(self.seed)

    @property
    def traits(self) -> CollectiveTraits:
        return CollectiveTraits(
            Ends.OPEN,
            slots=frozenset({"parameters"}),
            needs_topology=True,
            needs_thread=True,
        )

    def partner(self, topology: Topology, rank: int, size: int, round: int, segment: int) -> int | None:
        """Return the neighbour that `rank` draws; None where it has none in the round.

        Args:
            topology: the graph.
            rank, size, round, segment: as in `Topology.neighbours`.
        """
        neighbours = topology.neighbours(rank, size, round, segment).send_to
        if not neighbours:
            return None
        drawn = draws.below(np.full(size, len(neighbours)), "pairs", self.seed, round, segment)
        return neighbours[int(drawn[rank])]

    def open(
        self, peer: Peer, segments: Sequence[Segment], progress: ProgressEngine, choices: Choices
    ) -> Channel:
        assert choices.topology is not None  # the rules of composition see to it
        return PairAverageChannel(self, choices.topology, peer, segments, progress)

    def cost(self, message_bytes: float, size: int, topology: Topology | None, network: NetworkModel) -> Cost:
        """Return the cost of a rank's averagings, one after the other, where all ranks start a round at once.

        Memory is for the shared copy, its changes, and what is sent and received.
        """
        assert topology is not None
        wishes, averagings = _averagings(self, topology, size)
        notices_s = 2 * network.message_seconds(_NOTICE_BYTES)
        return Cost(
            averagings * message_bytes + (averagings + wishes / 2) * _NOTICE_BYTES,
            averagings * (notices_s + network.message_seconds(message_bytes)),
            4 * message_bytes,
        )


@lru_cache(maxsize=16)
def _averagings(collective: PairAverage, topology: Topology, size: int) -> tuple[float, float]:
    """Return the mean numbers of averagings that a rank wants and has in a round.

    Two ranks that want each other have one."""
    rounds = range(_ROUNDS_LOOKED_AT if size <= _ROUNDS_LOOKED_AT else 1)
    ranks = range(min(size, _RANKS_LOOKED_AT))
    wishes = mutual = 0
    for round in rounds:
        for rank in ranks:
            partner = collective.partner(topology, rank, size, round, 0)
            if partner is not None:
                wishes += 1
                mutual += collective.partner(topology, partner, size, round, 0) == rank
    looked_at = len(rounds) * len(ranks)
    return wishes / looked_at, (2 * wishes - mutual) / looked_at


class PairAverageChannel(Channel):
    """A channel that averages each segment with partners of its own.

    Args:
        collective: draws the partners.
        topology: the graph to draw from.
        peer: the ranks; collective.
        segments: opened in this order on every rank.
        progress: an engine with a thread.
    """

    def __init__(
        self,
        collective: PairAverage,
        topology: Topology,
        peer: Peer,
        segments: Sequence[Segment],
        progress: ProgressEngine,
    ) -> None:
        from hocket_adpsgd.pairing import PairAverager, SharedCopy

        super().__init__(segments, {})
        self._collective, self._topology, self._peer = collective, topology, peer
        self._copies = {
            segment.index: SharedCopy(segment.outgoing_array.size, segment.outgoing_array.dtype)
            for segment in segments
        }
        self._averagers = {
            segment.index: PairAverager(peer, progress, segment.name, self._copies[segment.index])
            for segment in segments
        }
        #: By the segments' indices, the most averagings that one outcome has held.
        self._staleness = dict.fromkeys(self._copies, 0)

    def start(self, segments: Sequence[Segment], round: int) -> Request[Outcome]:
        [segment] = segments
        index = segment.index
        copy, averager = self._copies[index], self._averagers[index]
        rank, size = self._peer.rank, self._peer.size
        number = averager.enter(
            segment.outgoing_array, self._collective.partner(self._topology, rank, size, round, index)
        )

        @cache
        def fetch() -> Outcome:
            # When it is asked for, and not when the round has ended: others average until then.
            partners = copy.fetch(segment.incoming_array)
            self._staleness[index] = max(self._staleness[index], len(partners))
            return Outcome(
                round,
                included=True,
                num_active=1 + len(set(partners)),
                staleness=self._staleness[index],
                partners=partners,
            )

        return FunctionRequest(
            lambda: averager.ended(number), lambda timeout_s: averager.wait(number, timeout_s), fetch
        )

    def take_changes(self, segment: Segment) -> Tensor | None:
        import torch

        copy, averager = self._copies[segment.index], self._averagers[segment.index]
        averager.wait_for_all()
        changes = torch.from_numpy(copy.changes())[: segment.numel]
        copy.reset()
        averager.wait_for_all()  # no rank begins again before all have taken theirs
        return changes

    def take_partners(self, segment: Segment) -> tuple[int, ...]:
        return self._copies[segment.index].take_partners()

    def close(self) -> None:
        for averager in self._averagers.values():
            averager.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the changes that are in no outcome yet, by segment; collective."""
        import torch

        state = {}
        for index, averager in self._averagers.items():
            averager.wait_for_all()
            state[str(index)] = torch.from_numpy(self._copies[index].changes())
            averager.wait_for_all()
        return state

    def resume(self, rounds: Mapping[int, int], state: dict[str, Any] | None) -> None:
        for index, copy in self._copies.items():
            copy.reset(0.0 if state is None else state[str(index)].numpy())
