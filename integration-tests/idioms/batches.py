"""Whole batches by the number of a step, the same in every process, and small models in float64."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

#: Can be shared out among 1, 2 and 3 ranks, for each of the halves too.
SAMPLES = 12
FEATURES, CLASSES = 6, 3


def drawn(step: int, *shape: int, kind: int = 0) -> Tensor:
    """Draw normal values; others for another `kind`."""
    generator = torch.Generator().manual_seed(1000 * (kind + 1) + step)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def classified(step: int, kind: int = 0) -> tuple[Tensor, Tensor]:
    """Return inputs [samples, features] and their classes."""
    x = drawn(step, SAMPLES, FEATURES, kind=kind)
    return x, x[:, :CLASSES].argmax(1)


def images(step: int) -> Tensor:
    """Return pictures [samples, 1, 4, 4] of a bright half."""
    x = 0.1 * drawn(step, SAMPLES, 1, 4, 4)
    x[:, :, 2:] += 1
    return x


def tokens(step: int, length: int = 5, words: int = 7) -> Tensor:
    """Return sentences [samples, length] of words' numbers."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, words, (SAMPLES, length), generator=generator)


def mlp(*sizes: int, seed: int = 0) -> nn.Sequential:
    """Return layers of these sizes with tanh between them; from features to classes by default."""
    sizes = sizes or (FEATURES, 8, CLASSES)
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for wide, narrow in itertools.pairwise(sizes):
        layers += [nn.Linear(wide, narrow), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).double()
