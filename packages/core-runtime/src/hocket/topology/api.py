"""The interface of topologies: pure functions from round and segment to the graph of who sends to whom.

Rank j's value enters rank i's with the weight W[i, j] of the mixing matrix W. Where W's columns sum to 1, the shares
that rank j gives away and keeps add up to 1, and the ranks' sum is preserved. Where the rows sum to 1, each rank's
result is an average. Where both do, W is doubly stochastic and the ranks' values approach their mean. Where only the
columns do, push-sum divides by the weight that travelled along; where only the rows do, the ranks approach each other,
but at a mean in which some of them count more than others.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from hocket.arrays import MixingRows
from hocket.configured import Configured


@dataclass(frozen=True)
class Neighbours:
    """The neighbours of one rank in one round, with weights.

    Attributes:
        send_to: the ranks that receive this rank's value.
        send_weights: the weight of this rank's value at each of them, in the order of `send_to`.
        receive_from: the ranks whose values this rank receives, in the order in which they are added.
        self_weight: the weight of this rank's own value in its result.

    Raises:
        ValueError: the numbers of weights and of ranks to send to differ.
    """

    send_to: tuple[int, ...]
    send_weights: tuple[float, ...]
    receive_from: tuple[int, ...]
    self_weight: float

    def __post_init__(self) -> None:
        if len(self.send_to) != len(self.send_weights):
            raise ValueError(
                f"send_weights has {len(self.send_weights)} weights for {len(self.send_to)} ranks"
            )


class Topology(Configured, ABC):
    """A topology, the graph of who sends to whom; a frozen dataclass whose fields are its configuration.

    It is pure: every rank computes the same result from the same arguments, without messages.
    """

    #: Whether W's rows sum to 1, for every size, round and segment. Where they do not, averaging needs push-sum.
    rows_sum_to_one: ClassVar[bool] = True

    #: Whether W's columns sum to 1, for every size, round and segment. Where they do not, the mean is not kept.
    columns_sum_to_one: ClassVar[bool] = True

    #: Whether segments may have other neighbours than each other in a round. Where not, one is asked about for all.
    differs_by_segment: ClassVar[bool] = True

    @abstractmethod
    def neighbours(self, rank: int, size: int, round: int, segment: int) -> Neighbours:
        """Return the ranks that `rank` sends to and receives from, with weights.

        Args:
            rank: 0 <= rank < size.
            size: ranks in the exchange's scope.
            round: the exchange's own counter, from 0.
            segment: the segment's index in the exchange.

        Returns:
            Neighbours that match the others': j is in `receive_from` of i exactly if i is in `send_to` of j.
            No rank is its own neighbour, and none appears twice.
        """

    def check_size(self, size: int) -> None:
        """Refuse a number of ranks that the topology is not defined for; by default none is refused.

        Args:
            size: ranks in the exchange's scope, 1 or more.

        Raises:
            ValueError: `size` is not possible; names it, the possible sizes, and an alternative.
        """
        return

    def mixing_rows(self, size: int, round: int, segment: int) -> MixingRows:
        """Return the rows of W in one round, as `Mixer.start` takes them.

        It asks for every rank's neighbours; a topology that knows all at once overrides it.

        Args:
            size, round, segment: as in `neighbours`.

        Returns:
            W's rows: each rank's own value, then those that it receives, in the order of `receive_from`.
        """
        everyone = [self.neighbours(rank, size, round, segment) for rank in range(size)]
        sources, weights, starts = [], [], [0]
        for rank, own in enumerate(everyone):
            sources += [rank, *own.receive_from]
            weights.append(own.self_weight)
            for source in own.receive_from:
                weights.append(everyone[source].send_weights[everyone[source].send_to.index(rank)])
            starts.append(len(sources))
        return MixingRows(np.array(starts), np.array(sources), np.array(weights))

    def mixing_matrix(self, size: int, round: int, segment: int) -> NDArray[np.float64]:
        """Return W of one round: W[i, j] is the weight of rank j's value at rank i.

        Args:
            size, round, segment: as in `neighbours`.

        Returns:
            float64 [size, size].
        """
        matrix = np.zeros((size, size))
        for rank in range(size):
            neighbours = self.neighbours(rank, size, round, segment)
            matrix[rank, rank] = neighbours.self_weight
            matrix[list(neighbours.send_to), rank] = neighbours.send_weights
        return matrix


def neighbours_fault(
    topology: Topology, rank: int, size: int, neighbours_of: Callable[[int], Neighbours]
) -> str | None:
    """Return a sentence on how a rank's neighbours and weights break the contract of `Topology`; else None.

    Args:
        topology: the topology.
        rank, size: the rank to check, and the number of ranks.
        neighbours_of: returns a rank's neighbours in one round for one segment; called for the rank and its neighbours.
    """
    own, who = neighbours_of(rank), f"rank {rank} of {size}"
    for name, others in (("send_to", own.send_to), ("receive_from", own.receive_from)):
        # They travel in messages and index Python lists: NumPy's integers would not do.
        possible = all(type(other) is int and 0 <= other < size and other != rank for other in others)
        if not possible or len(set(others)) < len(others):
            return (
                f"{who} has {name}={others}: it must name other ranks, 0 to {size - 1}, as ints and each once; if "
                f"{size} ranks are not possible, check_size must refuse them"
            )
    received = [own.self_weight]
    for source in own.receive_from:
        given = neighbours_of(source)
        if rank not in given.send_to:
            return f"{who} has {source} in receive_from, and rank {source} has send_to={given.send_to}"
        received.append(given.send_weights[given.send_to.index(rank)])
    for to in own.send_to:
        expected = neighbours_of(to).receive_from
        if rank not in expected:
            return f"{who} has {to} in send_to, and rank {to} has receive_from={expected}"
    for declaration, what, weights in (
        ("columns_sum_to_one", "keeps and gives away", [own.self_weight, *own.send_weights]),
        ("rows_sum_to_one", "keeps and receives", received),
    ):
        total = math.fsum(weights)
        if getattr(topology, declaration) and not math.isclose(total, 1, abs_tol=1e-6):
            return f"what {who} {what} has weights {weights} of sum {total:g}, and {declaration} is True"
    return None
