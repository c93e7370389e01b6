"""The rounds of one segment on one rank: the interface of sums by messages and in shared memory.

The contract (eager-SGD, Lemma 6.1), which the tests check on every way:

- Liveness: a call for a round that may start returns, whatever the other ranks' applications do.
- Safety: a round's result has the same bits on every rank, and is the sum of a subset of what was proposed. A gradient
  is in the first round that starts after it was proposed, as a whole, and in no other.
- Quorum: the gradient of the rank that starts a round is in it.
- Staleness: no gradient is more than `QuorumRules.staleness` rounds late.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from hocket.api import Array, Outcome


class PartialSum(ABC):
    """One rank's end of the rounds of one segment; opened and closed by all ranks together.

    The application takes part in one round after the other, in order: it proposes a gradient, waits until the round has
    ended, and fetches. A rank that is late finds that its round has ended long ago.

    Attributes:
        name: the segment, for messages.
        first_round: the number of the first round; 0 except in a resumed run.
    """

    name: str
    first_round: int = 0

    @abstractmethod
    def propose(self, data: Array, step: int) -> None:
        """Add this rank's gradient of a step [numel] to its proposals, and arrive at the round of that number."""

    @abstractmethod
    def ended(self, step: int) -> bool:
        """Return whether the round of a step has ended; never blocks.

        Raises:
            TransportError: it never will.
        """

    @abstractmethod
    def wait(self, step: int, timeout_s: float | None = None) -> None:
        """Block until the round of a step has ended, without burning a core.

        Raises:
            ExchangeTimeoutError: not in time.
            TransportError: it never will; PeerLostError if a rank has died.
        """

    @abstractmethod
    def fetch(self, step: int, out: Array) -> Outcome:
        """Copy the result [numel] of the newest round, or the sum of those not fetched yet.

        Args:
            step: a step whose round has ended; the newest round is that one or a later one.
            out: [numel], for the result.
        """

    @abstractmethod
    def left(self) -> tuple[int | None, Array]:
        """Return the step of the oldest gradient that no round has taken (or None), and a copy of their sum."""

    @abstractmethod
    def restore(self, oldest: int | None, data: Array) -> None:
        """Hold what `left` returned, and nothing else."""

    @abstractmethod
    def resume(self, round: int) -> None:
        """Set the number of the next round; no round has begun."""

    @abstractmethod
    def close(self) -> None:
        """Answer the others until all have closed; collective. From now on no rank waits for this one."""
