"""The session of an engine: what hooks, data, checkpoints and the face that scripts see work with."""

from __future__ import annotations

import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from hocket.checkpoint.files import StateFile
from hocket.checkpoint.shared import FoundFolder
from hocket.errors import HocketError
from hocket.session.api import Attachment, Loss, StepResult
from hocket.session.data.epochs import Epochs
from hocket.session.data.streams import StreamedSamples
from hocket.session.data.windows import Windows
from hocket.session.exchange.active import Counters
from hocket.session.island import Island
from hocket.session.ranks import local_rank
from hocket.session.save.beside_training import BesideTraining
from hocket.session.save.reattached import counted_before, note_counted
from hocket.session.step.optimizers import Optimizers
from hocket.session.step.other_sessions import only_evaluates
from hocket.session.step.state import StepState
from hocket.strategy.advice import outer_age, unreached
from hocket.trace import Observer
from hocket.transport.peer import gather

_log = logging.getLogger("hocket")


class EndsOnRequest(Protocol):
    """A save point, as its session sees it."""

    def reach(self) -> None:
        """Save and leave (SystemExit) after a step on which ranks that were asked to end have agreed."""

    def close(self, *, together: bool) -> None:
        """Heed no request any more; collective if `together`."""


class EngineSession(ABC):
    """A model in training on one rank, as its engine trains it.

    Attributes:
        model: the attached model.
        optimizers: all attached optimizers, as one.
        state: the session's state within its step.
        peer: all ranks.
        rank, size: this rank, and the number of ranks.
        local_rank: this rank's number among those of its host, as for `cuda:{local_rank}`.
        is_main: whether this is rank 0, the one that logs and writes.
        data_rank, data_size: the number of this rank's share of the samples, and the number of shares; ranks that hold
            parts of one replica of the model read the same share.
        step: number of steps that have ended; those without an optimizer step (GradScaler found Inf) count.
        skipped_steps: number of steps that this rank skipped for NaN or Inf in a gradient, with `on_nonfinite="skip"`.
        island: the ranks that hold one replica together; this one alone if it holds a whole model.
        replicas_equal: whether all replicas hold the same bits after every step.
        places_buffers: whether a loaded buffer may have another shape than the model's, or be missing in the model.
        counters: bytes sent and seconds waited so far.
        epochs: passes over `data`: the number that have ended, and the one under way.
        run_id: unique to this session; rank 0's is the one in checkpoints.
        saved: the newest checkpoint that was saved, on ranks that are the first with their folder.
        passed_over: the damaged checkpoints that the last load has passed over.
        leaders: for a folder of checkpoints, the first rank that has the same folder as each rank.
        found_folders: the folders that were looked at before training, and not compared yet with the first step.
        windows: the ranks' agreement on the batches between two steps; None where an engine has its own.
        streamed: the samples that travel between ranks; None where none do.
        save_point: the save of ranks that are asked to end; None unless the user wants it.
        beside_training: the saves that a thread writes; None before the first.
        owns_peer: whether `peer` is of this session alone.
        step_ended: called with a step's number, from 0, when it has ended.
    """

    replicas_equal: bool
    places_buffers = False

    def __init__(self, given: Attachment) -> None:
        self._observer = given.observer or Observer()
        peer, island = self._observer.join(given.peer), given.island
        self.model, self.strategy = given.model, given.strategy
        self.optimizers = Optimizers(given.optimizers)
        self.state = StepState(lambda: f"rank {self.rank} after step {self.step}")
        self.peer = peer
        self.rank, self.size = peer.rank, peer.size
        self.local_rank, self.is_main = local_rank(peer), peer.rank == 0
        self.island = Island.alone(peer) if island is None else island
        self.data_rank, self.data_size = self.island.data_rank, self.island.data_size
        self.step = self.skipped_steps = 0
        self.counters, self.epochs = Counters(), Epochs()
        self.run_id = secrets.token_hex(6)
        self.saved: Path | None = None
        self.passed_over: Sequence[Path] = ()
        self.leaders: dict[Path, Sequence[int]] = {}
        self.found_folders: list[FoundFolder] = []
        self.windows: Windows | None = None
        self.streamed: StreamedSamples | None = None
        self.save_point: EndsOnRequest | None = None
        self.beside_training: BesideTraining | None = None
        self.owns_peer = False
        self.step_ended: Callable[[int], None] = lambda _: None
        self.control = peer.lane("session")
        self._warned: set[str] = set()
        self._warned_unreached = self._warned_of_age = False

    def note_phase(self, name: str) -> None:
        """Note for the observer that a phase of the step begins."""
        self._observer.phase(name, self.peer.clock.now())

    @property
    def num_replicas(self) -> int:
        """Return the number of replicas of the model, among which the strategy exchanges."""
        return self.data_size // self.island.shares

    @property
    def optimizer(self) -> Optimizer:
        """Return the attached optimizer; the first of several."""
        return self.optimizers.called[0]

    def require(self, what: str, *, training: bool = False) -> None:
        """Refuse a call that the session's state does not allow.

        Args:
            what: the call, for the message.
            training: whether it needs the trained replica, which is not in the model within `consensus()`.

        Raises:
            SessionError: the call is not allowed now; says why, and what to do.
        """
        self.state.move("train" if training else "look", what)

    # ---- the loop ----------------------------------------------------------------------------------------------

    @abstractmethod
    def train_batch(self, batch: Any, loss: Loss) -> StepResult | None:
        """Carry out `session.train_batch`."""

    def accumulate(self) -> AbstractContextManager[None]:
        """Carry out `session.accumulate`."""
        return self.state.accumulate()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Carry out `session.clip_grad_norm_`.

        Raises:
            HocketError: the engine steps parts of the model by itself.
        """
        raise HocketError(
            "session.clip_grad_norm_ finds no gradients, because the engine steps the model's parts itself: set the "
            "engine's clip_grad_norm"
        )

    @abstractmethod
    def delay(self, seconds: float) -> None:
        """Carry out `session.delay`."""

    def samples(self) -> StreamedSamples | None:
        """Return the samples that travel between ranks; None where none do."""
        exchange = self.strategy.samples
        if exchange is not None and self.streamed is None:
            self.streamed = StreamedSamples(exchange, self.peer, self.data_rank, self.data_size)
        return self.streamed

    @property
    @abstractmethod
    def weight(self) -> float:
        """Return the weight of this rank's current batch in means; 0 for a repetition, where it is out of data."""

    @property
    def evaluates(self) -> bool:
        """Tell whether the model seems to be evaluated now."""
        return only_evaluates(self.model)

    @property
    def looked_on(self) -> bool:
        """Tell whether the current batch seems to be one of evaluation: nothing was trained with it."""
        return False

    @property
    def batch_unused(self) -> bool:
        """Tell whether nothing was trained with the current batch yet."""
        return False

    @abstractmethod
    def begin_batch(self, weight: float) -> None:
        """Begin a batch; `data` calls it.

        Args:
            weight: of this rank's batch in the mean, 0 or more.
        """

    @abstractmethod
    def end_batch(self) -> None:
        """End a step whose batch was skipped, or whose optimizer did not step; `data` calls it."""

    @abstractmethod
    def end_pass(self) -> None:
        """End a loop over `data`, which calls it."""

    def begin_collective(self, call: str) -> None:
        """Check that all ranks left the last pass over `data` after the same batch, for the same call; collective.

        Every collective call after a loop begins with it. Without it, its messages could be mixed up with those of
        ranks that are still in their loop.

        Args:
            call: the name of the call that begins.
        """
        if self.goes_together:
            self.epochs.leave_together(self.peer, call)

    @property
    def goes_together(self) -> bool:
        """Tell whether ranks exchange anything in their loops, so that they leave them after the same batch."""
        strategy = self.strategy
        exchanges = strategy.gradients or strategy.parameters or strategy.phases
        return bool(exchanges) or self.data_size < self.size

    def count_on(self, initial: str = "keep") -> None:
        """Continue the step count of the model's earlier sessions in this job; collective.

        Args:
            initial: whether all ranks are about to take `rank0`'s values.
        """
        self.step, self.epochs.ended = counted_before(self.model, self.peer, initial)
        self.peer.status.note_step(self.step)

    def note_counts(self, model: nn.Module) -> None:
        """Save the counts for the model's next session."""
        note_counted(model, self.step, self.epochs.ended)

    def warn_once(self, text: str, *values: object) -> None:
        """Log a warning, the first time that a session does so.

        Args:
            text: with a place for each value.
            values: of the first time.
        """
        if text not in self._warned:
            self._warned.add(text)
            _log.warning(text, *values)

    def warn_unreached(self, steps: int) -> None:
        """Warn of phases and exchanges that `steps` steps never reach, or lose; once a session."""
        if self.is_main and not self._warned_unreached:
            for warning in unreached(self.strategy, steps, self.num_replicas) if steps else ():
                _log.warning(warning)
            if (
                not steps
                and self.strategy.parameters
                and any(p.grad is not None for p in self.model.parameters())
            ):
                _log.warning(
                    "backward() ran, but the attached optimizer never stepped, so ranks have exchanged nothing: %s "
                    "exchanges parameters after optimizer.step(). Call it instead of p -= lr * p.grad",
                    self.strategy.name or "the strategy",
                )
        self._warned_unreached = True

    def warn_of_age(self) -> None:
        """Warn, once a session, of outer parameters that are older than the step at which a script asks for them."""
        text = outer_age(self.strategy.at(self.step), self.step, self.num_replicas)
        if text and self.is_main and not self._warned_of_age:
            self._warned_of_age = True
            _log.warning(text)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's `value` (JSON-able), by rank; collective."""
        return self.gathered(value, "session.gather")

    def gathered(self, value: Any, call: str) -> list[Any]:
        """Gather for a call of the user's; collective."""
        self.require(call)
        self.begin_collective(call)
        return gather(self.peer, value, what=call)

    @abstractmethod
    def end_step_to_save(self) -> None:
        """End a step without an optimizer step (GradScaler found Inf), as the next batch would; `save` calls it."""

    @abstractmethod
    def compare_replicas(self, call: str) -> None:
        """Check that replicas which the strategy keeps equal are equal, else set them to their mean; collective.

        Args:
            call: the call that compares them.

        Raises:
            DisagreementError: they differ, and that is to be an error.
        """

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return the strategy as plain configuration, and other facts that a checkpoint's reader must share."""

    @abstractmethod
    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return this rank's parameters and buffers by name, in their own memory."""

    @abstractmethod
    def state_dict(self) -> Mapping[str, object]:
        """Return this rank's state by sections: `model` as `tensors` returns it, `optimizer`, and more.

        Tensors are the session's own, not copies.
        """

    @abstractmethod
    def enter_phase_of(self, step: int) -> None:
        """Open the exchanges in force after `step` steps, to load their state; collective."""

    @abstractmethod
    def load_state(self, file: StateFile) -> None:
        """Continue from a result of `state_dict` on this rank.

        Args:
            file: this rank's file of a checkpoint.

        Raises:
            CheckpointError: something does not take its state.
        """

    @abstractmethod
    def load_mean(self, files: Sequence[StateFile]) -> None:
        """Continue from the mean of another number of ranks.

        Args:
            files: of all ranks that have saved.

        Raises:
            CheckpointError: something does not take its state, or there is no mean.
        """

    # ---- replicas ----------------------------------------------------------------------------------------------

    @abstractmethod
    def settle(self) -> None:
        """Carry out `session.settle`."""

    def receive(self) -> None:
        """Wait for all exchanges under way, without merging them before they are due."""
        self.settle()

    @abstractmethod
    def consensus(self) -> AbstractContextManager[None]:
        """Carry out `session.consensus`."""

    @abstractmethod
    def replica(self) -> AbstractContextManager[None]:
        """Carry out `session.replica`."""

    @abstractmethod
    def consensus_distance(self) -> float:
        """Carry out `session.consensus_distance`."""

    def trained_values(self) -> AbstractContextManager[None]:
        """Let parameters hold what is trained, in place of values that the user has set for a while."""
        return nullcontext()

    # ---- closing -----------------------------------------------------------------------------------------------

    @property
    def closes_together(self) -> bool:
        """Tell whether the other ranks close this session, too, as far as this rank knows."""
        return not self.state.ended

    @abstractmethod
    def close(self) -> None:
        """Carry out `session.close`."""

    @abstractmethod
    def abandon(self) -> None:
        """Take the hooks off without the other ranks, which may not be here."""

    def finish_save(self, call: str) -> None:
        """Wait for a save beside training, if one is under way, for a call that begins; collective."""
        if self.beside_training is not None:
            self.begin_collective(call)
            self.beside_training.finish()

    def stop_saving(self, *, together: bool) -> None:
        """End `session.save_on_signal`, and leave a save under way; collective if `together`; closing calls it."""
        if self.beside_training is not None:
            self.beside_training.drop()
            if together:
                self.beside_training.close()
            self.beside_training = None
        if self.save_point is not None:
            self.save_point.close(together=together)
            self.save_point = None

    def give_back(self) -> None:
        """Give back the session's own endpoint, if it has one; collective; `close` ends with it."""
        if self.owns_peer:
            self.peer.close()
