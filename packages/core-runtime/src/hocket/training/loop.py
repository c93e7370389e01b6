"""The training loop of a run, on this rank."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Sized
from dataclasses import InitVar, asdict, dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hocket.checkpoint.collectively import on_rank_0
from hocket.checkpoint.model_files import open_model
from hocket.config.optimizer import build_optimizer, build_optimizers
from hocket.config.settings import OnNonfinite
from hocket.disk import naming
from hocket.errors import NonFiniteError
from hocket.plain import Batch, Tree, TreeView
from hocket.results import CHECKPOINTS, MODEL, TRACE_FILE, TRAIN_LOSS, VALID
from hocket.results.files import Results, remove_checkpoints
from hocket.session.api import Loss
from hocket.session.attach import attach
from hocket.session.data.batch import num_samples, parts_of
from hocket.session.engine import ReplicaEngine
from hocket.session.ranks import broadcast_model
from hocket.session.save.export import write_whole
from hocket.session.save.model_state import load_model, model_state
from hocket.session.save.save_folders import take_over
from hocket.session.session import Session
from hocket.task import Task, TaskData
from hocket.task.loading import loader
from hocket.trace import Trace
from hocket.training.computing import Computing
from hocket.training.devices import device_of, in_precision, moved
from hocket.training.evaluation import evaluate, evaluate_together
from hocket.training.islands import leave_islands, shard
from hocket.training.meters import Value
from hocket.training.observer import Display, observer_for
from hocket.training.rows import SinceRow, since_row_of_ranks
from hocket.training.run import RunConfig, build_engine, build_task
from hocket.training.schedules import Schedules
from hocket.training.split import split
from hocket.training.summary import summary_of
from hocket.training.tensor_parallel import step_each_by_itself
from hocket.training.training_time import TrainingTime
from hocket.transport.gathering import gather
from hocket.transport.peer import Peer


def steps_per_epoch(run: RunConfig, samples: int, shares: int) -> int:
    """Return the number of steps in which `shares` ranks or pipelines read each of `samples` samples once."""
    return -(-samples // (run.batch_size * run.accumulate * shares))


def train(
    run: RunConfig,
    peer: Peer,
    out: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    display: Display = Display.LINES,
) -> dict[str, object]:
    """Train, and return the content of `summary.json`; collective.

    Args:
        run: the run's file.
        peer: this rank's endpoint, with as many ranks as the file says.
        out: an existing folder, in which rank 0 writes `metrics.jsonl`, the consensus as `model.safetensors`, and
            `trace.json.gz` if it is asked for, and all ranks their checkpoints.
        resume: continue from the newest checkpoint in `out`.
        overwrite: replace an earlier run's checkpoints on hosts that do not share rank 0's disk, too.
        display: how rank 0 shows the run's progress.

    Raises:
        CheckpointError: `out` has no checkpoint to continue from, or one of another run; or checkpoints cannot be saved
            there.
    """
    task = build_task(run)
    data = task.data(run.seed)
    # Every rank builds the same model; draws in training (dropout) differ from rank to rank.
    torch.manual_seed(run.seed)
    device = device_of(run, peer)
    model = task.model().to(device)
    if run.start_from is not None and not resume:
        _begin_from(Path(run.start_from), model, peer)
    loss = in_precision(run, model, task.loss, device)
    # A mistake in the task's metrics is found here, before hours of training.
    evaluates_one = partial(evaluate, model, task, loss, data.valid, [0], device)
    with torch.random.fork_rng():
        evaluates_one()
        if run.island.ranks > 1:
            shard(model, run, task, device, evaluates_one)
    # Ranks that share out one computation by tensor parallelism draw alike in it.
    torch.manual_seed(run.seed + 1 + peer.rank // run.island.tensor)
    optimizers = build_optimizers(run.optimizer, model)
    if run.island.tensor > 1:
        step_each_by_itself(optimizers)
    peer.timeout_s = run.timeout_s
    host_names = gather(peer, peer.memory.host_name, what="the names of the ranks' hosts")
    results = Results(out, host_names, run.loggers) if peer.rank == 0 else None
    observer = Trace(out / TRACE_FILE, run.trace_window) if run.trace else None
    engine = build_engine(run)
    by_layer = device.type == "cpu" and isinstance(engine, ReplicaEngine) and run.island.ranks == 1
    computing = Computing(model, run.strategy, peer.clock, by_layer=by_layer)
    with (
        contextlib.closing(results) if results else contextlib.nullcontext(),
        attach(
            model,
            optimizers,
            run.strategy,
            on_nonfinite=run.on_nonfinite.value,
            lanes=run.lanes.value,
            peer=peer,
            observer=observer,
            engine=engine,
            make_optimizer=lambda groups: build_optimizer(run.optimizer, groups),
        ) as session,
    ):
        summary = _Run(
            run, task, data, loss, computing, device, session, results, out, resume, overwrite, display
        ).train()
        with session.inner.consensus(), naming(out / MODEL):
            write_whole(out, model_state(model), None, is_main=peer.rank == 0)
    leave_islands(run)
    return summary


def refuse_nothing_learned(summary: TreeView, peer: Peer) -> None:
    """Refuse a run whose every step was skipped, once rank 0 has written its results; collective.

    Raises:
        NonFiniteError: every step was skipped.
    """
    steps = summary["steps"]
    if steps and min(summary["skipped_steps_ranks"]) == steps:
        gather(peer, None, what="the run's files, which rank 0 writes")
        raise NonFiniteError(
            f"all {steps} steps were skipped, because the gradients held NaN or Inf (on_nonfinite=skip): the model "
            "was not trained. Lower optimizer.lr, clip gradients (clip_grad_norm=1.0), or look for NaN in the data"
        )


def _begin_from(path: Path, model: nn.Module, peer: Peer) -> None:
    """Set the model of all ranks to one on rank 0's disk; collective.

    Raises:
        CheckpointError: on all ranks: it cannot be read, or is another model's.
    """

    def load() -> None:
        with open_model(path) as tensors:
            load_model(model, tensors, str(path))

    on_rank_0(peer, load)
    lane = peer.lane("from")
    broadcast_model(model, lane)
    lane.close()


@dataclass(eq=False)
class _Run:
    _run: RunConfig
    _task: Task
    _data: TaskData
    _loss: Loss
    _computing: Computing
    _device: torch.device
    _session: Session
    _results: Results | None
    _out: Path
    resume: InitVar[bool]
    overwrite: InitVar[bool]
    _display: Display

    def __post_init__(self, resume: bool, overwrite: bool) -> None:
        run, session, display = self._run, self._session, self._display
        self._checkpoints = self._out / CHECKPOINTS
        self._schedules = Schedules(run.schedulers, session.inner.optimizers.given)
        self._clip()
        self._per_step = run.batch_size * run.accumulate
        self._per_epoch = steps_per_epoch(run, len(cast(Sized, self._data.train)), session.data_size)
        self._done_in_epoch = 0
        self._since_row = SinceRow()
        self._time = TrainingTime(session)
        self._last_row: Tree = {}
        if resume:
            self._resume()
        epochs = run.epochs - session.inner.epochs.ended
        steps = session.step - self._done_in_epoch + self._per_epoch * epochs
        self._steps = min(run.steps or steps, steps)
        session.inner.warn_unreached(self._steps)
        if resume and session.step >= self._steps and display is not Display.QUIET:
            session.print(
                "the run has already ended, so only its results are written again; to extend it, set "
                "epochs=N or steps=N"
            )
        session.save_on_signal(self._checkpoints, keep=run.checkpoint.keep, run=self)
        # Rank 0's host was checked by the command, and its results replace an earlier run's checkpoints.
        self._replaces = not resume and take_over(session.inner, overwrite=overwrite)
        self._observer = observer_for(display, session.step, self._steps) if session.is_main else None

    def train(self) -> dict[str, object]:
        every = self._run.checkpoint.every
        try:
            for epoch, last_of_epoch in self._batches():
                self._begin_results()
                step = self._session.step
                if self._observer:
                    self._observer.step(step)
                eval_every = self._run.eval_every
                validate = last_of_epoch or (eval_every is not None and step % eval_every == 0)
                if validate:
                    self._session.inner.receive()  # waiting for what training has sent counts as training time
                if step % self._run.log_every == 0 or validate:
                    self._time.pause()
                    self._write_row(epoch, validate)
                if every is not None and (step % every == 0 or step == self._steps):
                    self._time.pause()
                    self._save()
                if not last_of_epoch:  # else ranks meet before the next batch, too
                    self._time.go_on()
            self._begin_results()  # where nothing was left to do
            return summary_of(self._run, self._session, self._time, self._last_row, self._evaluate_replica)
        finally:
            if self._observer:
                self._observer.close()

    def _save(self) -> None:
        own = self._run.checkpoint
        self._session.save(self._checkpoints, keep=own.keep, blocking=own.blocking, run=self)

    def _begin_results(self) -> None:
        if self._results:
            self._results.begin()
        elif self._replaces:
            with naming(self._checkpoints):
                remove_checkpoints(self._out)
        self._replaces = False

    def _batches(self) -> Iterator[tuple[int, bool]]:
        """Train batch after batch; yield after each the epoch, from 1, and whether the epoch or run has ended."""
        session, per_step = self._session, self._per_step
        batches = loader(self._data.train, per_step, seed=self._run.seed, num_workers=self._run.num_workers)
        for epoch in range(session.inner.epochs.ended, self._run.epochs):
            if session.step >= self._steps:
                return
            for batch in session.data(batches, weight=lambda batch: num_samples(batch) / per_step):
                self._time.go_on()
                self._hold_up()
                self._train_step(batch)
                self._schedules.after_step()
                self._done_in_epoch += 1
                ends_run = session.step >= self._steps
                yield epoch + 1, ends_run or self._done_in_epoch == self._per_epoch
                if ends_run:
                    return
            self._done_in_epoch = 0

    def _train_step(self, batch: Batch) -> None:
        """Take a step with a rank's samples, in batches whose gradients add up to the samples' mean."""
        if self._run.accumulate == 1:
            self._train_batch(batch, self._loss)
            return
        session = self._session
        parts = split(batch, self._run.batch_size)
        for place, part in enumerate(parts, start=1):
            share = num_samples(part) / num_samples(batch)
            with session.accumulate() if place < len(parts) else contextlib.nullcontext():
                self._train_batch(part, partial(_share_of, self._loss, share), share)

    def _train_batch(self, batch: Batch, loss: Loss, share: float = 1.0) -> None:
        session = self._session
        self._computing.begin(share * self._run.compute.seconds(_num_elements(batch)))
        result = session.train_batch(moved(batch, self._device), loss)
        self._computing.end()
        if result is not None and session.weight:
            self._since_row.add(float(result.loss) / share, num_samples(batch))

    def _clip(self) -> None:
        """Clip the gradients that the optimizers get, after the session has exchanged them."""
        session, norm = self._session, self._run.clip_grad_norm
        if norm is not None:
            session.optimizer.register_step_pre_hook(partial(_clip_before, session, norm))

    def _hold_up(self) -> None:
        """Delay this rank by the seconds of the run's delays."""
        session, delays = self._session, self._run.delays
        if delays is not None:
            own = float(delays.of_step(session.step, session.size, self._run.seed)[session.rank])
            if own:
                session.delay(own)

    def _resume(self) -> None:
        resumed = self._session.load(self._checkpoints, run=self)
        if not resumed.exact:
            # Other ranks read other samples: the epoch begins again.
            self._done_in_epoch = 0
            self._begin_row()
        if self._session.rank == 0:
            assert self._results is not None
            assert resumed.path is not None
            self._results.resume_after(resumed.step)
            if self._display is not Display.QUIET:
                print(f"resumed after step {resumed.step} from {os.path.relpath(resumed.path)}", flush=True)

    def state_dict(self) -> dict[str, object]:
        return {
            "done_in_epoch": self._done_in_epoch,
            "since_row": asdict(self._since_row),
            "schedules": self._schedules.state_dict(),
            "time": self._time.state_dict(),
            "last_row": self._last_row,
        }

    def load_state_dict(self, state: Tree) -> None:
        self._done_in_epoch = state["done_in_epoch"]
        self._since_row = SinceRow(**state["since_row"])
        self._schedules.load_state_dict(state["schedules"])
        self._time.load_state_dict(state["time"])
        self._last_row = state["last_row"]

    def _begin_row(self) -> None:
        self._since_row = SinceRow(seconds=self._time.seconds, waited_s=self._time.waited_s)

    def _write_row(self, epoch: int, validate: bool) -> None:
        session = self._session
        of_ranks = since_row_of_ranks(session, self._time, self._since_row)
        row: dict[str, object] = {"epoch": epoch, "step": session.step, **of_ranks}
        self._begin_row()
        if validate:
            row |= self._validate()
            row["consensus_distance"] = session.consensus_distance()
        self._last_row = row
        self._warn_of_divergence(row)
        self._schedules.after_row(row)
        if self._results:
            self._results.write(row)
        if self._observer:
            self._observer.row(row)

    def _warn_of_divergence(self, row: TreeView) -> None:
        """Warn once if the training loss is NaN or infinite: without an exchange nothing else checks it."""
        diverges = not math.isfinite(row[TRAIN_LOSS]) and self._run.on_nonfinite is OnNonfinite.ERROR
        if diverges and self._session.is_main:
            self._session.inner.warn_once(
                "the training loss is %s, seen at step %d: lower optimizer.lr, or clip gradients (clip_grad_norm=1.0)",
                row[TRAIN_LOSS],
                row["step"],
            )

    def _validate(self) -> dict[str, Value]:
        with self._session.inner.consensus():
            found = evaluate_together(self._session, self._task, self._loss, self._data.valid, self._device)
        return {f"{VALID}{name}": value for name, value in found.items()}

    def _evaluate_replica(self) -> dict[str, Value]:
        """Return this replica's own loss and metrics on all held-out samples."""
        session, valid = self._session, self._data.valid
        indices = range(len(cast(Sized, valid)))
        with session.replica():
            found = evaluate(session.model, self._task, self._loss, valid, indices, self._device)
        return {f"{VALID}{name}": value for name, value in found.values().items()}


def _num_elements(batch: Batch) -> int:
    """Return the number of elements of a batch's inputs, padding included."""
    return sum(each.numel() for each in tree_leaves(parts_of(batch)[0]) if isinstance(each, torch.Tensor))


def _share_of(loss: Loss, share: float, output: Batch, target: Batch) -> torch.Tensor:
    """Return a batch's part of a step's loss."""
    return loss(output, target) * share


def _clip_before(session: Session, norm: float, *step: object) -> None:
    """Clip, as a hook of an optimizer's step."""
    session.clip_grad_norm_(norm)
