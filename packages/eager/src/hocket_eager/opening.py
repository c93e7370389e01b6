"""How the rounds of several segments are opened: in memory that the ranks share, or else by messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hocket.api import Array, Peer, ProgressEngine
from hocket_eager.host import open_shared_sum
from hocket_eager.messages import Leaving, MessageSum
from hocket_eager.partial_sum import PartialSum

if TYPE_CHECKING:
    from hocket_eager.collective import PartialAllreduce

__all__ = ["open_sums"]


def open_sums(
    collective: PartialAllreduce,
    peer: Peer,
    progress: ProgressEngine,
    name: str,
    segments: Sequence[tuple[str, int, Array]],
) -> tuple[dict[int, PartialSum], Callable[[], None]]:
    """Open the rounds of each segment; collective.

    Args:
        collective: says how.
        peer: the ranks.
        progress: the progress thread, for messages.
        name: the exchange, for messages to a reader.
        segments: each segment's name, its index and an array like those that are summed, in the same order on all
            ranks.

    Returns:
        The sums by the segments' indices, and what gives back the rest when they have been closed; collective, too.
    """
    rules, missed = collective.rules(peer.size), collective.missed
    sums: dict[int, PartialSum] = {}
    leaving: Leaving | None = None
    for segment, index, like in segments:
        shared = None
        if collective.shared:
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
            collective.schedule_builder(),
            leaving,
        )
    end = peer.lane(f"{name} end")

    def close() -> None:
        end.ibarrier().wait()  # until then others may read this rank's memory, and add to their own
        end.close()
        if leaving is not None:
            leaving.close()

    return sums, close
