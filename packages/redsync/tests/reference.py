"""RedSync's selections as the paper's algorithm boxes have them, in NumPy, pass by pass: the oracle of the fast ones.

Source: Fang et al., "RedSync", algorithms 2 and 3. In algorithm 3, r moves
down when fewer than k elements pass, and up when more than 2 k do: as printed, line 9 compares with k / 2, and the
search would leave [0, 1].
"""

from __future__ import annotations

import numpy as np


def exact(values: np.ndarray, k: int) -> np.ndarray:
    """Return the places of the k largest magnitudes; of equal ones the first."""
    return np.sort(np.argsort(-np.abs(values), kind="stable")[:k])


def trimmed(values: np.ndarray, k: int) -> np.ndarray:
    """Algorithm 2: the k largest, among those above mean + r (max - mean), r from 0.8 down in steps of 0.2."""
    magnitudes = np.abs(values)
    mean, most = magnitudes.mean(), magnitudes.max()
    passing = np.arange(len(values))
    for r in (0.8, 0.6, 0.4, 0.2, 0.0):
        above = np.flatnonzero(magnitudes > mean + r * (most - mean))
        if len(above) >= k:
            passing = above
            break
    return np.sort(passing[exact(values[passing], k)])


def threshold(values: np.ndarray, k: int, eps: float = 1e-6) -> float | None:
    """Algorithm 3: a threshold that k to 2 k magnitudes reach, found by bisection; None where it gives up."""
    magnitudes = np.abs(values).astype(np.float64)
    mean, most = magnitudes.mean(), magnitudes.max()
    left, right = 0.0, 1.0
    while right - left > eps:
        r = left + (right - left) / 2
        found = float(mean + r * (most - mean))
        count = np.count_nonzero(magnitudes >= found)
        if k <= count <= 2 * k:
            return found
        if count < k:
            right = r
        else:
            left = r
    return None


def has_threshold(values: np.ndarray, k: int) -> bool:
    """Return whether any threshold above 0 exists that k to 2 k magnitudes reach, by trying all."""
    levels, counts = np.unique(np.abs(values), return_counts=True)
    reaching = np.cumsum(counts[::-1])[::-1][levels > 0]
    return bool(((reaching >= k) & (reaching <= 2 * k)).any())
