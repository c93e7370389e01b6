"""A task whose model islands shard: the transformer of hocket-tasks in float64, with rows that do not halve."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hocket.api import Task, TaskData, TensorSamples
from hocket_tasks.transformer import CharacterTransformer

__all__ = ["Characters", "Scaled", "Short"]

#: The last batch of an epoch is uneven, in islands as for whole models, and one of four ranks has nothing to evaluate.
TRAINED, HELD_OUT = 103, 3
LENGTH, NUM_CHARACTERS = 8, 13


@dataclass(frozen=True)
class Characters(Task):
    """Prediction of each next character."""

    def data(self, seed: int) -> TaskData:
        drawn = torch.Generator().manual_seed(5)
        given = torch.randint(0, NUM_CHARACTERS, (TRAINED + HELD_OUT, LENGTH), generator=drawn)
        target = (2 * given + given.roll(1, dims=1)) % NUM_CHARACTERS
        parts = slice(TRAINED), slice(TRAINED, None)
        return TaskData(*(TensorSamples(given[part], target[part]) for part in parts))

    def model(self) -> nn.Module:
        return CharacterTransformer(NUM_CHARACTERS, LENGTH, hidden=9, layers=2, heads=3).double()

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"accuracy": (output.argmax(2) == target).double().mean(1).sum()}


@dataclass(frozen=True)
class Scaled(Characters):
    """The same with a parameter that FSDP2 does not shard."""

    def model(self) -> nn.Module:
        model = super().model()
        model.scale = nn.Parameter(torch.tensor(1.0))
        return model


@dataclass(frozen=True)
class Short(Characters):
    """The same in float32."""

    def model(self) -> nn.Module:
        return super().model().float()
