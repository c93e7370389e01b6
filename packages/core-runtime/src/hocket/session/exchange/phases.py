"""The phases of a strategy on one rank: the active one, and its state for the next."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import suppress

from torch import Tensor

from hocket.errors import DisagreementError, ReplacedError
from hocket.session.exchange.active import Counters
from hocket.session.exchange.active_phase import ActivePhase
from hocket.session.exchange.phase_opener import PhaseOpener
from hocket.session.exchange.under_way import UnderWay
from hocket.session.exchange.written import ValuesLeft
from hocket.session.ranks import differing
from hocket.session.replica import Replica
from hocket.session.save.consensus import Consensus, OuterValues, average_optimizers, squared_distance
from hocket.session.step.stale_gradients import StaleGradients
from hocket.strategy.strategy import Strategy
from hocket.trace import Observer
from hocket.transport.gathering import Gather
from hocket.transport.peer import gather

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
        #: What a program has not written.
        self.left = ValuesLeft(replica.storage, strategy.parameters)
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
        self._replica.check(take_values=True)
        self.settle_to_read("session.load")
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
        self.left.note()

    def _leave(self) -> None:
        """Finish all exchanges, and take over residuals, compressors' momentum and the outer parameters."""
        self.left.note()  # the step has written these
        self.settle_to_read("the phase's end")
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
                    "%s: the next phase begins with the outer parameters of the last exchange, so up to %d steps of "
                    "training since then are lost: begin phases right after a step with this exchange",
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
        written = self.left.were_written()
        self.active.parameters.settle()
        if not written:
            self.left.note()

    def were_written(self, call: str) -> bool:
        """Return whether a program has written parameters since the last step, on any rank; collective for a call."""
        written = self.left.were_written()
        if call and self.left.matters:
            return any(gather(self._replica.ranks.island.everyone, written, what=call))
        return written

    def settle_to_read(self, call: str = "") -> bool:
        """Finish all exchanges: merge their results, or drop them where a program has written parameters meanwhile.

        Args:
            call: the call that reads the replicas of all ranks, and is collective; none if this rank reads its own.

        Returns:
            Whether this rank has written, or for a collective call any rank.
        """
        written, parameters = self.were_written(call), self.active.parameters
        if written:
            parameters.drop()
            return True
        parameters.settle()
        if call:
            parameters.take_changes()
        return False

    def receive(self) -> None:
        """Wait for all exchanges under way, and merge those that the next forward would."""
        self._replica.check(take_values=True)
        self.active.parameters.receive()

    def keep(self) -> UnderWay:
        """Return a backup, to undo the merges of `settle` or `settle_to_read`."""
        self.receive()
        return UnderWay(self.active.parameters.exchanges, [*self._replica.storage.flats, *self.left.samples])

    def set_to_mean(
        self, apart: Sequence[Tensor] = (), *, whole: bool = False, written: bool = False
    ) -> Consensus:
        """Set tensors that may differ between ranks to their mean, or parameters to the outer ones; collective.

        Equal values stay, bit for bit.

        Args:
            apart: flat buffers of parameters that should be equal, and are not.
            whole: whether tensors without a mean become rank 0's on all ranks.
            written: whether a program has written the parameters, so that outer ones do not have its values.
        """
        replica, exchange = self._replica, None if written else self.active.strategy.outer
        outer = None if exchange is None else OuterValues(exchange, replica.storage, replica.ranks.placement)
        tensors = [] if self.replicas_equal or outer else list(replica.storage.flats)
        if self.replicas_equal:
            tensors += [flat for flat in replica.storage.flats if any(flat is each for each in apart)]
        alone = replica.ranks.peer.size == 1
        beside = None if alone else replica.untrained.differing(others=whole)
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
            raise DisagreementError(
                f"the ranks' optimizers differ at step {step}, so their replicas would drift apart. Give all ranks the "
                f"same optimizer settings and schedulers, and let all skip the same steps:\n{differences}"
            )
        if self._warned_of_rates or not differences or not self.active.strategy.exchanges:
            return
        del facts["backwards without optimizer.step()"]
        differences = differing(self._replica.ranks.island.everyone, facts, call)
        if differences and self._replica.ranks.island.is_main:
            _log.warning(
                "the ranks' optimizers differ at step %d, but the mean counts all replicas equally. Let schedulers "
                "follow a value that all ranks share, such as the mean of their losses:\n%s",
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
        self.settle_to_read("the session's end")

    def close(self) -> None:
        """Close the active phase, with no exchange under way; collective."""
        self.active.drop_unused()
        self._hand_back()
        self.active.close()
