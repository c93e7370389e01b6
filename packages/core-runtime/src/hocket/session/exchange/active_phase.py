"""The phase of a strategy whose exchanges are open, with its hooks."""

from __future__ import annotations

from torch import Tensor

from hocket.session.exchange.forward import ForwardMerge, ProgressHooks
from hocket.session.exchange.phase_opener import PhaseOpener
from hocket.session.replica import Replica
from hocket.session.step.account import Account
from hocket.session.step.optimizer_terms import AppliedTerms
from hocket.strategy.equality import results
from hocket.strategy.exchange import GRADIENTS, Overlap
from hocket.strategy.strategy import Strategy
from hocket.transport.lane import Lane


class ActivePhase:
    """Open exchanges with their hooks; opening and closing are collective.

    Args:
        strategy: a strategy without phases.
        opening: opens its exchanges.
        replica: the replica that it exchanges.

    Attributes:
        gradients: the exchange of gradients; None where this rank exchanges none.
        parameters: the exchanges of parameters.
        opened: the exchanges of both slots in which this rank takes part.
    """

    def __init__(self, strategy: Strategy, opening: PhaseOpener, replica: Replica) -> None:
        self.strategy = strategy
        self._replica = replica
        self.gradients = opening.gradients(
            replica.optimizers, replica.begin_gradients, replica.state, may_skip=replica.may_skip
        )
        replica.weights.gradients_stay_local = self.gradients is None
        self.parameters = opening.parameters(replica.storage.take_values, replica.untrained)
        self.opened = opening.opened
        self._progress = opening.progress
        self._hooks: list[ForwardMerge | ProgressHooks] = []
        self._merges: list[ForwardMerge] = []
        self._closure_lane: Lane | None = None
        # Found by following every rank's gradient, once, and not in each step with a closure.
        self._keeps_gradients_equal: bool | None = None

    def hook(self) -> None:
        """Set the hooks."""
        exchanges = self.parameters.exchanges
        delayed = any(exchange.opened.exchange.delay for exchange in exchanges)
        for exchange in exchanges:
            if exchange.overlap is Overlap.FORWARD:
                self._merges.append(ForwardMerge(self._replica.model, exchange))
                self._hooks.append(self._merges[-1])
        if delayed or self._hooks:
            # Set after those, so that a merge comes first.
            backward = delayed and self.gradients is None
            self._hooks.append(ProgressHooks(self._replica.model, self._progress, backward=backward))
        if self.gradients is not None:
            self.gradients.hook()

    @property
    def terms(self) -> AppliedTerms | None:
        """Return the optimizer's terms that a compressor applies."""
        return None if self.gradients is None else self.gradients.terms

    @property
    def dropped_gradients(self) -> bool:
        """Tell whether no parameter holds a gradient of the last exchange, within another backward."""
        return self.gradients is not None and self.gradients.dropped

    def lane_of_equal_gradients(self) -> Lane | None:
        """Return the lane of the ranks that get the same gradients as this one; None where each has its own."""
        if self.gradients is None:
            return None
        if self._keeps_gradients_equal is None:
            self._keeps_gradients_equal = self.strategy.keeps_gradients_equal(self._replica.ranks.placement)
        if self._keeps_gradients_equal:
            return self._replica.lane
        [first, *others] = (opened for opened in self.opened if opened.exchange.slot == GRADIENTS)
        ends = results(first.exchange.collective, list(range(first.peer.size)), 0)
        if others or len(set(ends)) > 1:
            return None
        if self._closure_lane is None:
            self._closure_lane = first.peer.lane("closure")
        return self._closure_lane

    def look_before_step(self) -> None:
        """Take over values that parameters were set to, where neither a backward nor the step's end does."""
        if self.gradients is None and not self.parameters.exchanges:
            # Nobody sends, and nobody else looks.
            self._replica.check(take_values=True)
        elif self.gradients is None or self.parameters.has_weights:
            # No backward has looked whether the optimizer can step them, or push-sum multiplies them where they lie.
            self._replica.storage.take_values()

    def look_after_step(self) -> None:
        """Take over values that the step has set, before they are sent; once a step, as it costs some microseconds."""
        if self.parameters.exchanges or self._replica.ranks.island.gathers:  # whose backward could not look
            self._replica.check(take_values=True)
        elif self._replica.storage.was_set:
            self._replica.storage.take_values()

    @property
    def account(self) -> Account | None:
        """Return the account of what compressors and partial sums remember."""
        return None if self.gradients is None else self.gradients.account

    def drop_unused(self) -> None:
        """Remove dropped gradients that no optimizer has used from residuals, before states are handed on."""
        if self.account is not None:
            self.account.drop_unused()

    def take_carried(self) -> dict[str, Tensor]:
        """Take this rank's share in the mean of what ranks carry for dropped gradients, flat, by parameter."""
        return {} if self.account is None else self.account.take_carried(self.opened[0].scale)

    def begin_step(self, *, with_closure: bool) -> None:
        """Prepare parameters and optimizers for an optimizer's step.

        Args:
            with_closure: whether its forward runs within it.
        """
        if not with_closure:
            for merges in self._merges:
                merges.look_before_step()
        self.parameters.before_step()
        if self.gradients is not None:
            self.gradients.before_step()

    def end_step(self) -> None:
        """Give an optimizer its own settings back after its step."""
        if self.terms is not None:
            self.terms.resume()

    def abandon(self) -> None:
        """Remove the hooks, and leave values and momentum as they are on this rank."""
        self.parameters.debias()
        self.unhook()
        self._progress.abandon()
        if self.terms is not None:
            self.terms.hand_back_own()

    def close(self) -> None:
        """Close the exchanges, with none under way; collective."""
        for opened in self.opened:
            opened.channel.close()
        self.parameters.close()
        if self.gradients is not None:
            self.gradients.close_lane()
        if self._closure_lane is not None:
            self._closure_lane.close()
        self._progress.close()
        self.unhook()

    def unhook(self) -> None:
        """Remove the hooks; gradients become tensors of their own."""
        for hook in self._hooks:
            hook.close()
        self._hooks, self._merges = [], []
        if self.terms is not None:
            self.terms.unhook()
        if self.gradients is not None:
            self.gradients.close()
