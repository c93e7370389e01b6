"""A session: a strategy attached to a model and an optimizer, on one rank."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hocket.checkpoint.files import StateFile
from hocket.errors import CheckpointError, DisagreementError
from hocket.plugin import default_registry
from hocket.segment.storage import ParameterStorage
from hocket.session.api import Attachment, Loss, StepResult, TrainingSession, TrainStep
from hocket.session.checkpoint import ReplicaState, tensors_of
from hocket.session.closures import Before, SharedClosure
from hocket.session.consensus import Consensus, average_optimizers, squared_distance
from hocket.session.core import SessionState
from hocket.session.exchange import Counters
from hocket.session.grad_scaler import scaler_in_use
from hocket.session.nonfinite import NonFiniteSteps
from hocket.session.optimizers import Closure
from hocket.session.phases import ActivePhase, PhaseOpener
from hocket.session.ranks import broadcast_model, broadcast_optimizers, differing, find_ranks
from hocket.session.refusals import refuse_closure
from hocket.session.stale_gradients import StaleGradients
from hocket.session.weights import BatchWeights, Contribution
from hocket.strategy.strategy import Strategy

__all__ = ["Session"]

_log = logging.getLogger("hocket")


class Session(TrainingSession):
    """What `hocket.attach` returns where every rank holds a whole model; use it as a context manager.

    Attributes:
        phase: the exchanges that are open.
        stale: gradients that earlier phases have left for the next step.
        train_step: what `train_batch` does; the engine sets it.
    """

    train_step: TrainStep

    def __init__(self, given: Attachment) -> None:
        """Attach; collective. Nothing is left behind where it fails."""
        observer = given.observer
        peer = given.peer if observer is None else observer.join(given.peer)
        super().__init__(given.model, given.optimizers, given.strategy, peer)
        self._observer = observer
        self._observers = default_registry().hook
        self._may_skip = given.on_nonfinite == "skip"
        try:
            self._attach(given.initial)
        except BaseException:
            if observer is not None:
                observer.abandon()
            raise

    def _attach(self, initial: str) -> None:
        if initial == "rank0":
            lane = self.peer.lane("attach")
            broadcast_model(self.model, lane)
            broadcast_optimizers(self.optimizers, self.peer, lane)
            lane.close()
        self._ranks = find_ranks(self.peer)
        self._storage = storage = ParameterStorage(self.model, self._ranks.host)
        self._weights = BatchWeights(storage.parameters.values())
        #: Whether the replicas hold the same bits now, if exchanges keep them so.
        self._initial_equal = self.size == 1 or initial == "rank0"
        self.stale = StaleGradients(storage.parameters)
        self._nonfinite = NonFiniteSteps(storage.parameters, self.rank, may_skip=self._may_skip)
        #: The step that the current batch belongs to; a later one is under way once that has ended.
        self._step_of_batch = 0
        self._warned_of_skipped_batch = False
        self._held = {id(parameter) for parameter in storage.parameters.values()}
        #: What a step with a closure may have to be undone to.
        self._before: Before | None = None
        self.phase = self._open(self.strategy.at(0))
        # Last, so that what fails above leaves no hook.
        try:
            self.optimizers.hook(self)
            self.phase.hook()
        except BaseException:
            self._unhook()
            raise

    def count_into(self, counters: Counters) -> None:
        """Count what is sent, and waited for, from now on there, together with others."""
        self.counters = counters
        for opened in self.phase.opened:
            opened.counters = counters

    def _open(self, strategy: Strategy) -> ActivePhase:
        """Open the exchanges of a phase; collective."""
        opening = PhaseOpener(self._ranks, self._storage, strategy, self.counters, self._observer)
        self.replicas_equal = self._initial_equal and strategy.keeps_replicas_equal(self._ranks.placement)
        return ActivePhase(
            strategy,
            opening,
            self.model,
            self.optimizers,
            self._weights,
            self._begin_exchange,
            self._end_exchange,
            self._storage.take_values,
            may_skip=self._may_skip,
        )

    def _change_phase(self, strategy: Strategy) -> None:
        """Go on with another strategy; collective, between steps."""
        self.settle()
        terms = self.phase.terms
        gradients = self.phase.strategy.gradients
        peer = self.phase.opened[0].peer if len(gradients) == 1 and self.phase.gradients else self.peer
        self.stale.collect(gradients, self.phase.opened, peer, terms)
        if terms is not None:
            terms.hand_back()
        if strategy.keeps_replicas_equal(self._ranks.placement):
            if not self.replicas_equal:
                self._set_to_mean()
                # Equal gradients keep replicas equal only if the optimizers do the same with them.
                average_optimizers(self.optimizers, self.control, self.gather)
            self._initial_equal = True
        self.phase.close()
        self.phase = self._open(strategy)
        self.phase.hook()

    def enter_phase_of(self, step: int) -> None:
        self.settle()
        strategy = self.strategy.at(step)
        if strategy != self.phase.strategy:
            self.phase.close()
            self.phase = self._open(strategy)
            self.phase.hook()

    def begin_equal(self) -> None:
        """Take note that all replicas hold the same bits now."""
        self._initial_equal = True
        self.replicas_equal = self.phase.strategy.keeps_replicas_equal(self._ranks.placement)

    @property
    def weight(self) -> float:
        return self._weights.current

    # ---- the loop ----------------------------------------------------------------------------------------------

    def train_batch(self, batch: Any, loss: Loss) -> StepResult | None:
        return self.train_step(batch, loss)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Mark backwards after which nothing is sent: their gradients add up until one outside of it."""
        self.require("session.accumulate", training=True)
        self.state = SessionState.ACCUMULATED
        if self.phase.gradients is not None:
            self.phase.gradients.accumulating = True
        try:
            yield
        finally:
            if self.phase.gradients is not None:
                self.phase.gradients.accumulating = False

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the norm of the gradients that the optimizer will get, over the whole model; return the norm.

        Use it instead of torch's function: it stays right where ranks hold the gradients of parts of the model.
        """
        return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, norm_type)

    def exchange_gradients(self) -> None:
        """Exchange what the parameters' `.grad` holds, and bind it to what comes back.

        For engines that compute gradients in another way than by a backward through the model, which does this itself.
        """
        if self.phase.gradients is not None:
            self.phase.gradients.exchange()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Surround a step that an engine makes in place of the optimizer's own: what its hooks would do."""
        self.before_step(self.optimizer, None)
        yield
        self.after_step(self.optimizer)

    def begin_batch(self, weight: float) -> None:
        self.require("a batch of session.data", training=True)
        self._end_partial_step()
        self._note_forward()
        self._weights.begin_batch(weight, accumulated=self.state is SessionState.ACCUMULATED)
        self._step_of_batch = self.step
        self.state = SessionState.IDLE

    def end_batch(self) -> None:
        self._end_partial_step()
        if self.step != self._step_of_batch or self.state is SessionState.ACCUMULATED:
            return
        gradients = self.phase.gradients
        if gradients is None or self.state is SessionState.EXCHANGED:
            self._end_step()
            return
        if not self._warned_of_skipped_batch:
            self._warned_of_skipped_batch = True
            _log.warning(
                "rank %d skipped the batch of step %d: it steps with the other ranks' gradients",
                self.rank,
                self.step,
            )
        gradients.take_part()
        if gradients.nonfinite_anywhere and scaler_in_use():
            self._end_step()  # the others' scalers leave it out
        else:
            self.optimizers.step()

    def end_pass(self) -> None:
        self._weights.end_pass(accumulated=self.state is SessionState.ACCUMULATED)

    def delay(self, seconds: float) -> None:
        """Hold this rank up for `seconds`, 0 or more, as if its forward took longer; called before forward."""
        self._note_phase("delay")
        self.peer.clock.sleep(seconds)
        self._note_forward()

    def _note_forward(self) -> None:
        self._note_phase("forward" if self.phase.gradients is not None else "forward and backward")

    def _note_phase(self, name: str) -> None:
        if self._observer is not None:
            self._observer.phase(name, self.peer.clock.now())

    def _begin_exchange(self) -> Contribution:
        """Look at what is about to be sent: it has to be what the optimizers step."""
        self._note_phase("backward")
        self.require("backward()", training=True)
        self._storage.check(take_values=False)  # the step may set them back (SAM)
        self.optimizers.check()
        self.state = SessionState.BACKWARD
        return self._weights.contribution()

    def _end_exchange(self) -> None:
        self.state = SessionState.EXCHANGED

    def _look_before_step(self) -> None:
        if self.phase.gradients is None and not self.phase.parameters.exchanges:
            # Nobody sends, and nobody else looks.
            self._storage.check(take_values=True)
            self.optimizers.check()
        elif self.phase.gradients is None or self.phase.parameters.has_weights:
            # No backward has looked whether the optimizer can step them, or push-sum multiplies them where they lie.
            self._storage.take_values()

    def _look_after_step(self) -> None:
        """Take over what the step has set, before it is sent; once a step, as each look costs some microseconds."""
        if self.phase.parameters.exchanges:
            self._storage.check(take_values=True)
            self.optimizers.check()
        elif self._storage.was_set:
            self._storage.take_values()

    # ---- steps of the optimizers, as `StepHooks` tells of them ---------------------------------------------------

    def holds(self, parameter: Any) -> bool:
        return id(parameter) in self._held

    def before_step(self, optimizer: Optimizer, closure: Closure | None) -> Closure | None:
        self.require("optimizer.step()", training=True)
        if (
            optimizer not in self.optimizers.waiting
        ):  # a second step: the first ended without the other optimizers
            self._end_step_before()
        if not self.optimizers.partly_stepped:
            self._nonfinite.skipping = False  # that of a step that failed, and never ended
        if closure is not None:
            refuse_closure(optimizer, self.strategy)
        self._note_phase("optimizer")
        self._look_before_step()
        gradients = self.phase.gradients
        if (
            closure is None
            and gradients is not None
            and self.state not in (SessionState.EXCHANGED, SessionState.STEPPED)
        ):
            # Put there by hand, or accumulated: no backward has sent them.
            gradients.exchange()
        self.phase.parameters.before_step()
        if self.phase.terms is not None:
            self.phase.terms.suspend()
        if closure is None:
            self._gradients_are_in(optimizer)
            return None
        if self._may_skip:
            self._storage.take_values()
            self._before = Before(self.flats, optimizer, self.phase.opened)
        return SharedClosure(
            lambda: self._exchanged(closure),
            self.phase.lane_of_equal_gradients(self._ranks.placement, self.control),
            lambda: 1.0 if gradients is None else gradients.contribution.weight,
            lambda: self._gradients_are_in(optimizer),
        )

    def _exchanged(self, closure: Closure) -> Any:
        """Call a closure, and exchange what it leaves in `p.grad` where no backward within has sent that."""
        self.state = SessionState.IDLE
        loss = closure()
        if self.phase.gradients is not None and self.state is not SessionState.EXCHANGED:
            self.phase.gradients.exchange()
        return loss

    def _gradients_are_in(self, optimizer: Optimizer) -> None:
        """Leave out, or refuse, a step with NaN or Inf; else complete the gradients that are about to be used."""
        gradients = self.phase.gradients
        if gradients is None:
            self._weights.drop_repetition(_parameters_of(optimizer))
        skipping = self._nonfinite.skipping
        alone = bool(self.phase.strategy.gradients)
        if self._nonfinite.leaves_out(optimizer, gradients, self.step, alone=alone):
            self.skipped_steps += not skipping
            return
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and bool(found_inf):
            return  # fused: GradScaler lets it step all the same, and it leaves everything as it is
        # Fused optimizers unscale within their step, as stale gradients are already.
        loss_scale = getattr(optimizer, "grad_scale", None)
        self.stale.join(_parameters_of(optimizer), 1.0 if loss_scale is None else loss_scale)

    def after_step(self, optimizer: Optimizer) -> None:
        if self._nonfinite.skipping and self._before is not None:
            self._storage.take_values()  # bound again, so that what is restored is theirs
            self._before.restore()
        self._before = None
        if self.phase.terms is not None:
            self.phase.terms.resume()
        self.stale.end_step(used=not self._nonfinite.skipping)
        self.skipped(optimizer)

    def skipped(self, optimizer: Optimizer) -> None:
        self._weights.end_step()
        self.optimizers.waiting.discard(optimizer)
        if self.state is SessionState.EXCHANGED:
            self.state = SessionState.STEPPED
        elif self.state is SessionState.ACCUMULATED:
            self.state = SessionState.IDLE
        if not self.optimizers.waiting:
            self._end_step()
        else:
            # A forward may come before the other optimizers' steps.
            self.phase.parameters.debias()

    def _end_partial_step(self) -> None:
        """End a step in which some of the optimizers have stepped, and the others will not."""
        if self.optimizers.partly_stepped:
            self._end_step()

    def _end_step_before(self) -> None:
        """End the step before the one that begins, to which what was exchanged since then belongs."""
        exchanged = self.state is SessionState.EXCHANGED
        self._end_step()
        if exchanged:
            self.state = SessionState.EXCHANGED

    def _end_step(self) -> None:
        self.optimizers.begin_step()
        self._nonfinite.skipping = False
        if self.state is not SessionState.ACCUMULATED:
            self.state = SessionState.IDLE
        self._look_after_step()
        if self.phase.parameters.exchanges:
            self._note_phase("parameters")
        self.step += 1
        self.phase.parameters.after_step(self.step)
        if self._observer is not None:
            self._observer.step_ended(self.step - 1, self.peer.clock.now())
        self.peer.status.note_step(self.step)
        if self.strategy.phases and (following := self.strategy.at(self.step)) != self.phase.strategy:
            self._change_phase(following)
        self._observers.hocket_step_end(session=self, step=self.step - 1)

    # ---- replicas ----------------------------------------------------------------------------------------------

    def settle(self) -> None:
        self.require("settle")
        self._storage.check(take_values=True)
        self.phase.settle()

    def consensus(self) -> AbstractContextManager[None]:
        self.meet()
        self._end_partial_step()
        self.settle()
        self._compare_optimizers()
        return self._within(self._set_to_mean())

    def _set_to_mean(self) -> Consensus:
        """Set what may differ between ranks to its mean; collective. Equal parameters stay, bit for bit."""
        tensors = [] if self.replicas_equal else list(self.flats)
        tensors += [b for b in self.model.buffers() if b.is_floating_point()]
        return Consensus(tensors if self.size > 1 else [], self.phase.parameters, self.control)

    @contextmanager
    def _within(self, consensus: Consensus) -> Iterator[None]:
        outer, self.state = self.state, SessionState.CONSENSUS
        try:
            with consensus:
                yield
        finally:
            if self.state is SessionState.CONSENSUS:
                self.state = outer

    def _compare_optimizers(self) -> None:
        """Notice settings of the optimizers that have become different between ranks; collective."""
        told = differing(self.peer, {"optimizer": self.optimizers.settings()})
        if told and self.replicas_equal:
            raise DisagreementError(f"the ranks' optimizers step differently at step {self.step}:\n{told}")

    def replica(self) -> AbstractContextManager[None]:
        self.settle()
        return nullcontext()

    def consensus_distance(self) -> float:
        self.meet()
        self.settle()
        if self.replicas_equal:
            return 0.0
        squares = self.gather(squared_distance(self.flats, self.control))
        distance: float = float(sum(squares) / len(squares)) ** 0.5
        return distance

    @property
    def flats(self) -> list[Tensor]:
        """The flat buffers that the trainable parameters are views of."""
        return self._storage.flats

    # ---- checkpoints -------------------------------------------------------------------------------------------

    def end_step_to_save(self) -> None:
        if self.state is SessionState.ACCUMULATED:
            raise CheckpointError(
                f"rank {self.rank}: save after optimizer.step(), not within an accumulation: the gradients that were "
                "accumulated so far are no part of a checkpoint"
            )
        self._end_partial_step()
        if self.epochs.under_way:
            self.end_batch()
        # Here, so that what is sent is counted in what is saved.
        self._storage.check(take_values=True)
        self.phase.parameters.merge_forward()

    def describe(self) -> dict[str, Any]:
        return {key: value for key, value in self.strategy.resolved().items() if key != "name"}

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        return tensors_of(self.model)

    @property
    def replica_state(self) -> ReplicaState:
        """What this rank's replica continues from."""
        return ReplicaState(self.model, self.optimizers, self.phase, self.stale)

    def state_dict(self) -> dict[str, Any]:
        return self.replica_state.state_dict()

    def load_state(self, file: StateFile) -> None:
        self.replica_state.load(file)

    def load_mean(self, files: Sequence[StateFile]) -> None:
        self.replica_state.load_mean(files)
        self.begin_equal()

    # ---- closing -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        if self.state in (SessionState.CLOSED, SessionState.BROKEN):
            return
        self.meet()
        self._end_partial_step()
        self.heed_no_signal(together=True)
        self.settle()
        self.state = SessionState.CLOSED
        if self.phase.terms is not None:
            self.phase.terms.hand_back()
        self.phase.close()
        if self._streamed is not None:
            self._streamed.close()
        self.control.close()
        self._unhook()
        if self._observer is not None:
            self._observer.close()

    def abandon(self) -> None:
        self.state = SessionState.BROKEN
        self.phase.parameters.debias()
        self._unhook()
        self.heed_no_signal(together=False)
        self._unhook()
        if self.phase.terms is not None:
            self.phase.terms.hand_back_own()
        if self._observer is not None:
            self._observer.abandon()

    def _unhook(self) -> None:
        self._weights.close()
        self.optimizers.unhook()
        self.phase.unhook()


def _parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
