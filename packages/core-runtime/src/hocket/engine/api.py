"""What an engine is: it owns how a batch becomes a step of the optimizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hocket.configured import Configured

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from hocket.session import Session, TrainingSession
    from hocket.strategy.strategy import Strategy
    from hocket.trace import Observer
    from hocket.transport.peer import Peer

__all__ = ["Attachment", "Batch", "Engine", "Loss", "MakeOptimizer", "PlannedStage", "StepResult", "Stepper"]

#: From the model's output and the batch's target to a scalar, the mean over the batch.
Loss = Callable[[Any, Any], "Tensor"]

#: (input, target), as a loader yields them.
Batch = tuple[Any, Any]

#: From parameter groups, as torch's optimizers take them, to an optimizer over them.
MakeOptimizer = Callable[[list[dict[str, Any]]], "Optimizer"]


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
    def step(self, batch: Any, loss: Loss) -> StepResult | None:
        """Run one batch through the model and step the optimizer.

        Args:
            batch: (input, target), as the loader yields them.
            loss: called with the model's output and the target.

        Returns:
            What the batch gave; None where another rank has the model's output.
        """


@dataclass(frozen=True)
class Attachment:
    """What `hocket.attach` was given; checked, and the same on all ranks.

    Attributes:
        model, optimizers, strategy: as they were given; the model with this rank's own values.
        peer: all ranks.
        initial: `rank0` or `keep`.
        on_nonfinite: `error` or `skip`.
        observer: is told of exchanges, waits and phases; None where nobody asks.
        make_optimizer: makes, of parameter groups, another optimizer like the given one, for engines that keep several
            copies of the weights; None where the engine is to copy the given one.
    """

    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    strategy: Strategy
    peer: Peer
    initial: str
    on_nonfinite: str
    observer: Observer | None
    make_optimizer: MakeOptimizer | None


class Engine(Configured, ABC):
    """How a batch becomes a step; a frozen dataclass whose fields are its configuration.

    An engine whose ranks hold whole models implements `open`; one that shares a model out over ranks also implements
    `attach` with a session of its own.
    """

    def attach(self, given: Attachment) -> TrainingSession:
        """Make a session whose `train_batch` is this engine's step; collective.

        Raises:
            AttachError: the engine cannot carry the model or the optimizer.
            CompositionError: it cannot do with the strategy, or with so many ranks.
        """
        from hocket.session.attaching import attach_replica

        session = attach_replica(given)
        try:
            session.stepper = self.open(session)
        except BaseException:
            session.abandon()
            raise
        return session

    @abstractmethod
    def open(self, session: Session) -> Stepper:
        """Make ready to step the session's model, which is whole on every rank; collective."""

    def check_size(self, ranks: int) -> None:
        """Refuse a number of ranks for which the engine is not defined.

        Raises:
            ValueError: says for which it is.
        """

    def data_size(self, ranks: int) -> int:
        """Return among how many replicas of the model the samples are shared out, and the strategy exchanges."""
        return ranks

    def plan_stages(
        self, model: nn.Module, optimizer: Optimizer, example: Batch, loss: Loss, ranks: int
    ) -> tuple[PlannedStage, ...]:
        """Plan what each part of the model costs whoever holds it; nothing where every rank holds a whole one.

        Args:
            model: on the CPU, with values; what is called is a copy of it.
            optimizer: over its parameters.
            example: a batch, of which shapes and dtypes are looked at.
            loss: as in training.
            ranks: how many.
        """
        return ()


@dataclass(frozen=True)
class PlannedStage:
    """A part of the model, and what it costs whoever holds it.

    Attributes:
        name: of its first and its last module.
        num_parameters: trainable numbers.
        weights_bytes: all copies of its parameters and buffers.
        optimizer_bytes: what the optimizers keep for all of them.
        activations_bytes: what the batches under way keep for their backwards, at most.
        peak_bytes: of tensors that are held at once, at most: all of these, and the gradients and other tensors that a
            pass holds while it runs.
        sent_bytes: activations and their gradients that leave it, per batch.
    """

    name: str
    num_parameters: int
    weights_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    peak_bytes: int
    sent_bytes: int
