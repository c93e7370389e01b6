"""GossipGraD in NumPy: all ranks' models stacked, one matrix product for each exchange. The oracle of the step's tests.

The model is Linear(3, 5), tanh, Linear(5, 2) with the loss half the mean over samples of || output - target ||^2, and
its gradients are written out. Everything is float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

#: Weight and bias of both layers.
SHAPES = ((5, 3), (5,), (2, 5), (2,))
LEARNING_RATE, MOMENTUM = 0.1, 0.9

#: float64 [ranks, *shape] for each parameter.
Stack = list[NDArray[np.float64]]

#: From (round, segment) to W, [ranks, ranks].
Mixing = Callable[[int, int], NDArray[np.float64]]


def initial(ranks: int) -> Stack:
    """Return the models that the ranks begin with: equal ones."""
    draw = np.random.default_rng(7)
    return [np.repeat(draw.normal(size=(1, *shape)), ranks, axis=0) for shape in SHAPES]


def batch_of(rank: int, step: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return inputs [4, 3] and targets [4, 2] of a rank's step."""
    draw = np.random.default_rng([rank, step])
    return draw.normal(size=(4, 3)), draw.normal(size=(4, 2))


def gradients(models: Stack, step: int) -> Stack:
    """Return every rank's gradients of its own loss at its own model."""
    found: Stack = [np.empty_like(stack) for stack in models]
    for rank in range(len(models[0])):
        w1, b1, w2, b2 = (stack[rank] for stack in models)
        x, y = batch_of(rank, step)
        hidden = np.tanh(x @ w1.T + b1)
        error = (hidden @ w2.T + b2 - y) / len(x)
        back = error @ w2 * (1 - hidden**2)
        for stack, gradient in zip(
            found, (back.T @ x, back.sum(0), error.T @ hidden, error.sum(0)), strict=True
        ):
            stack[rank] = gradient
    return found


def mix(stack: Stack, mixing: Mixing, round: int, segments: Sequence[int]) -> Stack:
    """Return W x for each parameter, with the W of its segment."""
    return [
        np.tensordot(mixing(round, segment), values, axes=1)
        for values, segment in zip(stack, segments, strict=True)
    ]


def trained(
    ranks: int,
    steps: int,
    *,
    parameters: Mixing | None = None,
    every: int = 1,
    gradients_by: Mixing | None = None,
    push_sum: bool = False,
) -> Stack:
    """Return the models after so many steps of SGD with momentum.

    Args:
        parameters: mixes what the steps give, in each `every`-th step.
        gradients_by: mixes the gradients before each step.
        push_sum: whether weights travel along, and models are what values are divided to.
    """
    models, weights = initial(ranks), [np.ones(ranks) for _ in SHAPES]
    momenta = [np.zeros_like(stack) for stack in models]
    of_parameters, of_gradients = (0, 0, 1, 1), (1, 1, 0, 0)  # backward makes the last layer's first
    for step in range(steps):
        found = gradients(_divided(models, weights), step)
        if gradients_by is not None:
            found = mix(found, gradients_by, step, of_gradients)
        momenta = [MOMENTUM * buffer + gradient for buffer, gradient in zip(momenta, found, strict=True)]
        models = [values - LEARNING_RATE * buffer for values, buffer in zip(models, momenta, strict=True)]
        if parameters is not None and (step + 1) % every == 0:
            round = (step + 1) // every - 1
            models = mix(models, parameters, round, of_parameters)
            if push_sum:
                weights = mix(weights, parameters, round, of_parameters)
    return _divided(models, weights)


def _divided(models: Stack, weights: Stack) -> Stack:
    return [
        values / w.reshape(-1, *(1,) * (values.ndim - 1)) for values, w in zip(models, weights, strict=True)
    ]
