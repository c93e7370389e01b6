"""The layout of the memory that the ranks of a host share for one segment."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hocket.api import Array, Peer, sync

_LINE = 64
_WORD = 8


def _lines(nbytes: int) -> int:
    return -(-nbytes // _LINE) * _LINE


def _words(memory: Array) -> memoryview:
    """Return memory as int64: Python reads numbers faster from a view than from an array."""
    return memory.view(np.int64).data


class RankPart:
    """One rank's part.

    Attributes:
        mutex: guards all that follows, except `slot`, `slot_round` and `slot_active`.
        holder: [1] the rank that holds the mutex; -1 for none.
        oldest, newest: [1] the steps of the oldest and the newest gradient in `send`; `oldest` is -1 if it holds none.
        accepted_step, accepted_round: [1] the newest step whose gradient a round has taken, and that round; or -1.
        staleness_max: [1] the most rounds by which a gradient was late.
        fetched: [1] the number of rounds whose results this rank has been handed, or `undelivered` holds for it.
        send: [numel] the sum of the gradients that no round has taken.
        undelivered: [numel] the sum of results that this rank is still to be handed and that no slot holds any more;
            empty where only the newest counts.
        has_undelivered: [1] whether `undelivered` holds anything.
        slot: [numel] the result of round `slot_round`, one of those with this rank's number modulo the number of ranks.
        slot_round, slot_active: [1] that round, and the number of ranks active in it.
    """

    def __init__(self, memory: Array, numel: int, dtype: np.dtype[np.generic], sums: bool) -> None:
        data_bytes = _lines(numel * dtype.itemsize)
        self.mutex = sync.RobustMutex(memory[: sync.MUTEX_BYTES])
        words = _words(memory[sync.MUTEX_BYTES : sync.MUTEX_BYTES + 2 * _LINE])
        (
            self.holder,
            self.oldest,
            self.newest,
            self.accepted_step,
            self.accepted_round,
            self.staleness_max,
            self.fetched,
            self.has_undelivered,
            self.slot_round,
            self.slot_active,
        ) = (words[i : i + 1] for i in range(10))
        start = sync.MUTEX_BYTES + 2 * _LINE
        arrays = [
            memory[start + i * data_bytes : start + i * data_bytes + numel * dtype.itemsize].view(dtype)
            for i in range(2 + sums)
        ]
        self.send, self.slot = arrays[:2]
        self.undelivered = arrays[2] if sums else self.send[:0]

    @staticmethod
    def nbytes(numel: int, dtype: np.dtype[np.generic], sums: bool) -> int:
        """Return how many bytes it takes."""
        return sync.MUTEX_BYTES + 2 * _LINE + (2 + sums) * _lines(numel * dtype.itemsize)

    def initialise(self) -> None:
        """Make it hold nothing; by its rank, before any other uses it."""
        self.mutex.initialise()
        for word in (self.holder, self.oldest, self.newest, self.accepted_step, self.accepted_round):
            word[0] = -1
        self.slot_round[0] = -1


class Table:
    """The state that all ranks have in common.

    Attributes:
        mutex: guards all that follows.
        holder: [1] the rank that holds the mutex; -1 for none.
        rounds: [1] the number of rounds that have ended.
        gone: [1] the number of ranks that have left for good.
        word: uint32 [1], another number after each round.
        changed: the place of that number, for waits.
        arrived: [size] the number of rounds in which each rank's application has taken part.
    """

    def __init__(self, memory: Array, size: int) -> None:
        self.mutex = sync.RobustMutex(memory[: sync.MUTEX_BYTES])
        line = memory[sync.MUTEX_BYTES : sync.MUTEX_BYTES + _LINE]
        self.holder, self.rounds, self.gone = (_words(line)[i : i + 1] for i in range(3))
        word = line[3 * _WORD :].view(np.uint32)[:1]
        self.word = word.data
        self.changed = word.ctypes.data
        self.arrived = memory[sync.MUTEX_BYTES + _LINE : sync.MUTEX_BYTES + _LINE + size * _WORD].view(
            np.int64
        )

    @staticmethod
    def nbytes(size: int) -> int:
        """Return how many bytes it takes."""
        return sync.MUTEX_BYTES + _LINE + _lines(size * _WORD)

    def initialise(self) -> None:
        """Make it the table before the first round; by one rank, before any other uses it."""
        self.mutex.initialise()
        self.holder[0] = -1


class TableLayout:
    """The table, in the first rank's memory, and each rank's part.

    Args:
        rank: this rank.
        memory: every rank's, uint8, zeroed, as of `Memory.share`.
        numel, dtype: of a gradient.
        sums: true: ranks are handed the sums of rounds.
    """

    def __init__(
        self, rank: int, memory: Sequence[Array], numel: int, dtype: np.dtype[np.generic], sums: bool
    ) -> None:
        size = len(memory)
        self.table = Table(memory[0], size)
        start = Table.nbytes(size)
        self.parts = [RankPart(of_rank[start:], numel, dtype, sums) for of_rank in memory]
        self.own = self.parts[rank]
        self.own.initialise()
        if rank == 0:
            self.table.initialise()

    @staticmethod
    def allocate(peer: Peer, numel: int, dtype: np.dtype[np.generic], sums: bool) -> Sequence[Array] | None:
        """Return memory for it; None where the ranks share none. Collective."""
        return peer.memory.share(Table.nbytes(peer.size) + RankPart.nbytes(numel, dtype, sums))
