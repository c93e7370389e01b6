"""The plain engine: every rank runs its batch through a whole model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hocket.engine.api import Engine, Loss, Stepper, StepResult

if TYPE_CHECKING:
    from hocket.session import Session

__all__ = ["DataParallel"]


class _DataParallelStepper(Stepper):
    def __init__(self, session: Session) -> None:
        self._model, self._optimizers = session.model, session.optimizers

    def step(self, batch: Any, loss: Loss) -> StepResult:
        inputs, target = batch
        self._optimizers.zero_grad()
        output = self._model(inputs)
        value = loss(output, target)
        value.backward()
        self._optimizers.step()
        return StepResult(value.detach(), _without_graph(output))


@dataclass(frozen=True)
class DataParallel(Engine):
    """zero_grad, forward, backward, step."""

    def open(self, session: Session) -> Stepper:
        return _DataParallelStepper(session)


def _without_graph(output: Any) -> Any:
    """Return a model's output, any nesting of tuples, lists and dictionaries, with each tensor detached."""
    from torch import Tensor
    from torch.utils._pytree import tree_map_only

    return tree_map_only(Tensor, Tensor.detach, output)
