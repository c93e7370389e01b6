"""The part of a session that its data, its checkpoints and its save point work with."""

from __future__ import annotations

import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hocket.checkpoint.files import StateFile
from hocket.errors import SessionError
from hocket.loggers import Log
from hocket.session.again import counted_before, note_counted
from hocket.session.epochs import Epochs
from hocket.session.exchange import Counters
from hocket.session.optimizers import Optimizers
from hocket.session.ranks import local_rank
from hocket.session.windows import Windows
from hocket.strategy.strategy import Strategy
from hocket.strategy.unreached import unreached
from hocket.transport.peer import Peer, gather

__all__ = ["SessionCore", "SessionState"]

_log = logging.getLogger(__name__)


class SessionState(Enum):
    """Where a session is, within its step or outside of any; what it may do next follows from that.

    A step goes from IDLE by BACKWARD and EXCHANGED, and by STEPPED where there are several optimizers, to IDLE again.
    """

    IDLE = "between two steps"
    ACCUMULATED = "after backwards whose gradients were only added up"
    BACKWARD = "sending gradients"
    EXCHANGED = "before the optimizers that use what was exchanged"
    STEPPED = "after the first of several optimizers"
    CONSENSUS = "within consensus()"
    BROKEN = "broken"
    CLOSED = "closed"


_CURES = {
    SessionState.BROKEN: "an error ended this session, and the other ranks may have gone on: attach again",
    SessionState.CLOSED: "this session is closed: attach again, or do so before it is closed",
    SessionState.CONSENSUS: "the model holds the replicas' mean within `with session.consensus()`, and gets this "
    "rank's own replica back at its end, so that a step there would be lost, as would a load, and a save would write "
    "the mean: do it after",
}


