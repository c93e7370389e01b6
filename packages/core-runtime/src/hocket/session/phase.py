"""The exchanges of a strategy, or of one of its phases, while they are open."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from hocket.session.forward_merge import ForwardMerge
from hocket.session.opening import Opening
from hocket.session.pass_progress import PassProgress
from hocket.session.takeover import Takeover
from hocket.session.weights import BatchWeights
from hocket.strategy.exchange import Overlap
from hocket.strategy.strategy import Strategy

__all__ = ["OpenPhase"]


class OpenPhase:
    """Open exchanges with their hooks; opening and closing are collective.

    Args:
        strategy: without phases.
        opening: of that strategy.
        model, optimizer: those that are attached.
        weights: what this rank's batches count.
        check: called once per backward, before it sends anything.
        may_skip: whether steps with NaN or Inf are left out.

    Attributes:
        gradients: that slot's moment; None where this rank exchanges none.
        parameters: that slot's moment.
        opened: the exchanges of both slots in which this rank takes part.
    """

    def __init__(
        self,
        strategy: Strategy,
        opening: Opening,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        weights: BatchWeights,
        check: Callable[[], None],
        *,
        may_skip: bool,
    ) -> None:
        self.strategy = strategy
        self.gradients = opening.gradients(optimizer, weights, check, may_skip=may_skip)
        weights.gradients_stay_local = self.gradients is None
        self.parameters = opening.parameters()
        self.opened = opening.opened
        self._progress = opening.progress
        exchanges = self.parameters.exchanges
        overlaps = {exchange.overlap for exchange in exchanges}
        self._hooks: list[ForwardMerge | PassProgress] = [
            ForwardMerge(model, exchange) for exchange in exchanges if exchange.overlap is Overlap.FORWARD
        ]
        if overlaps - {Overlap.NONE}:
            # Set after those, so that a merge comes first.
            backward = Overlap.DELAYED in overlaps and self.gradients is None
            self._hooks.append(PassProgress(model, self._progress, backward=backward))

    @property
    def takeover(self) -> Takeover | None:
        """What a compressor has taken over from the optimizer."""
        return None if self.gradients is None else self.gradients.takeover

    def settle(self) -> None:
        """Finish everything that is under way, so that parameters hold what they will hold in the next forward."""
        self.parameters.settle()
        for opened in self.opened:
            opened.channel.flush()

    def close(self) -> None:
        """Close the exchanges, of which none is under way; collective."""
        for opened in self.opened:
            opened.channel.close()
        if self.gradients is not None:
            self.gradients.close_lane()
        self._progress.close()
        self.unhook()

    def unhook(self) -> None:
        """Take the hooks off; gradients become tensors of their own."""
        for hook in self._hooks:
            hook.close()
        if self.gradients is not None:
            self.gradients.close()
