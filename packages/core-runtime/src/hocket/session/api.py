"""What every session is to whoever trains with it, however an engine lets a batch flow through the model."""

from __future__ import annotations

import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn
from torch.optim import Optimizer

from hocket.checkpoint.files import StateFile
from hocket.errors import HocketError, SessionError
from hocket.session.checkpoint import Checkpoints, Resumed
from hocket.session.data import Epochs, SessionData
from hocket.session.exchange import Counters
from hocket.session.optimizers import Optimizers
from hocket.session.save_point import SavePoint
from hocket.session.streams import StreamedSamples
from hocket.strategy.strategy import Strategy
from hocket.trace import Observer
from hocket.transport.peer import Peer, gather

__all__ = [
    "Attachment",
    "Batch",
    "Loss",
    "MakeOptimizer",
    "SessionState",
    "StepResult",
    "TrainStep",
    "TrainingSession",
]


#: From the model's output and the batch's target to a scalar, the mean over the batch.
Loss = Callable[[Any, Any], Tensor]

#: (input, target), as a loader yields them.
Batch = tuple[Any, Any]

#: From parameter groups, as torch's optimizers take them, to an optimizer over them.
MakeOptimizer = Callable[[list[dict[str, Any]]], Optimizer]


@dataclass(frozen=True)
class StepResult:
    """What one batch gave.

    Attributes:
        loss: the batch's mean loss, a scalar without graph, on the model's device.
        output: the model's output, without graph.
    """

    loss: Tensor
    output: Any


#: Runs one batch, as the loader yields it, through the model and steps the optimizer; returns what the batch gave, None
#: where another rank has the model's output. The loss is called with the model's output and the target.
TrainStep = Callable[[Batch, Loss], StepResult | None]


@dataclass(frozen=True)
class Attachment:
    """What `hocket.attach` was given; checked, and the same on all ranks.

    Attributes:
        model, optimizers, strategy: as they were given; the model with this rank's own values.
        peer: all ranks.
        initial: `rank0` or `keep`.
        on_nonfinite: `error` or `skip`.
        observer: is told of exchanges, waits and phases; None where nobody asks.
        make_optimizer: makes, of parameter groups, another optimizer like the given one, for engines that keep several
            copies of the weights; None where the engine is to copy the given one.
    """

    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    strategy: Strategy
    peer: Peer
    initial: str
    on_nonfinite: str
    observer: Observer | None
    make_optimizer: MakeOptimizer | None


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


