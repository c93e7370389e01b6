"""The session of an engine whose ranks hold replicas, alone or in islands; the step, from top to bottom."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hocket.checkpoint.files import StateFile
from hocket.errors import CheckpointError, SessionError
from hocket.segment.shards import whole_of
from hocket.session.api import Attachment, Loss, StepResult, TrainStep
from hocket.session.data.windows import Windows
from hocket.session.engine_session import EngineSession
from hocket.session.exchange.active import Counters
from hocket.session.exchange.equal_replicas import EqualReplicas
from hocket.session.exchange.phases import ActivePhase, Phases
from hocket.session.exchange.under_way import UnderWay
from hocket.session.refusals import refuse_closure
from hocket.session.replica import Replica
from hocket.session.save.consensus import Consensus
from hocket.session.save.mixed import watch_dcp
from hocket.session.save.replica_state import ReplicaState, tensors_of
from hocket.session.step.clipping import clip_shards
from hocket.session.step.closures import SharedClosure
from hocket.session.step.grad_scaler import found_inf, scaler_in_use, unscale, unscales_by
from hocket.session.step.looking_on import Onlookers
from hocket.session.step.nonfinite import NonFiniteSteps
from hocket.session.step.optimizers import Closure, parameters_of, refuse_within_backward
from hocket.session.step.own_copies import OwnCopies
from hocket.session.step.state import SessionState
from hocket.session.step.unused import UnusedGradients
from hocket.session.step.weights import Contribution
from hocket.session.torch_internals import current_backward
from hocket.transport.peer import gather

__all__ = ["ReplicaSession"]

_log = logging.getLogger("hocket")

_onlookers = Onlookers()


class ReplicaSession(EngineSession):
    """A session whose rank holds a whole model, or a shard of each parameter.

    Attributes:
        storage: the trainable parameters' memory.
        stale: gradients that earlier phases have left for the next step.
        train_step: the function behind `train_batch`; the engine sets it.
    """

    train_step: TrainStep
    places_buffers = True

    def __init__(self, given: Attachment) -> None:
        """Attach; collective. A failure leaves nothing behind."""
        observer = given.observer
        peer = given.peer if observer is None else observer.join(given.peer)
        super().__init__(given.model, given.optimizers, given.strategy, peer, given.island)
        self._observer = observer
        #: The thread that has attached it.
        self.thread = 0
        #: The weight of a batch with which nothing was trained yet, as the model seems to be evaluated.
        self._unopened: float | None = None
        self._trains_in_eval_mode = self._looked_at_state = False
        self._warned_of_left_out_batch = self._warned_of_skipped_batch = self._warned_of_mode = False
        #: The last backward of which this session has exchanged gradients, and that with which it has stepped last.
        self._last_backward = self.used_backward = -1
        #: The step at which all replicas were set to their mean for good; -1 for none.
        self._one_at = -1
        try:
            self._attach(given)
        except BaseException:
            if observer is not None:
                observer.abandon()
            raise

    def _attach(self, given: Attachment) -> None:
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
        # A job goes on saving where it saved, and with its periods and phases.
        self.count_on()
        self._replica, self.storage, self._weights = replica, replica.storage, replica.weights
        self._held = {id(whole_of(parameter)) for parameter in self.storage.parameters.values()}
        self._nonfinite = NonFiniteSteps(replica, self.rank)
        exchanges = self.size > 1 and (given.strategy.exchanges or given.strategy.phases)
        self._windows = self.windows = Windows(self.peer if exchanges else None)
        #: The step that the current batch belongs to; a later one is under way once that has ended.
        self._step_of_batch = self.step
        self._unused = UnusedGradients(self.rank)
        self._phases = Phases(self.strategy, replica, self.counters, self._observer, self.step)
        self.stale = self._phases.stale
        self._own_copies = OwnCopies(self.optimizers, self.rank)
        name, averages = self.strategy.name or "the strategy", given.on_difference == "average"
        self._equality = EqualReplicas(replica, self._phases, name, averages=averages)
        # Last, so that what fails above leaves no hook.
        try:
            self.optimizers.hook(self)
            self.phase.hook()
            _onlookers.add(self)
            watch_dcp(self)
        except BaseException:
            self._unhook()
            raise

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

    def count_into(self, counters: Counters) -> None:
        """Count bytes sent and seconds waited in `counters` from now on, together with other sessions."""
        self.counters = counters
        self._phases.count_into(counters)

    def enter_phase_of(self, step: int) -> None:
        self.require("settle")
        self._phases.enter(step)

    @property
    def weight(self) -> float:
        return self._weights.current if self._unopened is None else self._unopened

    def holds(self, parameter: Any) -> bool:
        return id(parameter) in self._held

    def called_by_ddp(self, ranks: int) -> None:
        between = ranks < self.size and not any(each.gradients for each in self.strategy.in_turn)
        if ranks > 1 and not between:
            raise SessionError(
                f"rank {self.rank}: DistributedDataParallel calls the session's model at step {self.step}, and "
                f"averages gradients over {ranks} ranks, beside what {self.strategy.name or 'the strategy'} exchanges. "
                "Three ways out: without it (call the plain model, not ddp(x)); without a session (with "
                "hocket.ddp_comm_hook, if need be); or DistributedDataParallel over a group of a host's "
                "ranks (process_group=...), and between them a strategy that exchanges parameters only "
                "(periodic_average, diloco)"
            )

    # ---- for scripts and engines -------------------------------------------------------------------------------

    def train_batch(self, batch: Any, loss: Loss) -> StepResult | None:
        return self.train_step(batch, loss)

    def accumulate(self) -> AbstractContextManager[None]:
        self._open_batch("session.accumulate")
        return super().accumulate()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        if self.state.accumulated:
            self.exchange_gradients()
        if self.island.own is None:
            return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, norm_type)
        if self.phase.gradients is None:
            self._weights.drop_repetition(self.storage.parameters.values())
        return clip_shards(self.storage.parameters.values(), self.island, max_norm, norm_type)

    def exchange_gradients(self) -> None:
        """Exchange the parameters' `.grad`, and bind it to the result.

        For engines that compute gradients in another way than by a backward through the model, which does this itself.
        """
        if self.phase.gradients is not None:
            self.phase.gradients.exchange()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Return a context for a step that an engine makes in place of the optimizer: it does what hooks would."""
        [first, *_] = self.optimizers.given
        self.before_step(first, None)
        yield
        self.after_step(first)

    # ---- the step, from top to bottom ---------------------------------------------------------------------------

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

    def delay(self, seconds: float) -> None:
        self._note_phase("delay")
        self.peer.clock.sleep(seconds)
        self._note_forward()

    def _note_forward(self) -> None:
        self._note_phase("forward" if self.phase.gradients is not None else "forward and backward")

    def _note_phase(self, name: str) -> None:
        if self._observer is not None:
            self._observer.phase(name, self.peer.clock.now())

    def _begin_exchange(self) -> Contribution:
        """Check before an exchange that the session still holds the parameters that optimizers step."""
        self._open_batch("backward()")
        self._note_phase("backward")
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
        if optimizer not in self.optimizers.waiting:
            # A second step: the first ended without the other optimizers, and keeps what was exchanged since then.
            self._end_step()
        if not self.optimizers.partly_stepped:
            self._nonfinite.skipping = False  # that of a step that failed, and never ended
        if closure is not None:
            refuse_closure(optimizer, self.strategy, sharded=self.island.own is not None)
        self._note_phase("optimizer")
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
            self._note_phase("parameters")
        self.step += 1
        self.phase.parameters.after_step(self.step, weight)
        if self._observer is not None:
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
            _log.warning("session.save would fail: %s", problem)

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
            if not self._warned_of_left_out_batch:
                self._warned_of_left_out_batch = True
                _log.warning(
                    "rank %d left a batch out of an accumulation at step %d: it counts nothing, and the step ends "
                    "where it does on the other ranks",
                    self.rank,
                    self.step,
                )
            return
        gradients = self.phase.gradients
        if not self._warned_of_skipped_batch:
            self._warned_of_skipped_batch = True
            _log.warning(
                "rank %d made no optimizer.step() with the batch of step %d: %s. To add gradients up over batches, put "
                "all but the last into session.accumulate(); to validate, read the loader itself; to read batches "
                "ahead, put session.data around what does: session.data(prefetch(loader))",
                self.rank,
                self.step,
                "it counts as a step" if gradients is None else "it steps with the other ranks' gradients",
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

    # ---- replicas ----------------------------------------------------------------------------------------------

    def settle(self) -> None:
        self.require("session.settle")
        with self.trained_values(shown=False):
            self._phases.settle()

    def trained_values(self, *, shown: bool = True) -> AbstractContextManager[None]:
        return self.storage.without_set_values(self.phase.parameters.merge_forward, shown=shown)

    def receive(self) -> None:
        self.require("session.receive")
        self._phases.receive()

    def settle_together(self) -> None:
        """Settle on all ranks, and merge other ranks' changes to this one's values; collective."""
        self.require("settle")
        self._phases.settle_together()

    def consensus(self) -> AbstractContextManager[None]:
        self.require("session.consensus")
        self.begin_collective("session.consensus")
        self._end_partial_step()
        with ExitStack() as looking:
            looking.enter_context(self.trained_values())
            under_way = self._phases.keep()
            self.settle_together()
            self._compare_steps("session.consensus")
            self._tell_of_mode()
            apart = self._equality.look("session.consensus", self.step, repairs=False)
            consensus = self._phases.set_to_mean(apart, whole=True)
            self._one_at = self.step
            return self._within(consensus, under_way, looking.pop_all())

    @property
    def saves_mixed(self) -> bool:
        """Tell whether replicas may differ now, on the first rank of the second one."""
        island = self.island
        if self.num_replicas == 1 or self.replicas_equal or (island.own is not None and island.own.rank):
            return False
        if self.rank != (island.members or range(self.size))[1]:
            return False
        return (
            self.state.now not in (SessionState.CONSENSUS, SessionState.CLOSED) and self.step != self._one_at
        )

    def _tell_of_mode(self) -> None:
        kind = self.optimizers.in_training_mode
        if not kind or self._warned_of_mode or self.replicas_equal or not self.is_main:
            return
        self._warned_of_mode = True
        _log.warning(
            "%s is in its training mode, and evaluates other weights than it trains: its eval() within a consensus "
            "uses each rank's own state, so that ranks evaluate different models. Call optimizer.eval() before "
            "session.consensus(), and optimizer.train() after it",
            kind,
        )

    @contextmanager
    def _within(self, consensus: Consensus, under_way: UnderWay, looking: ExitStack) -> Iterator[None]:
        with looking, self.state.average():
            try:
                with consensus:
                    try:
                        yield
                    finally:
                        self.storage.forget_gathered()
            finally:
                self._one_at = -1
                if not self.state.ended:
                    under_way.put_back()

    def replica(self) -> AbstractContextManager[None]:
        self.require("session.replica")
        with ExitStack() as looking:
            looking.enter_context(self.trained_values())
            under_way = self._phases.keep()
            self.settle()
            return self._as_it_is(under_way, self.step, looking.pop_all())

    @contextmanager
    def _as_it_is(self, under_way: UnderWay, step: int, looking: ExitStack) -> Iterator[None]:
        with looking:
            try:
                yield
            finally:
                # Nobody has trained on from there.
                if self.step == step and self.state.now is not SessionState.CLOSED:
                    self.storage.forget_gathered()
                    under_way.put_back()

    def consensus_distance(self) -> float:
        self.require("session.consensus_distance")
        self.begin_collective("session.consensus_distance")
        with self.trained_values():
            under_way = self._phases.keep()
            self.settle_together()
            self._compare_steps("session.consensus_distance")
            apart = self._equality.look("session.consensus_distance", self.step, repairs=False)
            distance = self._phases.distance(self.gather, apart)
            under_way.put_back()
            return distance

    def _compare_steps(self, call: str) -> None:
        self._phases.compare_steps(self.step, self._unused.count, call)

    def compare_replicas(self, call: str) -> None:
        self._equality.look(call, self.step, repairs=True)

    # ---- checkpoints -------------------------------------------------------------------------------------------

    def end_step_to_save(self) -> None:
        if self.state.accumulated:
            raise CheckpointError(
                f"rank {self.rank}: save after optimizer.step(), not within an accumulation: the gradients that were "
                "accumulated so far are no part of a checkpoint"
            )
        self._end_partial_step()
        if self.epochs.under_way:
            self.end_batch()
        # Here, so that what is sent is counted in what is saved.
        self.storage.check(take_values=True)
        self.phase.parameters.merge_forward()

    def describe(self) -> dict[str, Any]:
        return {key: value for key, value in self.strategy.resolved().items() if key != "name"}

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        self.storage.forget_gathered()  # which hides the shards
        return tensors_of(self.model)

    @property
    def replica_state(self) -> ReplicaState:
        """Return the state that this rank's replica continues from."""
        self.storage.forget_gathered()
        return ReplicaState(self.model, self.optimizers, self.phase, self.stale, self._replica.beside)

    def state_dict(self) -> Mapping[str, object]:
        return self.replica_state.state_dict()

    def load_state(self, file: StateFile) -> None:
        self.replica_state.load(file)

    def load_mean(self, files: Sequence[StateFile]) -> None:
        self.replica_state.load_mean(files)
        self._phases.begin_equal()

    # ---- closing -----------------------------------------------------------------------------------------------

    @property
    def closes_together(self) -> bool:
        # Else the others may be in the step that this rank did not make.
        return super().closes_together and not self._replica.replaced

    def close(self) -> None:
        if self.state.ended:
            return
        if not self.closes_together:
            self.abandon()
            return
        self.begin_collective("the session's end")
        self._end_partial_step()
        self.stop_saving(together=True)
        with self.trained_values(shown=False):
            self._phases.finish()
            self._compare_steps("the session's end")
            self.compare_replicas("the session's end")
            self._windows.close()
            self.state.move("close")
            self._phases.close()
        if self.streamed is not None:
            self.streamed.close()
        self._replica.close()
        self.control.close()
        self._unhook()
        if self._observer is not None:
            self._observer.close()
        self.give_back()

    def abandon(self) -> None:
        self.state.move("abandon")
        self.phase.abandon()
        self._unhook()
        self.stop_saving(together=False)
        if self._observer is not None:
            self._observer.abandon()

    def _unhook(self) -> None:
        self.note_counts(self.model)
        _onlookers.remove(self)
        self._weights.unhook()
        self.optimizers.unhook()
        self.phase.unhook()
        self.storage.release()
