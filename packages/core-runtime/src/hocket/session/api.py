"""The session as a training script sees it, whatever the engine does with a batch."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from torch import Tensor, nn
from torch.optim import Optimizer

from hocket.checkpoint.shared import require_shared
from hocket.disk import naming
from hocket.errors import HocketError
from hocket.loggers import Logger
from hocket.own_files import claim
from hocket.plugin import Kind, default_registry
from hocket.session.checkpoint import Checkpoints, Resumed
from hocket.session.core import SessionCore
from hocket.session.data import SessionData
from hocket.session.save_point import SavePoint
from hocket.session.streams import StreamedSamples
from hocket.strategy.strategy import Strategy
from hocket.trace import Observer
from hocket.transport.peer import Peer

__all__ = [
    "Attachment",
    "Batch",
    "Loss",
    "MakeOptimizer",
    "StepResult",
    "TrainStep",
    "TrainingSession",
    "left_by",
]


#: From the model's output and the batch's target to a scalar, the mean over the batch.
Loss = Callable[[Any, Any], Tensor]

#: (inputs, target), as a loader yields them, or a mapping that is both. A model is called with a mapping's values by
#: name, with those of a tuple or list one after the other, with anything else as it is.
Batch = Any

#: From parameter groups, as torch's optimizers take them, to an optimizer over them.
MakeOptimizer = Callable[[list[dict[str, Any]]], Optimizer]


@dataclass(frozen=True)
class StepResult:
    """The result of one batch.

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
    """The checked arguments of `hocket.attach`, the same on all ranks.

    Attributes:
        model, optimizers, strategy: as given; the model with this rank's own values.
        peer: all ranks.
        initial: `rank0` or `keep`.
        on_nonfinite: `error` or `skip`.
        on_difference: `average` or `error`.
        lanes: `host`, `nccl` or `gloo`.
        observer: is notified of exchanges, waits and phases; None for no observer.
        make_optimizer: makes another optimizer like the given one from parameter groups, for engines that keep several
            copies of the weights; None where the engine is to copy the given one.
        statistics: names of buffers that are averaged like BatchNorm's, with `*` for any text.
    """

    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    strategy: Strategy
    peer: Peer
    initial: str
    on_nonfinite: str
    on_difference: str
    lanes: str
    observer: Observer | None
    make_optimizer: MakeOptimizer | None
    statistics: tuple[str, ...] = ()


