"""The session as a training script sees it, on every engine."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from torch import Tensor

from hocket.disk import path_of
from hocket.errors import CheckpointError
from hocket.launch import preemption
from hocket.loggers import Log, Logger
from hocket.plain import Batch, Stateful, TreeView
from hocket.plugin import default_registry
from hocket.session.api import Loss, StepResult, left_by
from hocket.session.data.session_data import SessionData
from hocket.session.engine_session import EngineSession
from hocket.session.exchange.active import Counters
from hocket.session.logs import open_logs
from hocket.session.save.export import Export, Format, SavesPretrained, export_model
from hocket.session.save.loading import Loading, Resumed
from hocket.session.save.save_folders import look_at
from hocket.session.save.save_point import SavePoint
from hocket.session.save.saving import check_keep, save
from hocket.session.save.stateful import Packed, load_state_of, state_of
from hocket.session.script_run import ScriptRun

_log = logging.getLogger("hocket")


class Session:
    """A strategy attached to a model on one rank, as `hocket.attach` returns it; use it as a context manager.

    Attributes:
        model, optimizer: the attached model, and its optimizer, the first of several.
        peer: this rank's endpoint among all ranks.
        rank, size: this rank, and the number of ranks.
        local_rank: this rank's number among those of its host, as for `cuda:{local_rank}`.
        is_main: whether this is rank 0, the one that logs and writes.
        data_rank, data_size: this rank's share of the samples, and the number of shares; ranks that hold parts of one
            replica of the model read the same share.
        inner: the engine's session, for engines, hooks and tests; not for scripts.
    """

    def __init__(self, inner: EngineSession, run: ScriptRun | None = None) -> None:
        self.inner = inner
        self.model, self.optimizer, self.peer = inner.model, inner.optimizer, inner.peer
        self.rank, self.size, self.local_rank = inner.rank, inner.size, inner.local_rank
        self.is_main = inner.rank == 0
        self.data_rank, self.data_size = inner.data_rank, inner.data_size
        self._logs: list[Log] = []
        self._run = run
        self._hooks = default_registry().hook
        self._signals_are_free = preemption.are_free()
        inner.step_ended = self._end_step

    def _end_step(self, step: int) -> None:
        self._hooks.hocket_step_end(session=self, step=step)
        if self.inner.beside_training is not None:
            self.inner.beside_training.look(self.step)

    @property
    def out(self) -> Path | None:
        """The folder of this session's results, of `attach(..., out=...)` or `hocket launch --out`; None for none."""
        return None if self._run is None else self._run.folder

    @property
    def step(self) -> int:
        """The number of ended steps; those without an optimizer step (GradScaler found Inf) count."""
        return self.inner.step

    @property
    def skipped_steps(self) -> int:
        """The number of steps that this rank left out for NaN or Inf, with `on_nonfinite="skip"`."""
        return self.inner.skipped_steps

    @property
    def weight(self) -> float:
        """The current batch's weight in means over ranks; 0 for a repetition on a rank out of data."""
        return self.inner.weight

    @property
    def counters(self) -> Counters:
        """The bytes sent and the seconds waited so far."""
        return self.inner.counters

    # ---- the loop ----------------------------------------------------------------------------------------------

    def train_batch(self, batch: Batch, loss: Loss) -> StepResult | None:
        """Train on one batch by the engine: forward, backward and the optimizer's step.

        Args:
            batch: (inputs, target), or a mapping that is both, as the loader yields them. Inputs that are a mapping
                are given to the model by name, those of a tuple or list one after the other.
            loss: called with the model's output and the target; returns the mean over the batch.

        Returns:
            The batch's loss and output; None where another rank has the model's output.
        """
        return self.inner.train_batch(batch, loss)

    def accumulate(self) -> AbstractContextManager[None]:
        """Mark backwards, or batches, that end no step: gradients add up until one outside of it."""
        return self.inner.accumulate()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients that the optimizer will get to `max_norm`; return their norm before.

        Use it instead of torch's function: it stays right where ranks hold the gradients of parts of the model, and
        where all backwards of a step were within `accumulate`, so that nothing was exchanged yet.

        Args:
            max_norm: the largest norm, above 0.
            norm_type: the norm's order.

        Returns:
            A scalar on the gradients' device.

        Raises:
            HocketError: the engine clips by a setting of its own.
        """
        return self.inner.clip_grad_norm_(max_norm, norm_type)

    def data(
        self,
        loader: Iterable[Batch],
        weight: Callable[[Batch], float] | None = None,
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
        self.inner.require("session.data")
        return SessionData(self.inner, loader, weight, same_batches)

    def delay(self, seconds: float) -> None:
        """Delay this rank by `seconds`, 0 or more, as if its forward took longer; call it before the forward."""
        self.inner.delay(seconds)

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
            UserError: no such logger, a library that it needs is not installed, or another's file is in the way.
            WriteError: the folder cannot be written.
        """
        path = path_of(folder, "session.open_log")
        if self.is_main:
            self._logs += open_logs(path, loggers, self.inner.strategy.resolved(), self.step)

    def log(self, values: TreeView) -> None:
        """Write a row of rank 0's values with the number of ended steps; other ranks' values are ignored.

        It goes to the logs of `open_log`, and to the folder of `attach(..., out=...)` or `hocket launch --out`.

        Args:
            values: numbers or texts, by name; a tensor of one element counts as its number. A mean over the ranks is
                `sum(session.gather(loss.item())) / session.size`.
        """
        if self.is_main:
            plain = {n: v.item() if isinstance(v, Tensor) else v for n, v in values.items()}
            for log in self._logs:
                log.write({"step": self.step, **plain})
            if self._run is not None:
                self._run.write(plain)

    def gather(self, value: object) -> list[Any]:
        """Return every rank's `value` (JSON-able), by rank; collective."""
        return self.inner.gather(value)

    # ---- replicas ----------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Finish all exchanges and merge their results into the parameters, as the next forward would; local."""
        self.inner.settle()

    def consensus(self) -> AbstractContextManager[None]:
        """Set the model of every rank to the replicas' mean; collective.

        Parameters, frozen ones too, become their mean, and BatchNorm's running statistics that by samples, as what
        `attach` calls statistics. Other buffers have no mean: all ranks get rank 0's, which a line says once by name;
        those whose shapes differ stay each rank's own. What is equal on all ranks stays as it is, to the bit.

        With an outer optimizer, as in DiLoCo, the model becomes that of the outer parameters φ (of their mean, where
        ranks have their own): what ranks have learnt since the last outer step is not in it.

        Without a `with` statement it changes the replicas for good. In a `with` statement each rank gets its own back
        at the end:

            with session.consensus():
                evaluate(model)
        """
        self.inner.warn_of_age()
        return self.inner.consensus()

    def replica(self) -> AbstractContextManager[None]:
        """Put this rank's whole replica into the model within a `with` statement; collective."""
        return self.inner.replica()

    def consensus_distance(self) -> float:
        """Return the root mean square, over ranks, of the replicas' L2 distance from their mean; collective."""
        return self.inner.consensus_distance()

    # ---- checkpoints -------------------------------------------------------------------------------------------

    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int | None = None,
        blocking: bool = True,
        **more: Stateful,
    ) -> Path:
        """Save the whole state of training into a new directory of `folder`; collective, after a step.

        Training goes on as if nothing had been saved, but for an engine's pipeline, which is drained first. A kill at
        any time leaves the checkpoints that were complete.

        Args:
            folder: made if it is not there. On a disk that ranks do not share each host keeps its ranks' files, which
                a line says at the first save, and `load` fetches what a host lacks.
            keep: number of complete checkpoints to keep, the newest, 1 or more; those with other files than Hocket's
                stay too. All stay where None.
            blocking: whether training waits until all is written. Else the state is copied into host memory, as much
                as this rank's file, which the next such save takes again; a thread writes it, and the checkpoint is
                complete some steps later. The next save, `load` and `close` wait for that.
            more: other objects with `state_dict` and `load_state_dict`, by name: schedulers, a scaler, an EMA model.

        Returns:
            The checkpoint's directory; without `blocking` it is there once the checkpoint is complete.

        Raises:
            CheckpointError: on all ranks: some state cannot be saved; the folder cannot be written, holds checkpoints
                of later steps, or another job writes into it; or gradients are being accumulated. What a thread
                cannot write is raised on all ranks after a later step, or by the next save, `load` or `close`.
        """
        self.inner.require("session.save", training=True)
        check_keep("session.save", keep)
        return save(self.inner, path_of(folder, "session.save"), more, keep=keep, blocking=blocking)

    def save_on_signal(
        self,
        folder: str | os.PathLike[str] | Callable[[], Path | str],
        *,
        keep: int | None = None,
        unless_handled: bool = False,
        **more: Stateful,
    ) -> Callable[[], None]:
        """Save and end all ranks on SIGTERM or SIGUSR1; collective, call it right after `attach` or `load`.

        Schedulers send one of them before they take a job's machines away. The ranks save after the next step that all
        of them can reach, when the next batch is asked for, and leave by SystemExit with status 143. If that takes
        longer than 25 s the last checkpoint stands. A signal to one rank alone reaches the others too; over `mpi` on
        several hosts only if all hosts reach rank 0's. mpiexec passes SIGUSR1 on, and ends ranks by SIGTERM at once.

        Args:
            folder, keep, more: as for `save`; or a function that all ranks call to save, which returns where: its
                folder is not checked before training.
            unless_handled: whether to do nothing if the script handled a signal before `attach`; for frameworks.

        Returns:
            A function that saves and ends if all ranks have reached that step, for loops without `session.data` to call
            after each step; before each forward the model calls it itself.

        Raises:
            HocketError: it was called before, for this session or another of this process that is open.
            CheckpointError: on all ranks: the folder cannot be written, or another job saves there; before the first
                step also where it holds checkpoints of later steps.
        """
        if unless_handled and not self._signals_are_free:
            return lambda: None
        check_keep("session.save_on_signal", keep)
        if callable(folder):
            save_all: Callable[[], Path | str] = folder
        else:
            path = path_of(folder, "session.save_on_signal")
            self.inner.finish_save("session.save_on_signal")  # which holds the folder
            look_at(self.inner, path)
            save_all = partial(self.save, path, keep=keep, blocking=True, **more)
        self.inner.save_point = SavePoint(self.inner, partial(self._save_at_last, save_all))
        return self.inner.save_point.reach

    def _save_at_last(self, save_all: Callable[[], Path | str]) -> Path | str:
        """Save before the process ends, also where a save beside training has failed; collective."""
        try:
            self.inner.finish_save("session.save")
        except CheckpointError as error:
            if self.is_main:
                _log.warning("%s", error)
        return save_all()

    def export(
        self,
        folder: str | os.PathLike[str],
        format: Format = "safetensors",
        *,
        replica: bool = False,
        max_shard_bytes: int | None = None,
        also: Sequence[SavesPretrained] = (),
    ) -> Path:
        """Write the whole model for other programs: the replicas' mean, as `consensus` gives it; collective.

        The folder appears complete under its name, and replaces an earlier export; a kill leaves it as it was.

        Args:
            folder: the export's own; made by rank 0, or for a sharded model as `dcp` on a disk that all ranks share.
            format: `safetensors`; `dcp`, that of torch.distributed.checkpoint, with the model under `model`; or `hf`,
                what the model's `save_pretrained` writes.
            replica: whether to write each rank's own replica, into `folder/replica-0000` and so on, and return its own.
            max_shard_bytes: the size of files into which larger models are cut; None for 5 GB, or what `hf` takes.
            also: tokenizers, processors and the like: their `save_pretrained` writes into the same folder.

        Raises:
            CheckpointError: on all ranks: the folder holds something else or cannot be written, or the model cannot be.
        """
        path = path_of(folder, "session.export")
        return export_model(self.inner, Export(path, format, replica, max_shard_bytes, also))

    def load(
        self,
        folder: str | os.PathLike[str],
        *,
        missing: Literal["error", "start"] = "error",
        **more: Stateful,
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
                left as it was. With `start` also a folder that cannot be written.
        """
        path = path_of(folder, "session.load")
        self.inner.require("session.load", training=True)
        self.inner.finish_save("session.load")
        resumed = Loading(self.inner, path, more).load(missing)
        if missing == "start" and resumed.path != path:  # the folder of later saves
            look_at(self.inner, path)
        if self._run is not None and resumed.step:
            self._run.resume_after(resumed.step)
        return resumed

    def state_dict(self) -> dict[str, Packed]:
        """Return this rank's state beside model and optimizer, for the script's own checkpoints; local, after a step.

        With `load_state_dict` it makes a session one of torch's `Stateful`s, so that torch.distributed.checkpoint saves
        and loads it beside the model::

            own = session.state_dict()
            with session.consensus():
                dcp.save({"model": get_model_state_dict(model), "session": own}, checkpoint_id=folder)

        Outer parameters that all ranks share are under `all`, with steps and rounds. Under `rank0003` is what rank 3
        keeps: residuals, push-sum weights, exchanges under way, random states, the place in the loader, and its replica
        and optimizer where replicas differ. Values are copies in host memory.
        """
        return state_of(self.inner)

    def load_state_dict(self, state: Mapping[str, Packed]) -> None:
        """Continue from `state_dict`; collective, right after `attach`, with the model loaded.

        With as many ranks as have saved, each continues where it was. Another number of ranks takes what is under
        `all`, and a warning names what is dropped.

        Args:
            state: what `state_dict` has returned on this rank; on another number of ranks `all` suffices.

        Raises:
            CheckpointError: on all ranks: it is of another strategy, model or optimizer, or no such state.
        """
        self.inner.require("session.load_state_dict", training=True)
        self.inner.finish_save("session.load_state_dict")
        load_state_of(self.inner, state)
        if self._run is not None and self.step:
            self._run.resume_after(self.step)

    # ---- closing -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Finish all exchanges and a save under way, and remove the hooks; collective. The model stays usable.

        Raises:
            CheckpointError: on all ranks: the save under way has failed. The session is closed all the same.
        """
        self.inner.warn_unreached(self.step)
        error = None
        if self.inner.closes_together:
            try:
                self.inner.finish_save("the session's end")
            except CheckpointError as failed:
                error = failed
        run, self._run = self._run, None
        if run is not None:
            run.end() if self.inner.closes_together else run.close()
        self.inner.close()
        if error is not None:
            raise error

    def __enter__(self) -> Self:
        self.inner.require("`with session`")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for log in self._logs:
            log.close()
        if kind is None:
            self.close()
        else:
            # The other ranks may not be here: closing together would wait for them.
            if self._run is not None:
                self._run.close()
            self.inner.abandon()
            if isinstance(error, Exception):  # what ends the process is told otherwise
                self.peer.announce_leaving(left_by(error, self.step))