class TrainingSession(ABC):
    """A model in training on one rank; use it as a context manager.

    Attributes:
        model: what was attached.
        optimizers: all that were attached, as one.
        state: where the session is.
        peer: all ranks.
        rank, size: this rank, and how many there are.
        data_rank, data_size: which share of the samples this rank reads, and of how many; ranks that hold parts of one
            replica of the model read the same share.
        step: how many steps have ended; those without an optimizer step (GradScaler found Inf) count.
        skipped_steps: steps left out because a gradient was NaN or Inf, with `on_nonfinite="skip"`.
        replicas_equal: whether all replicas hold the same bits after every step.
        counters: bytes sent and seconds waited so far.
        epochs: passes over `data`: how many have ended, and the one under way.
        run_id: what no other session has; rank 0's is the one in checkpoints.
        saved: the newest checkpoint that was saved, on rank 0.
    """

    replicas_equal: bool

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], strategy: Strategy, peer: Peer
    ) -> None:
        self.model = model
        self.optimizers = Optimizers(optimizers)
        self.state = SessionState.IDLE
        self.strategy = strategy
        self.peer = peer
        self.rank, self.size = peer.rank, peer.size
        self.data_rank, self.data_size = peer.rank, peer.size
        self.step = 0
        self.skipped_steps = 0
        self.counters = Counters()
        self.epochs = Epochs()
        self.run_id = secrets.token_hex(6)
        self.saved: Path | None = None
        self.control = peer.lane("session")
        self._streamed: StreamedSamples | None = None
        self.save_point: SavePoint | None = None

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer that was attached; the first of several."""
        return self.optimizers.given[0]

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

    # ---- the loop ----------------------------------------------------------------------------------------------

    @abstractmethod
    def train_batch(self, batch: Any, loss: Loss) -> StepResult | None:
        """Train on one batch, as the engine does it: forward, backward and the optimizer's step.

        Args:
            batch: (input, target), as the loader yields them.
            loss: called with the model's output and the target; returns the mean over the batch.

        Returns:
            What the batch gave; None where another rank has the model's output.
        """

    def data(
        self,
        loader: Iterable[Any],
        weight: Callable[[Any], float] | None = None,
        *,
        same_batches: bool = False,
    ) -> SessionData:
        """Iterate over `loader`, as often on every rank as on the one with most batches.

        Args:
            loader: this rank's batches; `hocket.loader` shares the samples out.
            weight: how much a batch counts in means over ranks, relative to 1: `lambda b: len(b[0]) / 32` weighs
                by samples, as `hocket.loader` does by itself. Without either every batch counts the same, as in
                DistributedDataParallel.
            same_batches: whether ranks are meant to read the same batches; else a warning says so, where the first
                ones are equal.

        With an exchange of samples batches travel from rank to rank, and the loader is the same one in every epoch; the
        first call is collective then.

        Raises:
            HocketError: samples travel, and this is another loader than the first.
        """
        self.require("session.data")
        exchange = self.strategy.samples
        if exchange is None:
            return SessionData(self, loader, weight, same_batches)
        if self._streamed is None:
            self._streamed = StreamedSamples(exchange, loader, self.peer, self.data_rank, self.data_size)
        elif loader is not self._streamed.loader:
            raise HocketError(
                "session.data was given another loader than before, and with samples in the strategy the first one's "
                "batches travel from epoch to epoch: make one loader before the loop over epochs"
            )
        return SessionData(self, self._streamed, weight, same_batches)

    @property
    @abstractmethod
    def weight(self) -> float:
        """How much this rank's current batch counts in means; 0 for a repetition, where it is out of data."""

    @abstractmethod
    def begin_batch(self, weight: float) -> None:
        """Take note of a batch; `data` calls it."""

    @abstractmethod
    def end_batch(self) -> None:
        """End a step whose batch was skipped, or whose optimizer did not step; `data` calls it."""

    @abstractmethod
    def end_pass(self) -> None:
        """Take note that the loop over `data` is over; `data` calls it."""

    @abstractmethod
    def delay(self, seconds: float) -> None:
        """Hold this rank up for `seconds`, 0 or more, as if its forward took longer; between a batch and that."""

    # ---- replicas ----------------------------------------------------------------------------------------------

    @abstractmethod
    def settle(self) -> None:
        """Finish everything that is under way, so that parameters hold what they will hold in the next forward."""

    @abstractmethod
    def consensus(self) -> AbstractContextManager[None]:
        """Set the parameters and floating-point buffers of every rank to the replicas' mean; collective.

        Used in a `with` statement, each rank gets its own replica back at the end, to train on:

            with session.consensus():
                evaluate(model)
        """

    @abstractmethod
    def replica(self) -> AbstractContextManager[None]:
        """Let the model hold this rank's replica, whole, in a `with` statement; collective."""

    @abstractmethod
    def consensus_distance(self) -> float:
        """Return the root mean square over ranks of the replicas' Euclidean distance from their mean; collective."""

    def meet(self) -> None:
        """Find out that all ranks have left the last pass over `data` after the same batch; collective.

        Everything that is collective and comes after a loop begins with it: what one rank does there would be mixed up
        with what others still do in their loop.
        """
        strategy = self.strategy
        if strategy.gradients or strategy.parameters or strategy.phases or self.data_size < self.size:
            self.epochs.meet(self.peer)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's `value` (JSON-able), by rank; collective."""
        self.require("session.gather")
        self.meet()
        return gather(self.peer, value)

    # ---- checkpoints -------------------------------------------------------------------------------------------

    def save(self, folder: str | os.PathLike[str], *, keep: int | None = None, **more: Any) -> Path:
        """Save all that training goes on from into a new directory of `folder`; collective, after a step.

        Training goes on as if nothing had been saved, but for an engine's pipeline, which is drained first. A kill at
        any time leaves the checkpoints that were complete.

        Args:
            folder: on a disk that all ranks share; made if it is not there.
            keep: how many complete checkpoints are left in it, the newest, and those that hold other files than
                Hocket's; all where None.
            more: what else has `state_dict` and `load_state_dict`, by name: schedulers, a scaler, an EMA model.

        Returns:
            The checkpoint's directory.

        Raises:
            CheckpointError: on all ranks: something cannot be saved, the folder cannot be written, holds checkpoints
                of later steps or gets another job's, or gradients are being accumulated.
        """
        self.require("session.save", training=True)
        return Checkpoints(self, Path(folder), more).save(keep)

    def save_on_signal(self, folder: str | os.PathLike[str], *, keep: int | None = None, **more: Any) -> None:
        """Save and end all ranks when SIGTERM or SIGUSR1 comes; collective, right after `attach` or `load`.

        Schedulers send one of them before they take a job's machines away. The ranks save after the next step that all
        of them can reach, when the next batch is asked for, and leave by SystemExit with status 143. If that takes
        longer than 25 s the last checkpoint stands. The signal has to reach all ranks: `hocket run` and srun pass both
        on, mpiexec SIGUSR1 alone.

        Args:
            folder, keep, more: as `save` takes them.

        Raises:
            HocketError: it was called before.
        """
        if self.save_point is not None:
            raise HocketError(
                "session.save_on_signal was called before: give it everything that is saved at once"
            )
        self.save_point = SavePoint(self, Path(folder), keep, more)

    def heed_no_signal(self, *, together: bool) -> None:
        """End what `save_on_signal` has begun; collective if `together`; `close` and `abandon` call it."""
        if self.save_point is not None:
            self.save_point.close(together=together)
            self.save_point = None

    def load(self, folder: str | os.PathLike[str], **more: Any) -> Resumed:
        """Continue from the newest complete checkpoint in `folder`; collective, right after `attach`.

        With as many ranks as have saved, each continues where it was, bit for bit where the strategy is
        deterministic: the first pass over `session.data` leaves out the batches that were handed out already.
        Another number of ranks continues from the replicas' mean, and a warning says what is lost.

        Args:
            folder: what `save` was given, or one checkpoint's directory.
            more: the same names as were given to `save`; each object's `load_state_dict` is called.

        Raises:
            CheckpointError: on all ranks: no complete checkpoint, a damaged one, or one of another strategy, model
                or optimizer; names file, key, what was expected and what was found. A model that is refused is
                left as it was.
        """
        self.require("session.load", training=True)
        return Checkpoints(self, Path(folder), more).load()

    @abstractmethod
    def end_step_to_save(self) -> None:
        """End a step whose optimizer did not step (GradScaler found Inf), as the next batch would; `save` calls it."""

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

    # ---- closing -----------------------------------------------------------------------------------------------

    @abstractmethod
    def close(self) -> None:
        """Finish what is under way and take the hooks off; collective. The model stays usable."""

    @abstractmethod
    def abandon(self) -> None:
        """Take the hooks off without the other ranks, which may not be here."""

    def __enter__(self) -> Self:
        self.require("`with session`")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            # The other ranks may not be here: closing together would wait for them.
            self.abandon()
