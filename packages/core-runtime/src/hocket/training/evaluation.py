"""Loss and metrics of a model on held-out samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.utils.data import Dataset

from hocket.errors import ConfigError
from hocket.messages import pack, unpack
from hocket.plain import Batch
from hocket.session.data.batch import call, parts_of
from hocket.task import Task
from hocket.task.samples import batch_of
from hocket.training.devices import moved
from hocket.training.meters import Meter, Value, meters_of, value_of

if TYPE_CHECKING:
    from hocket.session.api import Loss
    from hocket.session.session import Session

_BATCH = 512


@dataclass
class Evaluation:
    """Sums over samples, which can be added, and torchmetrics objects that have seen the samples.

    Attributes:
        samples: the number of samples.
        loss: the sum of the samples' losses.
        metrics: sums over samples, by name.
        meters: the task's torchmetrics objects, by name.
    """

    samples: int
    loss: float
    metrics: dict[str, float]
    meters: dict[str, Meter] = field(default_factory=dict)

    def values(self) -> dict[str, Value]:
        """Return loss and metrics by name: means over samples, and torchmetrics' values.

        Collective if the meters gather over ranks.
        """
        sums = {"loss": self.loss, **self.metrics}
        means = {name: total / max(1, self.samples) for name, total in sums.items()}
        return means | {name: value_of(meter.compute()) for name, meter in self.meters.items()}


def evaluate(
    model: nn.Module,
    task: Task,
    loss: Loss,
    samples: Dataset[Batch],
    indices: Sequence[int],
    device: torch.device,
    meters: dict[str, Meter] | None = None,
    batches: int = 0,
) -> Evaluation:
    """Evaluate `model`, which is on `device`, on the samples at `indices`, in evaluation mode.

    Args:
        meters: torchmetrics objects to use; None for copies of the task's own, over this rank's samples.
        batches: the least number of forwards, which the ranks of an island take together; those without samples count
            nothing.

    Raises:
        ConfigError: the task's metrics are no numbers by name, or one is named as the loss or a torchmetrics object.
    """
    training = model.training
    model.eval()
    total = Evaluation(0, 0.0, {}, meters_of(task, None) if meters is None else meters)
    for meter in total.meters.values():
        meter.to(device)
    with torch.no_grad():
        for start in range(0, max(len(indices), _BATCH * batches), _BATCH):
            chosen = list(indices[start : start + _BATCH])
            inputs, target = parts_of(moved(batch_of(samples, chosen or [0]), device))
            output = call(model, inputs)
            if not chosen:
                continue
            total.samples += len(chosen)
            total.loss += float(loss(output, target)) * len(chosen)
            for name, value in _sums(task, output, target).items():
                _check_name(name, total.meters, task)
                total.metrics[name] = total.metrics.get(name, 0.0) + value
            for meter in total.meters.values():
                meter.update(output, target)
    model.train(training)
    return total


def evaluate_together(
    session: Session, task: Task, loss: Loss, samples: Dataset[Batch], device: torch.device
) -> dict[str, Value]:
    """Evaluate one model that all ranks have, each on its share of the samples, and return `Evaluation.values`.

    Collective.
    """
    count = len(cast(Sized, samples))
    island = session.inner.island
    mine = range(island.data_rank, count, island.data_size)
    most = len(range(0, count, island.data_size))  # of rank 0
    readers = _readers(session)
    meters = meters_of(
        task, lambda tensor: _gather(session, tensor, readers) if session.size > 1 else [tensor]
    )
    part = evaluate(session.model, task, loss, samples, mine, device, meters, -(-most // _BATCH))
    of_ranks = session.gather([part.samples, part.loss, part.metrics])
    parts = [of_ranks[rank] for rank in readers]
    names = part.metrics.keys() | {name for _, _, metrics in parts for name in metrics}
    return Evaluation(
        sum(count for count, _, _ in parts),
        sum(loss for _, loss, _ in parts),
        {name: sum(metrics.get(name, 0.0) for _, _, metrics in parts) for name in sorted(names)},
        meters,
    ).values()


def _readers(session: Session) -> Sequence[int]:
    """Return a rank for each share of the samples: several may compute with the same ones; collective."""
    island = session.inner.island
    if island.data_size == session.size:
        return range(session.size)
    shares = session.gather(island.data_rank)
    return [shares.index(share) for share in range(island.data_size)]


def _gather(session: Session, tensor: torch.Tensor, readers: Sequence[int]) -> list[torch.Tensor]:
    """Return the tensors of the readers that have seen samples; those of others are empty, of any dtype."""
    of_ranks = session.peer.allgather_bytes(pack(tensor.detach()))
    gathered = [unpack(of_ranks[rank]).to(tensor.device) for rank in readers]
    return [each for each in gathered if each.numel()] or gathered


def _sums(task: Task, output: Batch, target: Batch) -> dict[str, float]:
    """Return a task's metrics of a batch, by name."""
    found: object = task.metrics(output, target)
    where = f"metrics() of task {type(task).__name__}"
    if not isinstance(found, Mapping):
        raise ConfigError(f"{where} returned {type(found).__name__}; allowed: a mapping of names to numbers")
    sums = {}
    for name, value in found.items():
        try:
            sums[name] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            shape = f" of shape {list(value.shape)}" if hasattr(value, "shape") else ""
            raise ConfigError(
                f"{where}: {name!r} is {type(value).__name__}{shape}; allowed: one number, the sum over the batch"
            ) from error
    return sums


def _check_name(name: str, meters: dict[str, Meter], task: Task) -> None:
    if name == "loss" or name in meters:
        taken = "the task's loss" if name == "loss" else "one of its torchmetrics objects"
        raise ConfigError(
            f"metrics() of task {type(task).__name__}: {name!r} is {taken} already: give it another name"
        )