class SessionCore(ABC):
    """A model in training on one rank, as its data, its checkpoints and its save point see it.

    Attributes:
        model: what was attached.
        optimizers: all that were attached, as one.
        state: where the session is.
        peer: all ranks.
        rank, size: this rank, and how many there are.
        local_rank: this rank's number among those of its host, as for `cuda:{local_rank}`.
        is_main: whether this is rank 0, the one that logs and writes.
        data_rank, data_size: which share of the samples this rank reads, and of how many; ranks that hold parts of one
            replica of the model read the same share.
        step: how many steps have ended; those without an optimizer step (GradScaler found Inf) count.
        skipped_steps: steps that this rank has left out because a gradient was NaN or Inf, with `on_nonfinite="skip"`.
        replicas_equal: whether all replicas hold the same bits after every step.
        places_buffers: whether a loaded buffer may have another shape than the model's, or be none of them.
        counters: bytes sent and seconds waited so far.
        epochs: passes over `data`: how many have ended, and the one under way.
        run_id: what no other session has; rank 0's is the one in checkpoints.
        saved: the newest checkpoint that was saved, on rank 0.
        passed_over: the damaged checkpoints that the last load has passed over.
        logs: to which `log` writes, on rank 0.
        windows: the batches between two steps, as the ranks tell each other; None where an engine has its own.
    """

    replicas_equal: bool
    places_buffers = False

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], strategy: Strategy, peer: Peer
    ) -> None:
        self.model = model
        self.optimizers = Optimizers(optimizers)
        self.state = SessionState.IDLE
        self.strategy = strategy
        self.peer = peer
        self.rank, self.size = peer.rank, peer.size
        self.local_rank = local_rank(peer)
        self.is_main = peer.rank == 0
        self.data_rank, self.data_size = peer.rank, peer.size
        self.step = 0
        self.skipped_steps = 0
        self.counters = Counters()
        self.epochs = Epochs()
        self.run_id = secrets.token_hex(6)
        self.saved: Path | None = None
        self.passed_over: Sequence[Path] = ()
        self.logs: list[Log] = []
        self.windows: Windows | None = None
        self.control = peer.lane("session")
        self._told_unreached = False

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer that was attached; the first of several."""
        return self.optimizers.called[0]

    def require(self, what: str, *, training: bool = False) -> None:
        """Refuse what the session cannot do where it is.

        Args:
            what: the user has asked for.
            training: whether it is about the replica that is trained, which is not here within `consensus()`.

        Raises:
            SessionError: says why, and what to do.
        """
        if self.state in _CURES and (training or self.state is not SessionState.CONSENSUS):
            raise SessionError(f"{what} on rank {self.rank} after step {self.step}: {_CURES[self.state]}")

    @property
    @abstractmethod
    def weight(self) -> float:
        """How much this rank's current batch counts in means; 0 for a repetition, where it is out of data."""

    @property
    def looked_on(self) -> bool:
        """Whether nothing was trained with the current batch, and the model seems to be evaluated with it."""
        return False

    @abstractmethod
    def begin_batch(self, weight: float) -> None:
        """Take note of a batch; `data` calls it.

        Args:
            weight: what this rank's batch counts in the mean, 0 or more.
        """

    @abstractmethod
    def end_batch(self) -> None:
        """End a step whose batch was skipped, or whose optimizer did not step; `data` calls it."""

    @abstractmethod
    def end_pass(self) -> None:
        """Take note that the loop over `data` is over; `data` calls it."""

    def meet(self, call: str) -> None:
        """Find out that all ranks have left the last pass over `data` after the same batch, for the same; collective.

        Everything that is collective and comes after a loop begins with it: what one rank does there would be mixed up
        with what others still do in their loop.

        Args:
            call: what this rank is about to do.
        """
        if self.goes_together:
            self.epochs.meet(self.peer, call)

    @property
    def goes_together(self) -> bool:
        """Whether ranks exchange anything in their loops, so that they leave them after the same batch."""
        strategy = self.strategy
        exchanges = strategy.gradients or strategy.parameters or strategy.phases
        return bool(exchanges) or self.data_size < self.size

    def count_on(self) -> None:
        """Go on counting where the model's earlier sessions have ended, as a job's steps do; collective."""
        self.step, self.epochs.ended = gather(self.peer, counted_before(self.model))[0]
        self.peer.status.note_step(self.step)

    def note_counts(self, model: nn.Module) -> None:
        """Let a model's next session go on counting from here."""
        note_counted(model, self.step, self.epochs.ended)

    def tell_unreached(self, steps: int) -> None:
        """Warn of what does not take place, or is lost, where training ends after so many steps; once a session."""
        if self.is_main and steps and not self._told_unreached:
            for told in unreached(self.strategy, steps, self.data_size):
                _log.warning(told)
        self._told_unreached = True

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's `value` (JSON-able), by rank; collective."""
        return self.gathered(value, "session.gather")

    def gathered(self, value: Any, call: str) -> list[Any]:
        """Gather for what the user has called; collective."""
        self.require(call)
        self.meet(call)
        return gather(self.peer, value, what=call)

    @abstractmethod
    def end_step_to_save(self) -> None:
        """End a step whose optimizer did not step (GradScaler found Inf), as the next batch would; `save` calls it."""

    @abstractmethod
    def compare_replicas(self, call: str) -> None:
        """Look whether replicas are as equal as the strategy keeps them, and set them to their mean if not; collective.

        Args:
            call: what has brought the ranks together.

        Raises:
            DisagreementError: they are not, and that is to be an error.
        """

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return the strategy as plain configuration, and what else a checkpoint's reader must have in common with
        its writer.
        """

    @abstractmethod
    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return parameters and buffers that this rank trains, by name, in their own memory."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return by sections what this rank trains: `model` as `tensors` returns it, `optimizer`, and more.

        Tensors are the session's own, not copies.
        """

    @abstractmethod
    def enter_phase_of(self, step: int) -> None:
        """Open the exchanges that hold when `step` steps have ended, to load what they kept; collective."""

    @abstractmethod
    def load_state(self, file: StateFile) -> None:
        """Continue from what `state_dict` returned on this rank.

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

    @abstractmethod
    def reach_save_point(self) -> None:
        """Save and leave (SystemExit) after a step on which ranks that were asked to end have agreed."""
