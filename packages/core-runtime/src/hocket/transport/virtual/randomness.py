"""The global random states that real ranks would each have, swapped as the token moves.

torch's default CPU generator (once torch is imported), NumPy's legacy global state and `random`'s. Without
the swap a model with dropout would draw in the order in which the scheduler runs the ranks. CUDA generators
are not swapped: draw on the CPU, or from a generator of your own, where virtual ranks share a GPU.
"""

from __future__ import annotations

from hocket import randomness
from hocket.randomness import RandomState

__all__ = ["RandomStates"]


class RandomStates:
    """One set of global random states per rank; each starts as what the caller of `World.run` had."""

    def __init__(self) -> None:
        self._outside = randomness.read()
        self._by_rank: dict[int, RandomState] = {}
        self._loaded = self._outside
        self._rank: int | None = None

    def enter(self, rank: int) -> None:
        """Save the states of the rank that held the token and load `rank`'s."""
        if rank == self._rank:
            return
        current = randomness.read(self._loaded)
        if self._rank is not None:
            self._by_rank[self._rank] = current
        self._load(self._by_rank.get(rank, self._outside), current)
        self._rank = rank

    def leave(self) -> None:
        """Restore what the caller of `World.run` had."""
        if self._rank is not None:
            self._load(self._outside, randomness.read(self._loaded))
            self._rank = None

    def _load(self, state: RandomState, current: RandomState) -> None:
        randomness.write(state, current)
        self._loaded = state
