"""The samples of a task, as what they are."""

from __future__ import annotations

from typing import TypeVar

from hocket.task import BatchedSamples, Task

__all__ = ["samples_of"]

S = TypeVar("S", bound=BatchedSamples)


def samples_of(kind: type[S], task: Task, seed: int = 0) -> tuple[S, S]:
    """Return the samples for training and the held-out ones."""
    data = task.data(seed)
    assert isinstance(data.train, kind)
    assert isinstance(data.valid, kind)
    return data.train, data.valid
