"""A LightningModule, its data, and the plain loop over a session that a Trainer has to agree with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import hocket
from hocket_lightning import HocketStrategy

T = TypeVar("T")
BATCH = 4


def samples(count: int = 48, seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 5, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 3, (count,), generator=generator))


def flat(model: nn.Module) -> Tensor:
    """Copy the parameters into one vector."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


class Net(lightning.LightningModule):
    """A small classifier.

    Args:
        dropout: of its hidden layer.
        rate: of SGD, or of Adam with `adam`.
    """

    def __init__(self, dropout: float = 0.0, rate: float = 0.1, *, adam: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Dropout(dropout), nn.Linear(7, 3))
        self.rate, self.adam = rate, adam

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        if self.adam:
            return torch.optim.Adam(self.parameters(), self.rate)
        return torch.optim.SGD(self.parameters(), self.rate, momentum=0.9)


class Stream(IterableDataset[Any]):
    """Samples of an IterableDataset.

    Args:
        of: yields the samples of this rank.
    """

    def __init__(self, of: Callable[[], Iterator[Any]]) -> None:
        self._of = of

    def __iter__(self) -> Iterator[Any]:
        return self._of()


def on_ranks(call: Callable[[], T], size: int = 2) -> list[T]:
    """Run `call()` on virtual ranks."""
    return hocket.virtual(size).run(call)


def trainer(*strategy: str, options: dict[str, Any] | None = None, **settings: Any) -> lightning.Trainer:
    quiet = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "max_epochs": 2,
    }
    exchanges = HocketStrategy(*strategy, **(options or {}))
    return lightning.Trainer(strategy=exchanges, **{**quiet, **settings})


def fitted(net: Any, *strategy: str, data: Any = None, **settings: Any) -> Tensor:
    """Train by a Trainer; return the parameters."""
    trainer(*strategy, **settings).fit(
        net, DataLoader(samples(), BATCH, shuffle=True) if data is None else data
    )
    return flat(net)


def looped(
    net: Net, *strategy: str, epochs: int = 2, accumulate: int = 1, clip: float | None = None
) -> Tensor:
    """Train by a plain loop over a session; return the parameters of the replicas' mean."""
    optimizer, peer = net.configure_optimizers(), hocket.join()
    sampler: DistributedSampler[Any] = DistributedSampler(samples(), peer.size, peer.rank, seed=0)
    with hocket.attach(net, optimizer, hocket.compose(*strategy)) as session:
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for number, batch in enumerate(DataLoader(samples(), BATCH, sampler=sampler)):
                if (number + 1) % accumulate:
                    with session.accumulate():
                        (net.loss(batch) / accumulate).backward()
                    continue
                (net.loss(batch) / accumulate).backward()
                if clip is not None:
                    session.clip_grad_norm_(clip)
                optimizer.step()
                optimizer.zero_grad()
        session.consensus()
    return flat(net)
