"""The phases of a strategy on one rank: the active one, and its state for the next."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import suppress

from torch import Tensor

from hocket.errors import DisagreementError, ReplacedError
from hocket.session.exchange.active import Counters
from hocket.session.exchange.forward import ForwardMerge, ProgressHooks
from hocket.session.exchange.phase_opener import PhaseOpener
from hocket.session.exchange.under_way import UnderWay
from hocket.session.ranks import differing
from hocket.session.replica import Replica
from hocket.session.save.consensus import Consensus, OuterValues, average_optimizers, squared_distance
from hocket.session.step.account import Account
from hocket.session.step.optimizer_terms import AppliedTerms
from hocket.session.step.stale_gradients import StaleGradients
from hocket.strategy.equality import results
from hocket.strategy.exchange import GRADIENTS, Overlap
from hocket.strategy.strategy import Strategy
from hocket.trace import Observer
from hocket.transport.gathering import Gather
from hocket.transport.lane import Lane

__all__ = ["ActivePhase", "Phases"]

_log = logging.getLogger("hocket")


class Phases:
    """The phases of a strategy, one after the other; opening, changing and closing are collective.

    Args:
        strategy: with all its phases, of which the first is opened.
        replica: the replica that they exchange.
        counters: count bytes sent and seconds waited.
        observer: is notified of exchanges; None for no observer.
        step: number of steps that have ended.

    Attributes:
        active: the phase whose exchanges are open.
        stale: gradients that earlier phases have left for the next step.
        replicas_equal: whether all replicas hold the same bits after every step.
    """

    def __init__(
        self, strategy: Strategy, replica: Replica, counters: Counters, observer: Observer | None, step: int
    ) -> None:
        self._strategy, self._replica, self._counters, self._observer = strategy, replica, counters, observer
        #: Whether the replicas hold the same bits now, if exchanges keep them so.
        self._equal = replica.begins_equal
        self._warned_of_rates = False
        self.stale = StaleGradients(replica.storage.parameters)
        self.active = self._open(strategy.at(step), parameters_equal=replica.begins_equal)

    def _open(self, strategy: Strategy, *, parameters_equal: bool = True) -> ActivePhase:
        replica = self._replica
        opening = PhaseOpener(replica.ranks, replica.storage, strategy, self._counters, self._observer)
        self.replicas_equal = self._equal and self._keeps_equal(strategy)
        active = ActivePhase(strategy, opening, replica)
        if not parameters_equal:
            active.parameters.average_outer()
        return active

    def _keeps_equal(self, strategy: Strategy) -> bool:
        return strategy.keeps_replicas_equal(self._replica.ranks.placement)

    def count_into(self, counters: Counters) -> None:
        """Count bytes sent and seconds waited in `counters` from now on."""
        self._counters = counters
        for opened in self.active.opened:
            opened.counters = counters

    def begin_equal(self) -> None:
        """Note that all replicas hold the same bits now."""
        self._equal, self.replicas_equal = True, self._keeps_equal(self.active.strategy)
        self._replica.optimizers.summed_rates = 0.0

    def enter(self, step: int) -> None:
        """Open the phase in force after `step` steps, to load its state; collective."""
        self.settle_together()
        strategy = self._strategy.at(step)
        if strategy != self.active.strategy:
            self._replace_by(strategy)

    def go_on(self, step: int, gather: Gather) -> None:
        """Change the phase if another begins after `step` steps; collective.

        Args:
            step: the number of steps.
            gather: gives the value of every rank that holds the same parameters, by rank.
        """
        if self._strategy.phases and (following := self._strategy.at(step)) != self.active.strategy:
            self._leave()
            if self._keeps_equal(following):
                self._make_equal(gather)
            elif following.outer is not None and not self.replicas_equal:
                self.set_to_mean()
            remembered = self.active.parameters.remembered()
            self._replace_by(following)
            self.active.parameters.take_over(remembered)

    def _leave(self) -> None:
        """Finish all exchanges, and take over residuals, compressors' momentum and the outer parameters."""
        self.settle_together()
        active = self.active
        active.drop_unused()
        if active.strategy.outer is not None:
            active.parameters.take_late()
            self._warn_of_unsent_steps()
            self.set_to_mean()
        gradients = active.strategy.gradients
        peer = self._replica.ranks.peer
        if len(gradients) == 1 and active.gradients:
            peer = active.opened[0].peer
        self.stale.collect(gradients, active.opened, peer, active.terms, active.take_carried())
        self._hand_back()

    def _warn_of_unsent_steps(self) -> None:
        """Warn of steps that are missing in the outer parameters, which the next phase begins with."""
        for name, steps in self.active.parameters.outer_steps().items():
            if steps and self._replica.ranks.island.is_main:
                _log.warning(
                    "%s: the next phase begins with the outer parameters, without what ranks have trained in up to %d "
                    "steps since they were last sent: let phases begin after a step in which it takes place",
                    name,
                    steps,
                )

    def _hand_back(self) -> None:
        if self.active.terms is not None:
            self.active.terms.hand_back()

    def _make_equal(self, gather: Gather) -> None:
        if not self.replicas_equal:
            self.set_to_mean()
            # Equal gradients keep replicas equal only if the optimizers do the same with them.
            average_optimizers(self._replica.optimizers, self._replica.lane, gather)
            self._replica.optimizers.summed_rates = 0.0
        self._equal = True

    def _replace_by(self, strategy: Strategy) -> None:
        self.active.close()
        self.active = self._open(strategy)
        self.active.hook()

    def settle(self) -> None:
        """Finish all exchanges and merge their results into the parameters, as the next forward would."""
        self._replica.check(take_values=True)
        self.active.parameters.settle()

    def settle_together(self) -> None:
        """Finish all ranks' exchanges, so that the replicas' mean is final; collective."""
        self.settle()
        self.active.parameters.take_changes()

    def receive(self) -> None:
        """Wait for all exchanges under way, and merge those that the next forward would."""
        self._replica.check(take_values=True)
        self.active.parameters.receive()

    def keep(self) -> UnderWay:
        """Return a backup, to undo the merges of `settle` or `settle_together`."""
        self.receive()
        return UnderWay(self.active.parameters.exchanges, self._replica.storage.flats)

    def set_to_mean(self, apart: Sequence[Tensor] = (), *, whole: bool = False) -> Consensus:
        """Set tensors that may differ between ranks to their mean, or parameters to the outer ones; collective.

        Equal values stay, bit for bit.

        Args:
            apart: flat buffers of parameters that should be equal, and are not.
            whole: whether tensors without a mean become rank 0's on all ranks.
        """
        replica, exchange = self._replica, self.active.strategy.outer
        outer = None if exchange is None else OuterValues(exchange, replica.storage, replica.ranks.placement)
        tensors = [] if self.replicas_equal or outer else list(replica.storage.flats)
        if self.replicas_equal:
            tensors += [flat for flat in replica.storage.flats if any(flat is each for each in apart)]
        alone = replica.ranks.peer.size == 1
        beside = None if alone else replica.beside.differing(others=whole)
        return Consensus([] if alone else tensors, self.active.parameters, replica.lane, outer, beside)

    def compare_steps(self, step: int, num_unused: int, call: str) -> None:
        """Find optimizers whose settings or steps differ between ranks; collective.

        Args:
            step: number of steps that have ended.
            num_unused: number of times that this rank's optimizers did not use exchanged gradients.
            call: the call that compares them.

        Raises:
            DisagreementError: they differ, and replicas are to stay equal.
        """
        optimizers = self._replica.optimizers
        facts = {
            "optimizer": optimizers.settings(),
            "learning rates of all steps, summed": optimizers.summed_rates,
            "backwards without optimizer.step()": num_unused,
        }
        differences = differing(self._replica.ranks.island.everyone, facts, call)
        if differences and self.replicas_equal:
            raise DisagreementError(f"the ranks' optimizers step differently at step {step}:\n{differences}")
        if self._warned_of_rates or not differences or not self.active.strategy.exchanges:
            return
        del facts["backwards without optimizer.step()"]
        differences = differing(self._replica.ranks.island.everyone, facts, call)
        if differences and self._replica.ranks.island.is_main:
            _log.warning(
                "the ranks' optimizers step differently at step %d, and their replicas are averaged all the same, so "
                "that each counts as much: let schedulers follow what all ranks have alike (the mean of their "
                "losses):\n%s",
                step,
                differences,
            )
        self._warned_of_rates = bool(differences)

    def distance(self, gather: Gather, apart: Sequence[Tensor]) -> float:
        """Return the root mean square, over replicas, of their L2 distance from their mean; collective.

        Args:
            gather: gives every rank's value, by rank.
            apart: tensors that should be equal, and are not.
        """
        tensors = [*(() if self.replicas_equal else self._replica.storage.flats), *apart]
        own = squared_distance(tensors, self._replica.lane, self._replica.holders) if tensors else 0.0
        # All ranks of an island gather if the shards of one of them differ.
        squares = gather(own) if self._replica.ranks.island.any(bool(tensors)) else [own]
        return math.sqrt(sum(squares) / self._replica.ranks.peer.size)

    def finish(self) -> None:
        """Finish all ranks' exchanges before `close`, even if parameters were replaced meanwhile; collective.

        A program that adds or thaws layers between training and `close` still gets the last merges.
        """
        with suppress(ReplacedError):
            self._replica.check(take_values=True)
        self.active.parameters.settle()
        self.active.parameters.take_changes()

    def close(self) -> None:
        """Close the active phase, with no exchange under way; collective."""
        self.active.drop_unused()
        self._hand_back()
        self.active.close()


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
        self.parameters = opening.parameters(replica.storage.take_values, replica.beside)
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
        if self.parameters.exchanges:
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
