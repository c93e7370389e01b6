"""The exchanges of a strategy, or of one of its phases, while they are open."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from hocket.session.forward_merge import ForwardMerge, ProgressHooks
from hocket.session.opening import Opening
from hocket.session.optimizers import Optimizers
from hocket.session.takeover import Takeover
from hocket.session.weights import BatchWeights
from hocket.strategy.exchange import GRADIENTS, Overlap
from hocket.strategy.placement import Placement
from hocket.strategy.strategy import Strategy
from hocket.transport.lane import Lane

__all__ = ["OpenPhase"]


class OpenPhase:
    """Open exchanges with their hooks; opening and closing are collective.

    Args:
        strategy: without phases.
        opening: of that strategy.
        model, optimizers: those that are attached.
        weights: what this rank's batches count.
        before_backward: called before a backward's gradients are sent.
        take_values: called before parameters are sent.
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
        optimizers: Optimizers,
        weights: BatchWeights,
        before_backward: Callable[[], None],
        take_values: Callable[[], None],
        *,
        may_skip: bool,
    ) -> None:
        self.strategy = strategy
        self.gradients = opening.gradients(optimizers, weights, before_backward, may_skip=may_skip)
        weights.gradients_stay_local = self.gradients is None
        self.parameters = opening.parameters(take_values)
        self.opened = opening.opened
        self._model = model
        self._progress = opening.progress
        self._hooks: list[ForwardMerge | ProgressHooks] = []
        self._closure_lane: Lane | None = None
        # Found by following every rank's gradient, once, and not in each step with a closure.
        self._keeps_gradients_equal: bool | None = None

    def hook(self) -> None:
        """Set the hooks."""
        exchanges = self.parameters.exchanges
        overlaps = {exchange.overlap for exchange in exchanges}
        for exchange in exchanges:
            if exchange.overlap is Overlap.FORWARD:
                self._hooks.append(ForwardMerge(self._model, exchange))
        if overlaps - {Overlap.NONE}:
            # Set after those, so that a merge comes first.
            backward = Overlap.DELAYED in overlaps and self.gradients is None
            self._hooks.append(ProgressHooks(self._model, self._progress, backward=backward))
        if self.gradients is not None:
            self.gradients.hook()

    @property
    def takeover(self) -> Takeover | None:
        """What a compressor has taken over from the optimizer."""
        return None if self.gradients is None else self.gradients.takeover

    def lane_of_equal_gradients(self, placement: Placement, world: Lane) -> Lane | None:
        """Return the lane of the ranks that get the same gradients as this one; None where each has its own.

        Args:
            placement: of all ranks.
            world: the lane among all ranks.
        """
        if self.gradients is None:
            return None
        if self._keeps_gradients_equal is None:
            self._keeps_gradients_equal = self.strategy.keeps_gradients_equal(placement)
        if self._keeps_gradients_equal:
            return world
        [first, *others] = (opened for opened in self.opened if opened.exchange.slot == GRADIENTS)
        results = first.exchange.collective.results(list(range(first.peer.size)), 0)
        if others or len(set(results)) > 1:
            return None
        if self._closure_lane is None:
            self._closure_lane = first.peer.lane("closure")
        return self._closure_lane

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
        if self._closure_lane is not None:
            self._closure_lane.close()
        self._progress.close()
        self.unhook()

    def unhook(self) -> None:
        """Take the hooks off; gradients become tensors of their own."""
        for hook in self._hooks:
            hook.close()
        self._hooks = []
        if self.gradients is not None:
            self.gradients.close()
