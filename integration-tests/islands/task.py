"""A task whose model islands shard: the transformer of hocket-tasks in float64, with rows that do not halve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle
from torch.nn import functional as F

from hocket.api import Task, TaskData, TensorSamples
from hocket_tasks.transformer import CharacterTransformer

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


@dataclass(frozen=True)
class Even(Characters):
    """The same with heads and hidden units that two ranks can share out, by the task's plan."""

    hidden: int = 12
    heads: int = 4

    def model(self) -> nn.Module:
        return CharacterTransformer(NUM_CHARACTERS, LENGTH, self.hidden, layers=2, heads=self.heads).double()

    def tensor_plan(self, model: nn.Module, ranks: int) -> Mapping[str, ParallelStyle]:
        assert isinstance(model, CharacterTransformer)
        return model.tensor_plan(ranks)


@dataclass(frozen=True)
class EvenShort(Even):
    """The same in float32."""

    def model(self) -> nn.Module:
        return super().model().float()


@dataclass(frozen=True)
class Uneven(Even):
    """The same with a plan that gives two ranks different parts."""

    def tensor_plan(self, model: nn.Module, ranks: int) -> Mapping[str, ParallelStyle]:
        return {"head": ColwiseParallel(output_layouts=Replicate())}


@dataclass(frozen=True)
class Misnamed(Even):
    """The same with a plan of a module that is not there."""

    def tensor_plan(self, model: nn.Module, ranks: int) -> Mapping[str, ParallelStyle]:
        return {"layers.*.attention": ColwiseParallel()}


@dataclass(frozen=True)
class Dropped(Even):
    """The same with dropout of what ranks that share out a computation have whole."""

    def model(self) -> nn.Module:
        model: Any = super().model()
        model.norm = nn.Sequential(model.norm, nn.Dropout(0.2))
        whole: nn.Module = model
        return whole
