"""The ranks that a round's mixing connects, and what each of them adds up."""

from __future__ import annotations

from hocket.topology.api import Topology

__all__ = ["component_terms"]


def component_terms(
    topology: Topology, rank: int, size: int, round: int, segment: int
) -> dict[int, list[tuple[int, float]]]:
    """Return what the ranks of `rank`'s connected component add up in one round, as `Lane.imix` takes it.

    Args:
        topology: whose graph of the round it is; who sends or receives is connected.
        rank: 0 <= rank < size.
        size: ranks in the exchange's scope.
        round: the exchange's own counter, from 0.
        segment: the segment's index in the exchange.

    Returns:
        For each rank of the component, in ascending order, (rank, weight) for its own value and then for each that it
        receives, in the order of `receive_from`. A rank without neighbours is a component of its own.
    """
    found = {rank: topology.neighbours(rank, size, round, segment)}
    unseen = [rank]
    while unseen:
        current = found[unseen.pop()]
        for other in (*current.send_to, *current.receive_from):
            if other not in found:
                found[other] = topology.neighbours(other, size, round, segment)
                unseen.append(other)
    return {
        member: [(member, own.self_weight)]
        + [
            (source, found[source].send_weights[found[source].send_to.index(member)])
            for source in own.receive_from
        ]
        for member, own in sorted(found.items())
    }
