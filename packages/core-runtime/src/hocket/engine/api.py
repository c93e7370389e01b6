"""What an engine is: it owns how a batch becomes a step of the optimizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from hocket.session import Session

__all__ = ["Engine", "Loss", "StepResult", "Stepper"]

#: From the model's output and the batch's target to a scalar, the mean over the batch.
Loss = Callable[[Any, Any], "Tensor"]


@dataclass(frozen=True)
class StepResult:
    """What one batch gave.

    Attributes:
        loss: the batch's mean loss, a scalar without graph, on the model's device.
        output: the model's output, without graph.
    """

    loss: Tensor
    output: Any


class Stepper(ABC):
    """An engine at work on one rank."""

    @abstractmethod
    def step(self, batch: Any, loss: Loss) -> StepResult:
        """Run one batch through the model and step the optimizer.

        Args:
            batch: (input, target), as the loader yields them.
            loss: called with the model's output and the target.
        """


class Engine(ABC):
    """How a batch becomes a step; a frozen dataclass whose fields are its configuration."""

    @abstractmethod
    def open(self, session: Session) -> Stepper:
        """Make ready to step the session's model; collective."""
