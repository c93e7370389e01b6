"""Engines: each owns how a batch becomes a step of the optimizer. Importing this imports no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hocket.configured import Configured

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from hocket.plain import Batch
    from hocket.session.api import Attachment, Loss, StepResult, TrainStep
    from hocket.session.engine_session import EngineSession
    from hocket.session.replica_session import ReplicaSession


class Engine(Configured, ABC):
    """A way from a batch to a step; a frozen dataclass whose fields are its configuration."""

    @property
    def clips(self) -> str | None:
        """Return the setting that clips gradients, where the engine steps parts of the model by itself; else None."""
        return None

    @abstractmethod
    def attach(self, given: Attachment) -> EngineSession:
        """Return a session whose `train_batch` is this engine's step; collective.

        Args:
            given: model, optimizers, strategy and endpoint, as `hocket.attach` has checked them.

        Raises:
            AttachError: the engine cannot carry the model or the optimizer.
            CompositionError: it cannot carry out the strategy, or on this number of ranks.
        """

    def check_size(self, ranks: int) -> None:
        """Refuse a number of ranks that the engine is not defined for.

        Raises:
            ValueError: the engine is not defined for it; the message says for which it is.
        """

    def data_size(self, ranks: int) -> int:
        """Return the number of model replicas, among which samples are shared out and the strategy exchanges.

        Args:
            ranks: number of all ranks, 1 or more.
        """
        return ranks

    def plan_stages(
        self, model: nn.Module, optimizer: Optimizer, example: Batch, loss: Loss, ranks: int
    ) -> tuple[PlannedStage, ...]:
        """Return the costs of each part of the model; empty where every rank holds a whole model.

        Args:
            model: on the CPU, with values; a copy of it is called.
            optimizer: over its parameters.
            example: a batch with the shapes and dtypes to plan for.
            loss: as in training.
            ranks: number of all ranks.
        """
        return ()


@dataclass(frozen=True)
class PlannedStage:
    """A part of the model, with its costs for the rank that holds it.

    Attributes:
        name: of its first and its last module.
        num_parameters: number of trainable values.
        weights_bytes: all copies of its parameters and buffers.
        optimizer_bytes: the optimizers' state for all of them.
        activations_bytes: tensors kept for the backwards of batches under way, at most.
        peak_bytes: all tensors held at once, at most: those above, and gradients and other tensors of a running pass.
        sent_bytes: activations and their gradients that leave it, per batch.
    """

    name: str
    num_parameters: int
    weights_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    peak_bytes: int
    sent_bytes: int


class ReplicaEngine(Engine):
    """An engine whose ranks each hold a whole model."""

    def attach(self, given: Attachment) -> EngineSession:
        from hocket.session.replica_session import ReplicaSession

        session = ReplicaSession(given)
        try:
            session.train_step = self.open(session)
        except BaseException:
            session.abandon()
            raise
        return session

    @abstractmethod
    def open(self, session: ReplicaSession) -> TrainStep:
        """Prepare the session's model for steps; return the function for a batch; collective.

        Within `session.accumulate` a batch's gradients are added to those before, and no optimizer steps.
        """


@dataclass(frozen=True)
class DataParallel(ReplicaEngine):
    """The usual step: zero_grad, forward, backward, optimizer step; over all batches that accumulate."""

    def open(self, session: ReplicaSession) -> TrainStep:
        from hocket.session.api import StepResult
        from hocket.session.data.batch import call, parts_of

        model, optimizers = session.model, session.optimizers
        accumulated = False

        def step(batch: Batch, loss: Loss) -> StepResult:
            nonlocal accumulated
            inputs, target = parts_of(batch)
            if not accumulated:
                optimizers.zero_grad()
            output = call(model, inputs)
            value = loss(output, target)
            value.backward()
            accumulated = session.state.accumulating
            if not accumulated:
                optimizers.step()
            return StepResult(value.detach(), _without_graph(output))

        return step


def _without_graph(output: Batch) -> Batch:
    """Return a model's output, any nesting of tuples, lists and dictionaries, with each tensor detached."""
    from torch import Tensor
    from torch.utils._pytree import tree_map_only

    return tree_map_only(Tensor, Tensor.detach, output)
