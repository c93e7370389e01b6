"""The step of a session whose ranks hold replicas, alone or in islands, from top to bottom."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from hocket.segment.shards import whole_of
from hocket.session.api import Attachment
from hocket.session.data.windows import Windows
from hocket.session.ddp import refuse_ddp
from hocket.session.engine_session import EngineSession
from hocket.session.exchange.active_phase import ActivePhase
from hocket.session.exchange.equal_replicas import EqualReplicas
from hocket.session.exchange.phases import Phases
from hocket.session.refusals import refuse_closure
from hocket.session.replica import Replica
from hocket.session.save.replica_state import ReplicaState
from hocket.session.save.save_folders import refuse_later
from hocket.session.step.closures import SharedClosure
from hocket.session.step.grad_scaler import found_inf, scaler_in_use, unscale, unscales_by
from hocket.session.step.nonfinite import NonFiniteSteps
from hocket.session.step.optimizers import Closure, parameters_of, refuse_within_backward
from hocket.session.step.other_sessions import OtherSessions
from hocket.session.step.own_copies import OwnCopies
from hocket.session.step.state import SessionState
from hocket.session.step.unused import UnusedGradients
from hocket.session.step.weights import Contribution
from hocket.session.torch_internals import current_backward
from hocket.transport.peer import gather

_onlookers = OtherSessions()


class SteppingSession(EngineSession):
    """A session that steps its rank's replica: a whole model, or a shard of each parameter.

    Attributes:
        storage: the trainable parameters' memory.
        stale: gradients that earlier phases have left for the next step.
    """

    def __init__(self, given: Attachment) -> None:
        """Attach; collective. A failure leaves nothing behind."""
        super().__init__(given)
        #: The thread that has attached it.
        self.thread = 0
        #: The weight of a batch with which nothing was trained yet, as the model seems to be evaluated.
        self._unopened: float | None = None
        self._trains_in_eval_mode = self._looked_at_state = False
        #: The last backward of which this session has exchanged gradients, and that with which it has stepped last.
        self._last_backward = self.used_backward = -1
        try:
            self._attach(given)
        except BaseException:
            self._observer.abandon()
            raise

    def _attach(self, given: Attachment) -> None:
        # A job goes on saving where it saved, and with its periods and phases.
        self.count_on(given.initial)
        replica = Replica(
            self.model,
            self.optimizers,
            self.island,
            self.control,
            self.state,
            self._begin_exchange,
            lambda: self.weight,
            initial=given.initial,
            may_skip=given.on_nonfinite == "skip",
            lanes_on_device=given.lanes != "host",
            statistics=given.statistics,
        )
        self._replica, self.storage, self._weights = replica, replica.storage, replica.weights
        self._held = {id(whole_of(parameter)) for parameter in self.storage.parameters.values()}
        self._nonfinite = NonFiniteSteps(replica, self.rank)
        exchanges = self.size > 1 and (given.strategy.exchanges or given.strategy.phases)
        self._windows = self.windows = Windows(self.peer if exchanges else None)
        #: The step that the current batch belongs to; a later one is under way once that has ended.
        self._step_of_batch = self.step
        self._unused = UnusedGradients(self.rank)
        self._phases = Phases(self.strategy, replica, self.counters, given.observer, self.step)
        self.stale = self._phases.stale
        self._own_copies = OwnCopies(self.optimizers, self.rank)
        name = f"strategy {self.strategy.name}" if self.strategy.name else "the strategy"
        averages = given.on_difference == "average"
        self._equality = EqualReplicas(replica, self._phases, name, averages=averages)
        # Last, so that what fails above leaves no hook.
        try:
            self._hook()
        except BaseException:
            self._unhook()
            raise

    def _hook(self) -> None:
        self.optimizers.hook(self)
        self.phase.hook()
        _onlookers.add(self)

    def _unhook(self) -> None:
        self.note_counts(self.model)
        _onlookers.remove(self)
        self._weights.unhook()
        self.optimizers.unhook()
        self.phase.unhook()
        self.storage.release()

    @property
    def phase(self) -> ActivePhase:
        """Return the open exchanges."""
        return self._phases.active

    @property
    def replicas_equal(self) -> bool:
        return self._phases.replicas_equal

    @replicas_equal.setter
    def replicas_equal(self, equal: bool) -> None:
        self._phases.replicas_equal = equal

    @property
    def weight(self) -> float:
        return self._weights.current if self._unopened is None else self._unopened

    def holds(self, parameter: Any) -> bool:
        return id(parameter) in self._held

    @property
    def replica_state(self) -> ReplicaState:
        """Return the state that this rank's replica continues from."""
        self.storage.forget_gathered()
        return ReplicaState(
            self.model, self.optimizers, self.phase, self.stale, self._replica.untrained, self._phases.left
        )

    def called_by_ddp(self, ranks: int) -> None:
        refuse_ddp(self.strategy, ranks, self.size, self.rank, self.step)

    def begin_batch(self, weight: float) -> None:
        self.require("a batch of session.data", training=True)
        self._unopened = weight
        if not self.evaluates:
            self._open_batch("a batch of session.data")

    @property
    def evaluates(self) -> bool:
        return not self._trains_in_eval_mode and super().evaluates

    @property
    def looked_on(self) -> bool:
        return self._unopened is not None

    @property
    def batch_unused(self) -> bool:
        return self.state.now is SessionState.IDLE and self.step == self._step_of_batch

    def _open_batch(self, call: str) -> None:
        """Begin the batch that was handed out, for a call that trains; evaluations begin none."""
        self.require(call, training=True)
        weight, self._unopened = self._unopened, None
        if weight is None:
            return
        self.epochs.note_trained()
        self._trains_in_eval_mode = self._trains_in_eval_mode or not self.model.training
        self._end_partial_step()
        self._note_forward()
        self._weights.begin_batch(weight)
        self._windows.begin_batch()
        for other in _onlookers.of(self):
            other.follow_batch(weight)
        self._step_of_batch = self.step
        self.state.move("begin")
        self._equality.between_steps(self.step)

    def follow_batch(self, weight: float) -> None:
        self._weights.begin_batch(weight)

    def follow_end(self) -> None:
        self._weights.end_pass()

    def _note_forward(self) -> None:
        self.note_phase("forward" if self.phase.gradients is not None else "forward and backward")

    def _begin_exchange(self) -> Contribution:
        """Check before an exchange that the session still holds the parameters that optimizers step."""
        self._open_batch("backward()")
        self.note_phase("backward")
        if self.state.now is SessionState.EXCHANGED and self.phase.dropped_gradients:
            self._note_dropped()
        self._last_backward = current_backward()
        self._replica.check(take_values=False)  # the step may set them back (SAM)
        self._windows.announce(steps=True)
        self._equality.begin_round(self.step)
        self.state.move("begin")
        return self._weights.contribution()

    def before_step(self, optimizer: Optimizer, closure: Closure | None) -> Closure | None:
        refuse_within_backward(optimizer, f"rank {self.rank}, step {self.step}: ")
        self._open_batch("optimizer.step()")
        if self.found_folders:  # in a loop without session.data
            refuse_later(self)
        if optimizer not in self.optimizers.waiting:
            # A second step: the first ended without the other optimizers, and keeps what was exchanged since then.
            self._end_step()
        if not self.optimizers.partly_stepped:
            self._nonfinite.skipping = False  # that of a step that failed, and never ended
        if closure is not None:
            refuse_closure(optimizer, self.strategy, sharded=self.island.own is not None)
        self.note_phase("optimizer")
        self._windows.announce(steps=True)
        self.phase.look_before_step()
        gradients = self.phase.gradients
        sent = self.state.now in (SessionState.EXCHANGED, SessionState.STEPPED)
        if closure is None and gradients is not None and not sent:
            # Put there by hand, or accumulated: no backward has sent them.
            gradients.exchange()
        self.phase.begin_step(with_closure=closure is not None)
        if closure is None:
            self._gradients_are_in(optimizer)
            return None
        self._nonfinite.begin_closure(optimizer, self.phase.opened)
        return SharedClosure(
            lambda: self._exchanged(closure),
            self.phase.lane_of_equal_gradients(),
            lambda: 1.0 if gradients is None else gradients.contribution.weight,
            lambda: self._gradients_are_in(optimizer),
        )

    def _exchanged(self, closure: Closure) -> Any:
        """Call a closure, and exchange `p.grad` if no backward within it has sent that."""
        self.state.move("begin")
        loss = closure()
        if self.phase.gradients is not None and self.state.now is not SessionState.EXCHANGED:
            self.phase.gradients.exchange()
        return loss

    def _gradients_are_in(self, optimizer: Optimizer) -> None:
        """Skip or refuse a step with NaN or Inf; else complete its gradients."""
        gradients = self.phase.gradients
        if gradients is None:
            self._weights.drop_repetition(parameters_of(optimizer))
        skipping = self._nonfinite.skipping
        alone = bool(self.phase.strategy.gradients)
        if self._nonfinite.leaves_out(optimizer, gradients, self.step, alone=alone):
            self.skipped_steps += not skipping
            return
        if not found_inf(optimizer):
            self.stale.join(parameters_of(optimizer), unscales_by(optimizer))

    def after_step(self, optimizer: Optimizer) -> None:
        self._nonfinite.end_closure()
        self.phase.end_step()
        self.stale.end_step(used=not self._nonfinite.skipping)
        self._end_optimizer(optimizer, used=not self._nonfinite.skipping)

    def skipped(self, optimizer: Optimizer) -> None:
        self._end_optimizer(optimizer, used=False)

    def _end_optimizer(self, optimizer: Optimizer, *, used: bool) -> None:
        self.state.move("step", "optimizer.step()")
        if self.phase.gradients is not None:
            self.phase.gradients.end_step(optimizer, used=used)
        self.used_backward = self._last_backward
        self.optimizers.waiting.discard(optimizer)
        if not self.optimizers.waiting:
            self._end_step()
        else:
            # A forward may run before the other optimizers' steps.
            self.phase.parameters.debias()

    def _end_step(self) -> None:
        self._windows.announce(steps=True)
        self.optimizers.begin_step()
        weight = self._weight_of_step()
        self._weights.end_step()
        self._nonfinite.skipping = False
        self._unused.end_step(in_batch=self.epochs.under_way)
        self.state.move("end")
        self.phase.look_after_step()
        if self.phase.parameters.exchanges:
            self._own_copies.after_step()
            self.note_phase("parameters")
        self.step += 1
        self.phase.parameters.after_step(self.step, weight)
        self._observer.step_ended(self.step - 1, self.peer.clock.now())
        self.peer.status.note_step(self.step)
        self._phases.go_on(self.step, self._gather_replicas)
        if not self._looked_at_state:
            self._look_at_state()
        if not self.epochs.under_way:  # else the next batch says that the step is over
            self._equality.between_steps(self.step)
        self.step_ended(self.step - 1)

    def _gather_replicas(self, value: Any) -> list[Any]:
        """Return the value of each rank that holds the same parameters; collective."""
        self.require("session.gather")
        self.begin_collective("session.gather")
        return gather(self._replica.ranks.peer, value, what="session.gather")

    def _weight_of_step(self) -> float:
        """Return the weight of the step's batches, of all ranks whose gradients it was made with."""
        if self.phase.gradients is not None:
            return self.phase.gradients.weight
        # What this rank alone has left out is no part of its distance from outer parameters.
        return 0.0 if self._nonfinite.skipping else self._weights.contribution().weight

    def _look_at_state(self) -> None:
        """Warn after the first step of state that no checkpoint could hold, not hours later."""
        self._looked_at_state = True
        problem = self.replica_state.why_not_saved() if self.is_main else ""
        if problem:
            self.warn_once("session.save would fail: %s", problem)

    def end_batch(self) -> None:
        if self.looked_on:
            return
        self._end_partial_step()
        if self.step != self._step_of_batch:
            return
        if self.state.accumulated:
            self._windows.announce(adds=True)
        elif self.state.now is SessionState.EXCHANGED:
            self._unused.leave(self.step)
            self.state.move("begin")
            self._end_step()
        else:
            self._end_left_out()

    def _end_left_out(self) -> None:
        """Continue after a skipped batch: the step ends here if it does so on other ranks."""
        with torch.no_grad():
            # Other ranks may wait for segments that this one only sends in its next forward.
            self.phase.parameters.merge_forward()
        ends_step = self._windows.leave_out()
        self._weights.leave_out()
        if ends_step is False or (ends_step is None and self._weights.several):
            self.state.move("accumulate")
            self.warn_once(
                "rank %d skipped a batch within an accumulation at step %d: the batch has weight 0, and the step ends "
                "when it ends on the other ranks",
                self.rank,
                self.step,
            )
            return
        gradients = self.phase.gradients
        self.warn_once(
            "rank %d made no optimizer.step() with the batch of step %d: %s. To add gradients up over batches, put "
            "all but the last into session.accumulate(); to validate, read the loader itself; to read ahead, write "
            "session.data(prefetch(loader))",
            self.rank,
            self.step,
            "the batch counts as a step"
            if gradients is None
            else "this rank steps with the other ranks' gradients",
        )
        self._step_without_batch()

    def _step_without_batch(self) -> None:
        """Step with the gradients of other batches: this rank's accumulated ones, and the other ranks'."""
        gradients, accumulated = self.phase.gradients, self._weights.any_counts
        if accumulated and scaler_in_use():
            unscale([p.grad for p in self.storage.parameters.values() if p.grad is not None])
        if gradients is not None:
            if accumulated:
                gradients.exchange()
            else:
                self._equality.begin_round(self.step)
                gradients.take_part()
        if gradients is None and not accumulated:
            self.optimizers.leave_out()
            self._end_step()
        elif gradients is not None and gradients.nonfinite_anywhere and scaler_in_use():
            self.state.move("begin")
            self._end_step()  # the others' scalers leave it out
        else:
            self.optimizers.step()
            # The loop's own zero_grad() may come after the step that it did not make.
            self.optimizers.zero_grad()

    def _note_dropped(self) -> None:
        """Note gradients that were dropped.

        They do not count if another session has stepped with that backward, as a GAN's generator does through the
        discriminator.
        """
        if not _onlookers.use(self, self._last_backward):
            self._unused.drop(self.step, in_batch=self.epochs.under_way)

    def end_pass(self) -> None:
        self._unopened = None
        self.follow_end()
        for other in _onlookers.of(self):
            other.follow_end()

    def _end_partial_step(self) -> None:
        """End a step in which some of the optimizers have stepped, and the others will not."""
        if self.optimizers.partly_stepped:
            self._end_step()
