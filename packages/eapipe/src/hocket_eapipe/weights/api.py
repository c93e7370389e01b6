"""The interface of weight policies, on one stage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hocket.api import ReplicaSession, plain

#: Tensors by the names that a stage's module has for them.
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Binding:
    """The tensors that a forward reads in place of the module's own.

    Attributes:
        parameters: the trainable ones, leaves that require gradients. Until the batch's backward nobody writes their
            memory, but for policies that mean it.
        buffers: those that are not the module's own.
        are_modules: true if all of them are the module's own, which can be called as it is.
    """

    parameters: Tensors
    buffers: Tensors = field(default_factory=dict)
    are_modules: bool = False


@dataclass(frozen=True)
class StagePart:
    """A stage's share of the model, and its place in the pipeline.

    Attributes:
        module: the stage's module; its parameters are the newest values, or the master's.
        session: over all ranks that hold this stage, with an optimizer over `module`: the strategy of the data axis.
        stage: the number of the stage, from 0.
        num_stages: N.
    """

    module: nn.Module
    session: ReplicaSession
    stage: int
    num_stages: int

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the trainable parameters by name."""
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}


class Weights(ABC):
    """The weights of one stage under one policy."""

    @abstractmethod
    def forward(self, batch: int) -> Binding:
        """Return what the forward of a batch, counted from 1, reads; also for each of its micro-batches."""

    def before_backward(self, batch: int) -> None:  # noqa: B027 (mostly what the forward read is what backward reads)
        """Write the values for the batch's backward into the tensors that its forward read."""

    @abstractmethod
    def exchange(self, gradients: Tensors, weight: float) -> None:
        """Put the gradient of a batch whose backward has just ended into `.grad`, as the strategy exchanges it.

        Args:
            gradients: those of the tensors that `forward` bound, by name, where there is one; emptied, so that they
                are held no longer than they are needed.
            weight: the batch's weight among the ranks that hold the stage; 0 for nothing.
        """

    @abstractmethod
    def step(self, batch: int) -> None:
        """Step with what `.grad` holds, the gradient of a batch, counted from 1."""

    def drained(self) -> None:  # noqa: B027
        """Take note that no batch is under way, at any stage."""

    def state_dict(self) -> plain.Tree:
        """Return the policy's state beside the module and its optimizer, while no batch is under way."""
        return {}

    def load_state_dict(self, state: plain.Tree) -> None:  # noqa: B027
        """Continue from the result of `state_dict`."""


class NoWeights(Weights):
    """The weights of a stage without trainable parameters."""

    def forward(self, batch: int) -> Binding:
        return Binding({})

    def exchange(self, gradients: Tensors, weight: float) -> None:
        """Do nothing, as there are no gradients."""

    def step(self, batch: int) -> None:
        """Do nothing, as there are no gradients."""


def alias(tensor: Tensor) -> Tensor:
    """Return a leaf over the same memory, with a version count of its own.

    Autograd does not notice writes to it.
    """
    return tensor.data.requires_grad_()


@torch.no_grad()
def copied(tensor: Tensor) -> Tensor:
    """Return a leaf with the same values and strides in memory of its own."""
    return tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_()
