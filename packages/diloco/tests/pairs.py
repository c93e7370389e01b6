"""NoLoCo in NumPy, for all ranks at once.

After each `every` steps a permutation, drawn by the round on all ranks, makes groups of two; of an odd number of ranks
the last is a group of its own. With d_i = θ_i - φ_i, in each group:

    u_i = momentum u_i + lr mean(d) + pull (mean(φ) - φ_i);  φ_i += u_i;  θ_i = φ_i
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from oracle import Vector

from hocket import draws


def trained_in_pairs(
    start: Mapping[str, Vector],
    steps: int,
    every: int,
    inner_step: Callable[[int, dict[str, Vector]], Any],
    lr: float = 0.7,
    momentum: float = 0.5,
    pull: float = 0.7,
) -> tuple[dict[str, Vector], dict[str, Vector]]:
    """Return the replicas and the outer parameters at the end, [ranks, n] by layer."""
    theta = {layer: values.copy() for layer, values in start.items()}
    phi = {layer: values.copy() for layer, values in start.items()}
    u = {layer: np.zeros_like(values) for layer, values in start.items()}
    ranks = len(next(iter(theta.values())))
    for step in range(1, steps + 1):
        inner_step(step, theta)
        if step % every:
            continue
        order = draws.permutation(ranks, "matching", 0, step // every - 1, 0)
        for group in (order[i : i + 2] for i in range(0, ranks, 2)):
            for layer, outer in phi.items():
                d = (theta[layer][group] - outer[group]).mean(0)
                apart = outer[group].mean(0) - outer[group]
                u[layer][group] = momentum * u[layer][group] + lr * d + pull * apart
                outer[group] += u[layer][group]
                theta[layer][group] = outer[group]
    return theta, phi
