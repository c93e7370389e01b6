"""Loss and metrics of a model on held-out samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import Dataset

from hocket.task import Task
from hocket.task.samples import BatchedSamples
from hocket.training.devices import moved

if TYPE_CHECKING:
    from hocket.session.api import Loss, TrainingSession

__all__ = ["Evaluation", "evaluate", "evaluate_together"]

_BATCH = 512


@dataclass
class Evaluation:
    """Sums over samples, so that parts can be added.

    Attributes:
        samples: how many.
        loss: sum over samples.
        metrics: sums over samples, by name.
    """

    samples: int
    loss: float
    metrics: dict[str, float]

    @property
    def mean_loss(self) -> float:
        """Mean over samples."""
        return self.loss / max(1, self.samples)

    def mean(self, name: str) -> float | None:
        """Return a metric's mean over samples, None where the task has no such metric."""
        return self.metrics[name] / max(1, self.samples) if name in self.metrics else None


def evaluate(
    model: nn.Module,
    task: Task,
    loss: Loss,
    samples: Dataset[Any],
    indices: Sequence[int],
    device: torch.device,
) -> Evaluation:
    """Evaluate `model`, which is on `device`, on the samples at `indices`, in evaluation mode."""
    training = model.training
    model.eval()
    total = Evaluation(0, 0.0, {})
    with torch.no_grad():
        for start in range(0, len(indices), _BATCH):
            chosen = list(indices[start : start + _BATCH])
            inputs, target = moved(_batch(samples, chosen), device)
            output = model(inputs)
            total.samples += len(chosen)
            total.loss += float(loss(output, target)) * len(chosen)
            for name, value in task.metrics(output, target).items():
                total.metrics[name] = total.metrics.get(name, 0.0) + float(value)
    model.train(training)
    return total


def evaluate_together(
    session: TrainingSession, task: Task, loss: Loss, samples: Any, device: torch.device
) -> Evaluation:
    """Evaluate one model that all ranks have, each on its share of the samples; collective."""
    mine = range(session.rank, len(samples), session.size)
    part = evaluate(session.model, task, loss, samples, mine, device)
    parts = session.gather([part.samples, part.loss, part.metrics])
    names = part.metrics.keys() | {name for _, _, metrics in parts for name in metrics}
    return Evaluation(
        sum(count for count, _, _ in parts),
        sum(loss for _, loss, _ in parts),
        {name: sum(metrics.get(name, 0.0) for _, _, metrics in parts) for name in sorted(names)},
    )


def _batch(samples: Any, indices: list[int]) -> Any:
    if isinstance(samples, BatchedSamples):
        return samples[indices]
    return torch.utils.data.default_collate([samples[index] for index in indices])
