"""Every weight policy in NumPy: a chain of layers, one a stage, written from the papers' tables alone.

Layer n computes tanh(x W^T + b), the last one x W^T + b; the loss is the mean squared error. Everything is float64.
Shapes: B samples, D numbers in and out of every layer.

A batch's forward and its backward may read different weights: dx = dy W_backward, dW = dy^T x_forward. So naive and
SpecTrain are what they are, and not what autograd would make of one set of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

#: W [D, D] and b [D].
Layer = tuple[Array, Array]

#: Inputs and targets, [B, D] each.
Batch = tuple[Array, Array]


def gradients(forward: Sequence[Layer], backward: Sequence[Layer], batch: Batch) -> list[Layer]:
    """Return each layer's gradient, with what the forward and what the backward read."""
    x, target = batch
    inputs, outputs = [], []
    for number, (weight, bias) in enumerate(forward):
        inputs.append(x)
        x = x @ weight.T + bias
        if number < len(forward) - 1:
            x = np.tanh(x)
        outputs.append(x)
    dy = 2 * (x - target) / x.size
    found: list[Layer] = []
    for number in reversed(range(len(forward))):
        if number < len(forward) - 1:
            dy = dy * (1 - outputs[number] ** 2)
        found.append((dy.T @ inputs[number], dy.sum(0)))
        dy = dy @ backward[number][0]
    return found[::-1]


class Momentum:
    """torch's SGD: v = mu v + g, w -= lr v; the first v is g."""

    def __init__(self, momentum: float) -> None:
        self.momentum = momentum
        self.v: list[Layer] | None = None

    def step(self, layers: Sequence[Layer], found: Sequence[Layer], lr: float) -> list[Layer]:
        if self.v is None:
            self.v = list(found)
        else:
            self.v = [
                (self.momentum * vw + gw, self.momentum * vb + gb)
                for (vw, vb), (gw, gb) in zip(self.v, found, strict=True)
            ]
        return moved(layers, self.v, lr)


def moved(layers: Sequence[Layer], v: Sequence[Layer], lr: float) -> list[Layer]:
    return [(w - lr * vw, b - lr * vb) for (w, b), (vw, vb) in zip(layers, v, strict=True)]


def sequential(
    layers: list[Layer], batches: Sequence[Batch], lr: Callable[[int], float], momentum: float
) -> list[Layer]:
    """Return the weights after plain SGD; `lr(t)` is batch t's."""
    optimizer = Momentum(momentum)
    for t, batch in enumerate(batches, 1):
        layers = optimizer.step(layers, gradients(layers, layers, batch), lr(t))
    return layers


def newest(
    policy: str, layers: list[Layer], batches: Sequence[Batch], lr: float, momentum: float
) -> list[Layer]:
    """Return the weights after naive, stashing, vertical sync or SpecTrain, with a stage for each layer.

    With stages n = 1 ... N, batch t's forward at stage n comes when the gradients of batches up to t - 1 - (N - n) have
    been applied there, its backward when those up to t - 1 have been.
    """
    num_stages = len(layers)
    # Weights and v of each stage by how many batches have been applied.
    history: list[list[Layer]] = [layers]
    smoothed: list[list[Layer]] = [[(np.zeros_like(w), np.zeros_like(b)) for w, b in layers]]
    optimizer = Momentum(momentum)
    for t, batch in enumerate(batches, 1):
        seen = [max(0, t - 1 - (num_stages - n)) for n in range(1, num_stages + 1)]
        forward = [history[version][n] for n, version in enumerate(seen)]
        if policy == "naive":
            backward = history[t - 1]
        elif policy == "stashing":
            backward = forward
        elif policy == "vertical_sync":
            forward = backward = history[max(0, t - num_stages)]
        else:
            assert policy == "spectrain"
            forward = [
                moved([history[version][n]], [smoothed[version][n]], lr * (t - 1 - version))[0]
                for n, version in enumerate(seen)
            ]
            backward = history[t - 1]
        history.append(optimizer.step(history[-1], gradients(forward, backward, batch), lr))
        assert optimizer.v is not None
        smoothed.append(optimizer.v)
    return history[-1]


def elastic(
    layers: list[Layer],
    batches: Sequence[Batch],
    num_replicas: int,
    alpha: float,
    tau: int,
    lr: float,
    momentum: float,
) -> tuple[list[Layer], list[list[Layer]]]:
    """Return master and replicas after the round-robin elastic averaging algorithm.

    Replica i trains on batches i, i + N, ... in turn with the others, with momentum of its own.
    """
    master = layers
    replicas = [layers] * num_replicas
    optimizers = [Momentum(momentum) for _ in replicas]
    for t, batch in enumerate(batches, 1):
        i = (t - 1) % num_replicas
        x = optimizers[i].step(replicas[i], gradients(replicas[i], replicas[i], batch), lr)
        if -(-t // num_replicas) % tau == 0:
            away = [(xw - mw, xb - mb) for (xw, xb), (mw, mb) in zip(x, master, strict=True)]
            x, master = moved(x, away, alpha), moved(master, away, -alpha)
        replicas[i] = x
    return master, replicas
