"""A training whose every draw matters: dropout, batch norm, shuffling, and samples that are augmented when read."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import hocket
from hocket.session.save.loading import Resumed


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Samples with noise from each of the global generators."""

    def __init__(self, rank: int, count: int) -> None:
        generator = torch.Generator().manual_seed(100 + rank)
        self.inputs = torch.randn(count, 5, generator=generator)
        self.targets = torch.randint(0, 3, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.randn(5) + float(np.random.standard_normal()) + random.random()
        return self.inputs[index] + 0.1 * noise, self.targets[index]


class Stateful:
    """A loader that knows its place, as torchdata's does, and draws its order from a state of its own."""

    def __init__(self, samples: Noisy, batch_size: int) -> None:
        self._samples, self._batch_size = samples, batch_size
        self._order: list[int] = []
        self._position = 0
        self._resumes = False
        self.num_read = 0

    def __len__(self) -> int:
        return math.ceil(len(self._samples) / self._batch_size)

    def __iter__(self) -> Iterator[Any]:
        if not self._resumes:
            self._order, self._position = torch.randperm(len(self._samples)).tolist(), 0
        self._resumes = False
        while self._position < len(self._order):
            chosen = self._order[self._position : self._position + self._batch_size]
            self._position += len(chosen)
            self.num_read += 1
            yield torch.utils.data.default_collate([self._samples[index] for index in chosen])

    def state_dict(self) -> dict[str, Any]:
        return {"order": self._order, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._order, self._position, self._resumes = state["order"], state["position"], True


def model_of(width: int = 7) -> nn.Module:
    frozen = nn.Linear(5, 5).requires_grad_(False)
    return nn.Sequential(
        frozen, nn.Linear(5, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Linear(width, 3)
    )


@dataclass
class Result:
    """What a run gave on one rank.

    Attributes:
        losses: of the steps that this process made, by number.
        state: the model's at the end.
        momenta: the optimizer's tensors.
        resumed: what it continued from.
    """

    losses: dict[int, float]
    state: dict[str, Tensor]
    momenta: list[Tensor]
    resumed: Resumed | None

    def bits(self) -> tuple[Any, ...]:
        """Return all of it that a resumed run shares with one that was never interrupted."""
        tensors = (*self.state.values(), *self.momenta)
        return tuple(self.state), tuple(t.numpy().tobytes() for t in tensors)


@dataclass
class Training:
    """A run on one rank; each call makes everything anew, as another process would.

    Attributes:
        strategy: what `hocket.compose` takes.
        loader: `workers=0`, `workers=2`, `generator` or `stateful`.
        samples: how many for each rank, by rank; 4 make a batch.
        seed: added to everything that a resumed run must not depend on.
    """

    strategy: Sequence[str]
    loader: str = "workers=0"
    samples: Sequence[int] = (18, 18, 18, 18)
    epochs: int = 3
    seed: int = 0
    initial: Literal["rank0", "keep"] = "rank0"
    optimizer: str = "sgd"
    width: int = 7
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(
        self,
        rank: int,
        *,
        save: tuple[Path, Sequence[int]] | None = None,
        load: Path | None = None,
        stop: int | None = None,
    ) -> Result:
        """Train; save to a folder after some steps, continue from one, or stop after a step as if killed there."""
        seed = self.seed + rank
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        model = model_of(self.width)
        optimizer = self._optimizer(model)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [4, 9], 0.5)
        loader = self._loader(rank)
        losses: dict[int, float] = {}
        resumed = None
        with hocket.attach(model, optimizer, hocket.compose(*self.strategy), initial=self.initial) as session:
            if load is not None:
                resumed = session.load(load, scheduler=scheduler)
            for _ in range(resumed.epoch if resumed else 0, self.epochs):
                for x, y in session.data(loader):
                    optimizer.zero_grad()
                    loss = F.cross_entropy(model(x), y)
                    loss.backward()
                    optimizer.step()
                    scheduler.step()
                    losses[session.step] = loss.item()
                    if save is not None and session.step in save[1]:
                        session.save(save[0], scheduler=scheduler, **self.options)
                    if session.step == stop:
                        return self._result(model, optimizer, losses, resumed)
        return self._result(model, optimizer, losses, resumed)

    def _optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        parameters = [p for p in model.parameters() if p.requires_grad]
        if self.optimizer == "adam":
            return torch.optim.Adam(parameters, lr=0.01)
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    def _loader(self, rank: int) -> Any:
        samples = Noisy(rank, self.samples[rank])
        if self.loader == "stateful":
            return Stateful(samples, 4)
        if self.loader == "generator":
            return DataLoader(samples, 4, shuffle=True, generator=torch.Generator().manual_seed(self.seed))
        num_workers = int(self.loader[-1])
        # A fork of a process with threads, as virtual ranks and pytest-xdist are, can find a lock taken for ever.
        context = _forkserver() if num_workers else None
        return DataLoader(
            samples, 4, shuffle=len(samples) > 0, num_workers=num_workers, multiprocessing_context=context
        )

    @staticmethod
    def _result(
        model: nn.Module, optimizer: torch.optim.Optimizer, losses: dict[int, float], resumed: Resumed | None
    ) -> Result:
        state = {name: value.clone() for name, value in model.state_dict().items()}
        momenta = [v.clone() for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
        return Result(losses, state, momenta, resumed)


@cache
def _forkserver() -> ForkServerContext:
    context = get_context("forkserver")
    # What unpickling samples imports, once for all workers.
    context.set_forkserver_preload(
        ["torch", "numpy", "hocket.session.session", "hocket.session.save.loading"]
    )
    return context


def on_ranks(size: int, training: Training, **given: Any) -> list[Result]:
    """Run a training on `size` virtual ranks."""
    return hocket.virtual(size).run(lambda: training(hocket.join().rank, **given))