class TrainingSession(SessionCore):
    """A model in training on one rank, as every engine offers it; use it as a context manager."""

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], strategy: Strategy, peer: Peer
    ) -> None:
        super().__init__(model, optimizers, strategy, peer)
        self._streamed: StreamedSamples | None = None
        self._save_point: SavePoint | None = None
        #: Whether `peer` is of this session alone.
        self.owns_peer = False

    # ---- the loop ----------------------------------------------------------------------------------------------

    @abstractmethod
    def train_batch(self, batch: Any, loss: Loss) -> StepResult | None:
        """Train on one batch by the engine: forward, backward and the optimizer's step.

        Args:
            batch: (inputs, target), or a mapping that is both, as the loader yields them. Inputs that are a mapping
                are given to the model by name, those of a tuple or list one after the other.
            loss: called with the model's output and the target; returns the mean over the batch.

        Returns:
            The batch's loss and output; None where another rank has the model's output.
        """

    @abstractmethod
    def accumulate(self) -> AbstractContextManager[None]:
        """Mark batches that end without a step: their gradients add up until a batch outside of it."""

    def data(
        self,
        loader: Iterable[Any],
        weight: Callable[[Any], float] | None = None,
        *,
        same_batches: bool = False,
    ) -> SessionData:
        """Iterate over `loader`, with as many batches on every rank as on the one with most.

        A batch that is left out (`continue`) is a step of its own, with what other ranks have, unless batches add up
        (`accumulate`). Where all ranks leave it out nothing is applied, and it counts as a step all the same.

        Args:
            loader: this rank's batches; `hocket.loader` shares the samples out.
            weight: how much a batch counts in means over ranks, relative to 1: `lambda b: len(b[0]) / 32` weighs
                by samples, as `hocket.loader` does by itself. Without either every batch counts the same, as in
                DistributedDataParallel.
            same_batches: whether ranks are meant to read the same batches; else a warning says so, where the first
                ones are equal.

        With an exchange of samples batches travel from rank to rank. A training pass over another loader than the last
        one's goes on with that one's batches; what has not been trained on yet of the last one's is dropped.
        """
        self.require("session.data")
        exchange = self.strategy.samples
        if exchange is not None and self._streamed is None:
            self._streamed = StreamedSamples(exchange, self.peer, self.data_rank, self.data_size)
        return SessionData(self, loader, weight, same_batches, self._streamed)

    @abstractmethod
    def delay(self, seconds: float) -> None:
        """Delay this rank by `seconds`, 0 or more, as if its forward took longer; call it before the forward."""

    def print(self, *values: object, **how: Any) -> None:
        """Print on rank 0 alone, at once.

        Args:
            values, how: as of the built-in `print`; it flushes unless `flush=False`.
        """
        if self.is_main:
            print(*values, **{"flush": True, **how})

    def open_log(self, folder: str | os.PathLike[str], *loggers: Logger | str) -> None:
        """Have `log` write to a folder on rank 0; after `load`, where a run goes on.

        Rows of steps after the present one, which an interrupted run has written, are removed; before the first step
        all are.

        Args:
            folder: the directory to write to; made where it is missing.
            loggers: components, or names: `jsonl`, `csv`, `tensorboard`, `wandb`, a plugin's; `jsonl` where none is
                given.

        Raises:
            UserError: no such logger, a library that it needs is not installed, or a file that Hocket did not write is
                in the way.
            WriteError: the folder cannot be written.
        """
        if not self.is_main:
            return
        chosen = [
            default_registry().resolve(Kind.LOGGER, each)() if isinstance(each, str) else each
            for each in loggers or ("jsonl",)
        ]
        for logger in chosen:
            logger.check()
        place = Path(folder)
        config = self.strategy.resolved()
        with naming(place):
            place.mkdir(parents=True, exist_ok=True)
            claim(place, *(name for logger in chosen for name in logger.files))
        self.logs += [logger.open(place, config, self.step or None) for logger in chosen]

    def log(self, values: Mapping[str, Any]) -> None:
        """Write a row of rank 0's values with the number of ended steps; other ranks' values are ignored.

        Args:
            values: numbers or texts, by name; a tensor of one element counts as its number. A mean over the ranks is
                `sum(session.gather(loss.item())) / session.size`.
        """
        if self.is_main:
            plain = {n: v.item() if isinstance(v, Tensor) else v for n, v in values.items()}
            for log in self.logs:
                log.write({"step": self.step, **plain})

    # ---- replicas ----------------------------------------------------------------------------------------------

    @abstractmethod
    def settle(self) -> None:
        """Finish all exchanges and merge their results into the parameters, as the next forward would; local."""

    def receive(self) -> None:
        """Wait for all exchanges under way, without merging them before they are due."""
        self.settle()

    @abstractmethod
    def consensus(self) -> AbstractContextManager[None]:
        """Set the model of every rank to the replicas' mean; collective.

        Parameters, frozen ones too, become their mean, and BatchNorm's running statistics that by samples, as what
        `attach` calls statistics. Other buffers have no mean: all ranks get rank 0's, which a line says once by name;
        those whose shapes differ stay each rank's own. What is equal on all ranks stays as it is, to the bit.

        Without a `with` statement it changes the replicas for good. In a `with` statement each rank gets its own back
        at the end:

            with session.consensus():
                evaluate(model)
        """

    @abstractmethod
    def replica(self) -> AbstractContextManager[None]:
        """Put this rank's whole replica into the model within a `with` statement; collective."""

    @abstractmethod
    def consensus_distance(self) -> float:
        """Return the root mean square, over ranks, of the replicas' L2 distance from their mean; collective."""

    # ---- checkpoints -------------------------------------------------------------------------------------------

    def save(self, folder: str | os.PathLike[str], *, keep: int | None = None, **more: Any) -> Path:
        """Save the whole state of training into a new directory of `folder`; collective, after a step.

        Training goes on as if nothing had been saved, but for an engine's pipeline, which is drained first. A kill at
        any time leaves the checkpoints that were complete.

        Args:
            folder: on a disk that all ranks share; made if it is not there.
            keep: number of complete checkpoints to keep, the newest; those with other files than Hocket's stay too. All
                stay where None.
            more: other objects with `state_dict` and `load_state_dict`, by name: schedulers, a scaler, an EMA model.

        Returns:
            The checkpoint's directory.

        Raises:
            CheckpointError: on all ranks: some state cannot be saved; the folder cannot be written, holds checkpoints
                of later steps, or another job writes into it; or gradients are being accumulated.
        """
        self.require("session.save", training=True)
        return Checkpoints(self, Path(folder), more).save(keep)

    def save_on_signal(self, folder: str | os.PathLike[str], *, keep: int | None = None, **more: Any) -> None:
        """Save and end all ranks on SIGTERM or SIGUSR1; collective, call it right after `attach` or `load`.

        Schedulers send one of them before they take a job's machines away. The ranks save after the next step that all
        of them can reach, when the next batch is asked for, and leave by SystemExit with status 143. If that takes
        longer than 25 s the last checkpoint stands. A signal to one rank alone reaches the others too; over `mpi` on
        several hosts only if all hosts reach rank 0's. mpiexec passes SIGUSR1 on, and ends ranks by SIGTERM at once.

        Args:
            folder, keep, more: as for `save`.

        Raises:
            HocketError: it was called before.
            CheckpointError: on all ranks: some do not see what rank 0 writes into the folder, or it cannot be written.
        """
        if self._save_point is not None:
            raise HocketError(
                "session.save_on_signal was called before: give it everything that is saved at once"
            )
        require_shared(self.peer, Path(folder))
        self._save_point = SavePoint(self, lambda: self.save(folder, keep=keep, **more))

    def reach_save_point(self) -> None:
        if self._save_point is not None:
            self._save_point.reach()

    def stop_saving_on_signal(self, *, together: bool) -> None:
        """Stop saving on signals; collective if `together`. `close` and `abandon` call it."""
        if self._save_point is not None:
            self._save_point.close(together=together)
            self._save_point = None

    def load(
        self, folder: str | os.PathLike[str], *, missing: Literal["error", "start"] = "error", **more: Any
    ) -> Resumed:
        """Continue from the newest complete checkpoint in `folder`; collective, right after `attach`.

        With as many ranks as have saved, each continues where it was, bit for bit where the strategy is
        deterministic: the first pass over `session.data` leaves out the batches that were handed out already.
        Another number of ranks continues from the replicas' mean, and a warning says what is lost.

        Args:
            folder: the folder of `save`, or one checkpoint's directory.
            missing: the reaction to a folder without a complete checkpoint, or to no folder. With `start` training
                begins at step 0, so that one script both begins and continues.
            more: the same names as for `save`; each object's `load_state_dict` is called.

        Raises:
            CheckpointError: on all ranks: no complete checkpoint, a damaged one, or one of another strategy, model
                or optimizer; names file, key, what was expected and what was found. A model that is refused is
                left as it was.
        """
        self.require("session.load", training=True)
        return Checkpoints(self, Path(folder), more).load(missing)

    # ---- closing -----------------------------------------------------------------------------------------------

    @abstractmethod
    def close(self) -> None:
        """Finish all exchanges and remove the hooks; collective. The model stays usable."""

    @abstractmethod
    def abandon(self) -> None:
        """Remove the hooks without the other ranks, which may have failed."""

    def give_back(self) -> None:
        """Close the session's own endpoint, if it has one; collective; `close` ends with it."""
        if self.owns_peer:
            self.peer.close()

    def __enter__(self) -> Self:
        self.require("`with session`")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for log in self.logs:
            log.close()
        if kind is None:
            self.warn_unreached(self.step)
            self.close()
        else:
            # The other ranks may not be here: closing together would wait for them.
            self.abandon()
            if isinstance(error, Exception):  # the end of a process is reported elsewhere
                self.peer.tell_left(left_by(error, self.step))


def left_by(error: BaseException, step: int) -> str:
    """Return the end of a sentence on how a rank has left a session."""
    first = next(iter(str(error).splitlines()), "")
    return f"has left the session after step {step}, by {type(error).__name__}: {first}"
