"""The speed at which a topology mixes: the effect of its matrices on the ranks' values over rounds.

Shapes: K rounds, D draws, n ranks. J is the matrix of 1/n everywhere, the exact mean.

Source: S. Boyd, A. Ghosh, B. Prabhakar, D. Shah, "Randomized Gossip Algorithms", 2006, for eigenvalues; S. Yeo et al.,
"Crossover-SGD", arXiv:2012.15198, section 3.2 and figure 6, for the imbalance.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hocket.topology.api import Topology

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Mixing:
    """The distances of a topology's products of matrices from the exact mean, each averaged over draws.

    Attributes:
        second_eigenvalue: float64 [K], after 1, 2, ... K rounds.
        deviation: float64 [K].
        imbalance: float64 [K].
    """

    second_eigenvalue: Values
    deviation: Values
    imbalance: Values


def analyse(topology: Topology, size: int, rounds: int, draws: int = 32) -> Mixing:
    """Analyse a topology among `size` ranks, from round 0 on.

    Args:
        size: n, 2 or more; one that the topology is defined for.
        rounds: K, 1 or more.
        draws: D; number of segments to analyse, where the topology draws a graph for each.
    """
    mixed = products(topology, size, rounds, draws)
    return Mixing(
        second_eigenvalue(mixed).mean(axis=1), deviation(mixed).mean(axis=1), imbalance(mixed).mean(axis=1)
    )


def products(topology: Topology, size: int, rounds: int, draws: int) -> Values:
    """Return W(k - 1) ... W(1) W(0) for k = 1 to K.

    Returns:
        float64 [K, D, n, n] of segments 0 to D - 1; of segment 0 alone, [K, 1, n, n], where all have the same matrices.
    """
    matrices = np.array(
        [
            [topology.mixing_matrix(size, round, segment) for segment in range(draws)]
            for round in range(rounds)
        ]
    )
    if (matrices == matrices[:, :1]).all():
        matrices = matrices[:, :1]
    for k in range(1, rounds):
        matrices[k] = matrices[k] @ matrices[k - 1]
    return matrices


def second_eigenvalue(mixed: Values) -> Values:
    """Return the second largest modulus of an eigenvalue of each matrix, [..., n, n] to [...].

    It bounds the error of one matrix applied again and again. Products of matrices that do not commute are not
    normal, and may be further from J: see `deviation`.
    """
    moduli: Values = np.sort(np.abs(np.linalg.eigvals(mixed)), axis=-1)
    return moduli[..., -2]


def deviation(mixed: Values) -> Values:
    """Return the spectral norm of M - J, [..., n, n] to [...].

    It is the largest remaining part of the ranks' differences.

    This is for a doubly stochastic M; otherwise it includes the ranks' possible distance from the mean.
    """
    found: Values = np.linalg.norm(mixed - 1 / mixed.shape[-1], ord=2, axis=(-2, -1))
    return found


def imbalance(mixed: Values) -> Values:
    """Return the variance of the entries of M - J, [..., n, n] to [...].

    It is 0 if all ranks count the same everywhere."""
    variance: Values = (mixed - 1 / mixed.shape[-1]).var(axis=(-2, -1))
    return variance
