"""The session of an engine whose ranks hold replicas, alone or in islands: their mean, their checkpoints, their end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from hocket.checkpoint.files import StateFile
from hocket.errors import CheckpointError
from hocket.session.api import Loss, StepResult, TrainStep
from hocket.session.exchange.active import Counters
from hocket.session.exchange.under_way import UnderWay
from hocket.session.save.consensus import Consensus
from hocket.session.save.dcp_warning import watch_dcp
from hocket.session.save.reattached import note_counted
from hocket.session.save.replica_state import tensors_of
from hocket.session.step.clipping import clip_shards
from hocket.session.step.state import SessionState
from hocket.session.stepping_session import SteppingSession


class ReplicaSession(SteppingSession):
    """A session whose rank holds a whole model, or a shard of each parameter.

    Attributes:
        train_step: the function behind `train_batch`; the engine sets it.
    """

    train_step: TrainStep
    places_buffers = True
    #: The step at which all replicas were set to their mean for good; -1 for none.
    _one_at = -1

    def _hook(self) -> None:
        super()._hook()
        watch_dcp(self)

    # ---- for scripts and engines -------------------------------------------------------------------------------

    def train_batch(self, batch: Any, loss: Loss) -> StepResult | None:
        return self.train_step(batch, loss)

    def accumulate(self) -> AbstractContextManager[None]:
        self._open_batch("session.accumulate")
        return super().accumulate()

    def delay(self, seconds: float) -> None:
        self.note_phase("delay")
        self.peer.clock.sleep(seconds)
        self._note_forward()

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

    def count_into(self, counters: Counters) -> None:
        """Count bytes sent and seconds waited in `counters` from now on, together with other sessions."""
        self.counters = counters
        self._phases.count_into(counters)

    # ---- replicas ----------------------------------------------------------------------------------------------

    def settle(self) -> None:
        self.require("session.settle")
        with self.trained_values(shown=False):
            self._phases.settle()

    def enter_phase_of(self, step: int) -> None:
        self.require("settle")
        self._phases.enter(step)

    def trained_values(self, *, shown: bool = True) -> AbstractContextManager[None]:
        return self.storage.without_set_values(self.phase.parameters.merge_forward, shown=shown)

    def receive(self) -> None:
        self.require("session.receive")
        self._phases.receive()

    @contextmanager
    def settling_together(self) -> Iterator[None]:
        """Return a context for steps that are still to come, and settle on all ranks after them; collective.

        If a program has written parameters before it, on any rank, they stay so.
        """
        self.require("settle")
        self._replica.check(take_values=True)
        written = self._phases.were_written("session.settle")
        own = [flat.clone() for flat in self.storage.flats] if written else []
        yield
        self._phases.settle_to_read("session.settle")
        for flat, values in zip(self.storage.flats, own, strict=False):  # none, or all
            flat.copy_(values)

    def consensus(self) -> AbstractContextManager[None]:
        self.require("session.consensus")
        self.begin_collective("session.consensus")
        self._end_partial_step()
        with ExitStack() as looking:
            looking.enter_context(self.trained_values())
            under_way = self._phases.keep()
            written = self._phases.settle_to_read("session.consensus")
            self._compare_steps("session.consensus")
            self._tell_of_mode()
            apart = self._equality.look("session.consensus", self.step, repairs=False)
            consensus = self._phases.set_to_mean(apart, whole=True, written=written)
            self._one_at = self.step
            return self._within(consensus, under_way, looking.pop_all())

    @property
    def saves_mixed(self) -> bool:
        """Tell whether replicas may differ now, on the first rank of the second one."""
        island = self.island
        if not self._apart or (island.own is not None and island.own.rank):
            return False
        if self.rank != (island.members or range(self.size))[1]:
            return False
        return self.state.now not in (SessionState.CONSENSUS, SessionState.CLOSED)

    @property
    def _apart(self) -> bool:
        return self.num_replicas > 1 and not self.replicas_equal and self.step != self._one_at

    def note_counts(self, model: nn.Module) -> None:
        alone = self.storage.parameters if self._apart and self.island.own is None else {}
        note_counted(model, self.step, self.epochs.ended, alone)

    def warn_of_age(self) -> None:
        if not self._phases.left.were_written():  # else it is not the outer parameters that are shown
            super().warn_of_age()

    def _tell_of_mode(self) -> None:
        kind = self.optimizers.in_training_mode
        if kind and self.is_main and not self.replicas_equal:
            self.warn_once(
                "%s is in training mode, so ranks would evaluate different models within a consensus. Call "
                "optimizer.eval() before session.consensus(), and optimizer.train() after it",
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
            self._phases.settle_to_read()
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
            self._phases.settle_to_read("session.consensus_distance")
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
                f"rank {self.rank}: a checkpoint does not hold accumulated gradients: save after optimizer.step(), "
                "not within an accumulation"
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
        self._observer.close()
        self.give_back()

    def abandon(self) -> None:
        self.state.move("abandon")
        self.phase.abandon()
        self._unhook()
        self.stop_saving(together=False)
        self._observer.abandon()
