"""The learning rates of a run over its steps, as its schedulers say."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from hocket.config.reference import Reference
from hocket.config.scheduler import build_scheduler, metric_of
from hocket.errors import suggest
from hocket.plain import Tree, TreeView
from hocket.results import TRAIN_LOSS, VALID
from hocket.results.history import is_number


class Schedules:
    """The schedules of a run: each of its schedulers over each of its optimizers.

    Args:
        references: the run's schedulers.
        optimizers: all optimizers that step the model.

    Raises:
        ConfigError: as in `build_scheduler`, or a scheduler's metric is neither a loss nor a metric.
    """

    def __init__(self, references: Sequence[Reference], optimizers: Sequence[Optimizer]) -> None:
        self._references = references
        self._metrics = [metric_of(each) for each in references]
        for reference, metric in zip(references, self._metrics, strict=True):
            if metric is not None and metric != TRAIN_LOSS and not metric.startswith(VALID):
                allowed = f"{TRAIN_LOSS}, or a name that begins with {VALID}, such as {VALID}loss"
                raise reference.where.child("metric").error(f"got {metric!r}", allowed)
        self._built: list[list[Any]] = [
            [build_scheduler(each, optimizer) for optimizer in optimizers] for each in references
        ]

    def after_step(self) -> None:
        """Step schedulers after a step of the optimizers."""
        for metric, schedulers in zip(self._metrics, self._built, strict=True):
            for scheduler in schedulers if metric is None else ():
                scheduler.step()

    def after_row(self, row: TreeView) -> None:
        """Step schedulers by a row of metrics, whose losses and metrics are the same on all ranks.

        Raises:
            ConfigError: the row lacks a scheduler's metric.
        """
        known = [
            name for name in row if name == TRAIN_LOSS or (name.startswith(VALID) and is_number(row[name]))
        ]
        validated = any(name.startswith(VALID) for name in row)
        for reference, metric, schedulers in zip(self._references, self._metrics, self._built, strict=True):
            if metric is None or (metric != TRAIN_LOSS and not validated):
                continue
            if metric not in known:
                raise reference.where.child("metric").error(
                    f"the task has no metric {metric!r}", ", ".join(known), suggest(metric, known)
                )
            for scheduler in schedulers:
                scheduler.step(row[metric])

    def check(self) -> None:
        """Step all once, to find arguments that nothing can be computed with; they are of no use afterwards.

        Raises:
            ConfigError: a scheduler cannot step; names source and key.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that no optimizer has stepped before
            for reference, metric, schedulers in zip(
                self._references, self._metrics, self._built, strict=True
            ):
                for scheduler in schedulers:
                    try:
                        scheduler.step() if metric is None else scheduler.step(1.0)
                    except Exception as error:
                        text = f"{type(error).__name__}: {error}"
                        raise reference.where.error(f"{reference.name} cannot step: {text}") from error

    def state_dict(self) -> list[list[Tree]]:
        """Return every scheduler's state."""
        return [[scheduler.state_dict() for scheduler in schedulers] for schedulers in self._built]

    def load_state_dict(self, state: Sequence[Sequence[Tree]]) -> None:
        """Go on from what `state_dict` returned."""
        for schedulers, saved in zip(self._built, state, strict=True):
            for scheduler, own in zip(schedulers, saved, strict=True):
                scheduler.load_state_dict(own)
