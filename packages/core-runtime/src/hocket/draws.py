"""Random draws that are addressed, never consumed in order.

Every rank computes the same draws without a message, for the same (seed, round, segment), whatever it drew
before. The generator is Philox, counter-based: the address is its key and counter. Only raw words are used,
which NumPy keeps the same in all versions and on all platforms; it does not promise that of
`Generator.permutation` or `Generator.integers`.

Source: J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def words(num: int, domain: str, seed: int, round: int, segment: int = 0) -> NDArray[np.uint64]:
    """Return raw words of Philox4x64-10, uint64 [num].

    Args:
        num: the number of words, fewer than 2**64.
        domain: the purpose of the draw, 1 to 8 ASCII characters; keeps draws with one seed apart.
        seed: 0 to 2**64 - 1.
        round: 0 to 2**64 - 1.
        segment: 0 to 2**64 - 1.

    Raises:
        ValueError: the domain has no character, more than 8, or others than ASCII.
    """
    drawn: NDArray[np.uint64] = _philox(domain, seed, round, segment).random_raw(num)
    return drawn


def rows(num: int, domain: str, seed: int, round: int, segments: Sequence[int]) -> NDArray[np.uint64]:
    """Return `words` of each of several segments, uint64 [len(segments), num].

    One generator is set to one address after the other, in 1.4 us a row; `words` makes a new one, in 12 us.
    """
    drawn = np.empty((len(segments), num), dtype=np.uint64)
    philox = _philox(domain, seed, round, 0)
    start = philox.state
    for row, segment in zip(drawn, segments, strict=True):
        start["state"]["counter"][2] = segment
        philox.state = start
        row[:] = philox.random_raw(num)
    return drawn


def permutation(num: int, domain: str, seed: int, round: int, segment: int = 0) -> NDArray[np.intp]:
    """Return a uniform permutation of 0 to num - 1, [num]: the order that sorts a word for each."""
    return np.argsort(words(num, domain, seed, round, segment), kind="stable")


def below(
    bounds: NDArray[np.int64], domain: str, seed: int, round: int, segment: int = 0
) -> NDArray[np.int64]:
    """Return for each bound b an integer from 0 to b - 1, int64 like `bounds`.

    The chances of two integers below one bound differ by less than 2**-32 of 1.

    Args:
        bounds: int64 [num], 1 to 2**31.
        domain, seed, round, segment: as in `words`.
    """
    # Multiply and shift (D. Lemire, "Fast Random Integer Generation in an Interval", 2019), without rejection.
    high = words(len(bounds), domain, seed, round, segment) >> np.uint64(32)
    drawn: NDArray[np.int64] = (high * bounds.astype(np.uint64) >> np.uint64(32)).astype(np.int64)
    return drawn


def normal(num: int, domain: str, seed: int, round: int, segment: int = 0) -> NDArray[np.float64]:
    """Return standard normal values, float64 [num], from a word each.

    Source: G. Box, M. Muller, "A Note on the Generation of Random Normal Deviates", 1958.
    """
    drawn = words(num, domain, seed, round, segment)
    halves = drawn >> np.uint64(32), drawn & np.uint64(2**32 - 1)
    first, second = ((half + 0.5) / 2**32 for half in halves)
    values: NDArray[np.float64] = np.sqrt(-2 * np.log(first)) * np.cos(2 * np.pi * second)
    return values


def check_seed(seed: int) -> None:
    """Refuse a number that is no seed.

    Raises:
        ValueError: not in 0 to 2**64 - 1.
    """
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed is {seed}; allowed: 0 to 2**64 - 1")


def _philox(domain: str, seed: int, round: int, segment: int) -> np.random.Philox:
    if not (domain.isascii() and 1 <= len(domain) <= 8):
        raise ValueError(f"domain is {domain!r}; allowed: 1 to 8 ASCII characters")
    key = np.array([seed, round], dtype=np.uint64)
    # The counter's 64-bit words, lowest first: two for the position in the stream, the segment, the domain.
    counter = int.from_bytes(domain.encode("ascii"), "big") << 192 | segment << 128
    return np.random.Philox(key=key, counter=counter)
