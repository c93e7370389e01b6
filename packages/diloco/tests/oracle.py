"""The loop behind DiLoCo and its family, in NumPy, for all ranks at once: what sessions are compared with.

After each inner step, for each fragment q (a set of layers):

    sent at t - delay:   g = sum of w_i (φ_q - θ_i,q) / sum of w_i, as it was then
                         u = momentum u + g;  d = g + momentum u (Nesterov), u (heavy ball) or g;  φ_q -= lr d
                         θ_i,q = local θ_i,q + (1 - local) φ_q, or φ_q + (θ_i,q - what it was when it was sent)
    due at t:            φ_q - θ_i,q is sent; where it is coded a_i = w_i (φ_q - θ_i,q) + β e_i is coded, what that is
                         decoded to is received, and e_i = a_i - that (β = 0 without feedback)

with w_i the mean of what rank i's batches have counted since the fragment was last sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: float64 [ranks, n].
Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Family:
    """A member of the family.

    Attributes:
        every: H, the steps between two sends of a fragment.
        lr, momentum, nesterov: of the outer step; a momentum of 0 is plain.
        fragments: the layers of each.
        starts: t_q, when each is due within the period; all at its end where empty.
        delay: τ, the steps between sending and merging.
        local: how much a rank counts in a blend; None for the additive merge.
        coded: what a rank's distance in a layer arrives as; None for the same.
        decay: β, what is left of the residual; 0 without feedback.
    """

    every: int
    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False
    fragments: Sequence[Sequence[str]] = ()
    starts: Sequence[int] = ()
    delay: int = 0
    local: float | None = None
    coded: Callable[[Vector], Vector] | None = None
    decay: float = 0.0


@dataclass
class _Fragment:
    layers: Sequence[str]
    start: int
    phi: dict[str, Vector]
    momentum: dict[str, Vector]
    weight: Vector
    steps: int = 0
    residual: dict[str, Vector] = field(default_factory=dict)
    #: By the step in which it was sent: each layer's mean distance, and the ranks' values then.
    under_way: dict[int, tuple[dict[str, Vector], dict[str, Vector]]] = field(default_factory=dict)


def trained(
    family: Family,
    start: Mapping[str, Vector],
    steps: int,
    inner_step: Callable[[int, dict[str, Vector]], Any],
    weights: Callable[[int], Vector] | None = None,
) -> tuple[list[dict[str, Vector]], list[dict[str, Vector]]]:
    """Return the replicas, [ranks, n] by layer, and the outer parameters, [n] by layer, before and after each step.

    Args:
        family: the method.
        start: of all ranks, by layer; equal in all.
        steps: how many.
        inner_step: changes the replicas in place, for a step from 1 on.
        weights: what each rank's batch counts in a step; 1 where None.
    """
    theta = {layer: values.copy() for layer, values in start.items()}
    ranks = len(next(iter(theta.values())))
    cut = family.fragments or [list(theta)]
    fragments = [
        _Fragment(
            layers,
            (family.starts or [0] * len(cut))[number],
            {layer: theta[layer][0].copy() for layer in layers},
            {layer: np.zeros_like(theta[layer][0]) for layer in layers},
            np.zeros(ranks),
        )
        for number, layers in enumerate(cut)
    ]
    replicas, outer = [_copied(theta)], [_outer(fragments)]
    for step in range(1, steps + 1):
        inner_step(step, theta)
        for each in fragments:
            each.weight = each.weight + (np.ones(ranks) if weights is None else weights(step))
            each.steps += 1
            if family.delay:
                _receive(family, each, step, theta)
            if (step - each.start) % family.every == 0:
                _send(family, each, step, theta)
            if not family.delay:
                _receive(family, each, step, theta)
        replicas.append(_copied(theta))
        outer.append(_outer(fragments))
    return replicas, outer


def _copied(theta: Mapping[str, Vector]) -> dict[str, Vector]:
    return {layer: values.copy() for layer, values in theta.items()}


def _outer(fragments: Sequence[_Fragment]) -> dict[str, Vector]:
    return {layer: each.phi[layer].copy() for each in fragments for layer in each.layers}


def _send(family: Family, each: _Fragment, step: int, theta: Mapping[str, Vector]) -> None:
    weight = each.weight / each.steps
    total = weight.sum()
    means = {}
    for layer in each.layers:
        given = weight[:, None] * (each.phi[layer] - theta[layer])
        if family.coded is not None:
            given = given + family.decay * each.residual.get(layer, np.zeros_like(given))
            decoded = np.stack([family.coded(own) for own in given])
            each.residual[layer] = given - decoded
            given = decoded
        means[layer] = given.sum(0) / (total or 1)
    each.under_way[step] = means, {layer: theta[layer].copy() for layer in each.layers}
    each.weight, each.steps = np.zeros_like(weight), 0


def _receive(family: Family, each: _Fragment, step: int, theta: dict[str, Vector]) -> None:
    if step - family.delay not in each.under_way:
        return
    means, sent = each.under_way.pop(step - family.delay)
    for layer, gradient in means.items():
        momentum = each.momentum[layer] = family.momentum * each.momentum[layer] + gradient
        direction = gradient + family.momentum * momentum if family.nesterov else momentum
        phi = each.phi[layer] = each.phi[layer] - family.lr * direction
        if family.local is None:
            theta[layer] = phi + (theta[layer] - sent[layer])
        else:
            theta[layer] = family.local * theta[layer] + (1 - family.local) * phi
