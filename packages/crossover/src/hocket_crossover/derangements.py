"""Random derangements: permutations in which nobody stays in place, many drawn at once.

Each is addressed by (seed, round, segment): the same on every rank, platform and version of NumPy, and whatever is
drawn together with it.

Shapes: P keys, each a round and a segment; n ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from hocket.api import draws

#: A round, 0 to 2**64 - 1, and the index of a segment, 0 to 2**32 - 1.
DrawKey = tuple[int, int]

Derangements = NDArray[np.int64]  # [P, n]

# Attempt number a of segment s is drawn at s + a * _ATTEMPT.
_ATTEMPT = 2**32

# Several permutations are tried in one attempt where drawing words takes longer than sorting them.
_WORDS_PER_ATTEMPT = 128


def uniform(size: int, seed: int, draw_keys: Sequence[DrawKey]) -> Derangements:
    """Return derangements of which each is as likely as any other.

    Uniform permutations are drawn until one has no fixed point, e = 2.72 of them on average: what is left of a
    uniform distribution is uniform. Two words are equal, which would favour the order of ranks, once in 2**52 / n**2
    permutations.

    Args:
        size: n, 2 or more.
        seed: 0 to 2**64 - 1.
        draw_keys: the keys; one derangement is drawn for each.

    Returns:
        int64 [P, n].
    """
    ranks = np.arange(size, dtype=np.uint64)
    tries = max(1, _WORDS_PER_ATTEMPT // size)
    own_bits = np.uint64((1 << (size - 1).bit_length()) - 1)

    def attempt(missing: Sequence[DrawKey], number: int) -> tuple[NDArray[np.bool_], Derangements]:
        keys = words(size * tries, "derange", seed, missing, number).reshape(-1, tries, size)
        # A rank in the low bits of its word: sorting then costs a quarter of finding the order, and no two words are
        # equal, so that every algorithm of sorting gives the same.
        keys &= ~own_bits
        keys |= ranks
        keys.sort(axis=-1)
        keys &= own_bits
        deranged = (keys != ranks).all(axis=-1)
        good = deranged.any(axis=1)
        return good, keys.view(np.int64)[good, deranged[good].argmax(axis=1)]

    return _until_all(attempt, size, draw_keys)


def roulette(weights: NDArray[np.float64], seed: int, draw_keys: Sequence[DrawKey]) -> Derangements:
    """Return derangements drawn rank after rank from a table, not uniform even where the table is.

    Rank i draws whom it hears from out of row i, from which those that earlier ranks have drawn are removed. Where
    the last ranks are left with nobody, all of the segment's are drawn again. Takes n steps on arrays [P, n].

    Args:
        weights: float64 [n, n], not negative, zero on the diagonal; some derangement must be possible.
        seed, draw_keys: as in `uniform`.

    Returns:
        int64 [P, n].

    Source: the paper's algorithm 2, with a redraw where it comes to a dead end.
    """
    size = len(weights)

    def attempt(missing: Sequence[DrawKey], number: int) -> tuple[NDArray[np.bool_], Derangements]:
        # [P, n]; of 52 bits, so that a chance times a sum is less than the sum when it is rounded.
        chances = (words(size, "roulette", seed, missing, number) >> np.uint64(12)) * 2.0**-52
        rows = np.arange(len(missing))
        drawn = np.empty((len(missing), size), dtype=np.int64)
        free = np.ones((len(missing), size))
        alive = np.ones(len(missing), dtype=np.bool_)
        for rank in range(size):
            wheel = np.cumsum(free * weights[rank], axis=1)
            stop = chances[:, rank, None] * wheel[:, -1:]
            # The first whose part of the wheel ends behind the stop, so never one of weight zero.
            drawn[:, rank] = (wheel > stop).argmax(axis=1)
            alive &= wheel[:, -1] > 0
            free[rows, drawn[:, rank]] = 0
        return alive, drawn[alive]

    return _until_all(attempt, size, draw_keys)


def _until_all(
    attempt: Callable[[Sequence[DrawKey], int], tuple[NDArray[np.bool_], Derangements]],
    size: int,
    draw_keys: Sequence[DrawKey],
) -> Derangements:
    """Repeat attempts for the keys for which none has been found yet.

    Args:
        attempt: from keys, [P], and the attempt's number to which of them are done, bool [P], and what is drawn
            for these.
    """
    found = np.empty((len(draw_keys), size), dtype=np.int64)
    missing, number = np.arange(len(draw_keys)), 0
    while missing.size:
        good, drawn = attempt([draw_keys[index] for index in missing.tolist()], number)
        found[missing[good]] = drawn
        missing, number = missing[~good], number + 1
    return found


def words(
    num: int, domain: str, seed: int, draw_keys: Sequence[DrawKey], attempt: int = 0
) -> NDArray[np.uint64]:
    """Return words that belong to each key, uint64 [P, num], others for each attempt."""
    offset = attempt * _ATTEMPT
    return np.concatenate(
        [
            draws.rows(num, domain, seed, round, [offset + segment for _, segment in of_round])
            for round, of_round in groupby(draw_keys, key=itemgetter(0))
        ]
    )
