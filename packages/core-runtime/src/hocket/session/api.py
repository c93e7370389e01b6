"""The terms in which sessions, engines and scripts speak of a batch, and what an engine is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from hocket.plain import Batch, Tree
from hocket.session.island import Island
from hocket.strategy.strategy import Strategy
from hocket.trace import Observer
from hocket.transport.peer import Peer

#: From the model's output and the batch's target to a scalar, the mean over the batch.
Loss = Callable[[Batch, Batch], Tensor]

#: From parameter groups, as torch's optimizers take them, to an optimizer over them.
MakeOptimizer = Callable[[list[Tree]], Optimizer]


@dataclass(frozen=True)
class StepResult:
    """The result of one batch.

    Attributes:
        loss: the batch's mean loss, a scalar without graph, on the model's device.
        output: the model's output, without graph.
    """

    loss: Tensor
    output: Batch


#: Runs one batch, as the loader yields it, through the model and steps the optimizer; returns what the batch gave, None
#: where another rank has the model's output. The loss is called with the model's output and the target.
TrainStep = Callable[[Batch, Loss], StepResult | None]


@dataclass(frozen=True)
class Attachment:
    """The checked arguments of `hocket.attach`, the same on all ranks.

    Attributes:
        model, optimizers, strategy: as given; the model with this rank's own values.
        peer: all ranks.
        initial: `rank0` or `keep`.
        on_nonfinite: `error` or `skip`.
        on_difference: `average` or `error`.
        lanes: `host`, `nccl` or `gloo`.
        observer: is notified of exchanges, waits and phases; None for no observer.
        make_optimizer: makes another optimizer like the given one from parameter groups, for engines that keep several
            copies of the weights; None where the engine is to copy the given one.
        statistics: names of buffers that are averaged like BatchNorm's, with `*` for any text.
        island: the ranks that hold one replica together; None if each rank holds a whole model.
    """

    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    strategy: Strategy
    peer: Peer
    initial: str
    on_nonfinite: str
    on_difference: str
    lanes: str
    observer: Observer | None
    make_optimizer: MakeOptimizer | None
    statistics: tuple[str, ...] = ()
    island: Island | None = None


def left_by(error: BaseException, step: int) -> str:
    """Return the end of a sentence on how a rank has left a session."""
    text = " ".join(str(error).split())
    return f"has left the session after step {step} with {type(error).__name__}: {text}"
