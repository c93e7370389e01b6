"""A user's script: what one rank does to perform a program's moves with a session."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hocket
from hocket.errors import NonFiniteError
from hocket.session.save.save_point import SIGNALS
from machine.batches import own_batches, weight_of
from machine.moves import (
    Attach,
    Close,
    Consensus,
    Crash,
    Epoch,
    Freeze,
    Hook,
    LoadAlone,
    Move,
    Poison,
    Rebind,
    Refuse,
    Save,
    Settle,
    Signal,
    Start,
    Step,
    Swap,
    Unfreeze,
    Way,
)
from machine.records import Records, state_of
from machine.refusals import REFUSALS
from machine.replicas import Replica
from machine.strategies import STRATEGIES
from machine.toy import Around, Batch, Sam, ascend, batch_of, hook_on, loss_of, mask_of, within


@dataclass(frozen=True)
class Saved:
    """The newest checkpoint.

    Attributes:
        begun: the number of the move that attached the first session of its run.
        epoch: within which it was saved, if any.
    """

    begun: int
    epoch: Epoch | None


class MishapError(Exception):
    """A fault in a user's loop."""


class Script:
    """Performs a job's moves on one virtual rank.

    Args:
        start: the job's first move.
        folder: of the folders of checkpoints.
        records: what this rank sees.
        saved: the checkpoint that may be loaded.
    """

    def __init__(self, start: Start, folder: Path, records: Records, saved: Saved | None) -> None:
        self.rank = hocket.join().rank
        self.size = start.ranks
        self.records = records
        self.optimizer = start.optimizer
        self.folder = self._folders = folder
        self._saved = saved
        self._continues: Epoch | None = None
        self._wraps = start.wraps
        self._session: Any = None
        self._renew(self.rank)

    def _renew(self, seed: int) -> None:
        self.replica = Replica.new(seed, self.optimizer)
        model = self.replica.model
        around = Around(model) if self._wraps else model
        self.called = around if "called" in self._wraps else model
        self._whole = around if "attached" in self._wraps else model

    @property
    def session(self) -> Any:
        return self._session

    def perform(self, number: int, move: Move) -> None:
        self.records.move = number
        try:
            getattr(self, f"_{type(move).__name__.lower()}")(move)
        except BaseException as error:
            self._leave(error)
            raise

    def _leave(self, error: BaseException | None) -> None:
        """Leave the session's `with` statement."""
        session, self._session = self._session, None
        if session is not None:
            session.__exit__(error and type(error), error, None)

    # --- sessions

    def _attach(self, move: Attach) -> None:
        self._session = self.attach(move)
        self._session.__enter__()
        self._continues = None
        self.folder = self._folders / str(self.records.move)
        if move.loads:
            assert self._saved is not None
            self.folder = self._folders / str(self._saved.begun)
            resumed = self._session.load(self.folder, scaler=self.replica.scaler)
            self._continues = self._saved.epoch if resumed.exact else None
        self._look()

    def attach(self, move: Attach) -> Any:
        optimizers: Any = list(map(within, self.replica.optimizers))
        return hocket.attach(
            self._whole,
            optimizers[0] if len(optimizers) == 1 else optimizers,
            STRATEGIES[move.strategy].config,
            initial="keep" if move.keeps else "rank0",
            on_nonfinite="skip" if move.skips else "error",
        )

    def _close(self, move: Close) -> None:
        session = self._session
        self._leave(None)
        self._look(session)

    def _settle(self, move: Settle) -> None:
        self._session.settle()
        self._look()

    def _look(self, session: Any = None) -> None:
        session = session or self._session
        self.records.tell("state", state_of(self.replica.model, self.replica.every_optimizer))
        self.records.tell("steps", [session.step, session.skipped_steps])

    def _consensus(self, move: Consensus) -> None:
        mean = self._session.consensus()
        if move.leaves:
            with mean:
                self._look()
        self._look()

    # --- steps

    def _step(self, move: Step) -> None:
        try:
            self.perform_step(move)
        except NonFiniteError as error:
            self._note_failed(move, error)

    def perform_step(self, move: Step) -> None:
        batches = own_batches(move, self.rank)
        for number, batch in enumerate(batches):
            self.batch(move, batch, number, is_nan=move.nan == self.rank and number == len(batches) - 1)

    def _epoch(self, move: Epoch) -> None:
        try:
            self._loop(move)
        except NonFiniteError as error:
            self._note_failed(move, error)

    def _note_failed(self, move: Step | Epoch, error: NonFiniteError) -> None:
        if move.nan is None or move.nan >= self.size:
            raise error
        self._leave(error)

    def _loop(self, move: Epoch, is_asked: bool = False) -> None:
        own = own_batches(move, self.rank)
        loader: Any = own if move.sized else _Unsized(own)
        weighs = {id(batch): weight_of(move, self.rank, number) for number, batch in enumerate(own)}
        weight = (lambda batch: weighs[id(batch)]) if move.weighs else None
        continues, self._continues = self._continues, None
        first = continues.stops or 0 if continues is not None else 0
        for number, batch in enumerate(self._session.data(loader, weight=weight), first):
            if number == 0 and move.skips == self.rank:
                continue
            micro, ends = number % move.way.micros, number % move.way.micros == move.way.micros - 1
            is_nan = ends and number < 2 * move.way.micros and move.nan == self.rank and number < len(own)
            if is_asked and number == 2 * move.way.micros:
                self._ask_to_end()
            self.batch(move, batch, micro, is_nan)
            self._place = number + 1
            if move.stops == number + 1 and not first:
                if move.saves:
                    self._save(None)
                break

    def _ask_to_end(self) -> None:
        """Send a signal to this rank, and wait until it has heard of it."""
        SIGNALS.ask()
        assert self._session.inner.save_point.agreed.wait(20)

    def batch(self, move: Step | Epoch, batch: Batch, micro: int, is_nan: bool) -> None:
        """Do with a batch what the way says."""
        way = move.way
        optimizers = self.replica.optimizers
        if micro == 0 and way.how != "closure":
            _zero(optimizers)
        if way.how == "closure" or isinstance(optimizers[0], Sam):
            self._step_by_closure(batch, is_nan)
            mask_of(way.then, self.replica.model)
            return
        ends = micro == way.micros - 1
        with nullcontext() if ends else self._session.accumulate():
            loss = self.loss(batch, way, is_nan)
            if way.how == "by_hand":
                self._differentiate(loss)
            else:
                loss.backward()
        if not ends:
            return
        if way.how == "sam":
            self._ascend(batch, way, is_nan)
        elif way.how == "twice":
            self.loss(batch, way, is_nan, tells=False).backward()
        elif way.how == "surgery":
            self._operate(batch, way, is_nan)
        self._optimize(way)
        mask_of(way.then, self.replica.model)

    def loss(self, batch: Batch, way: Way, is_nan: bool, tells: bool = True, task: int = 0) -> Tensor:
        loss = loss_of(self.called, batch, task)
        if tells:
            self.records.tell("loss", loss.item())
        loss = loss * (math.nan if is_nan else 1.0) / way.micros
        scaled: Tensor = self.replica.scaler.scale(loss) if way.scaled else loss
        return scaled

    def _differentiate(self, loss: Tensor) -> None:
        parameters = [p for p in self.replica.model.parameters() if p.requires_grad]
        for parameter, gradient in zip(
            parameters, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True
        ):
            parameter.grad = gradient

    def _ascend(self, batch: Batch, way: Way, is_nan: bool) -> None:
        left = ascend(list(self.replica.model.parameters()))
        _zero(self.replica.optimizers)
        self.loss(batch, way, is_nan, tells=False).backward()
        for parameter, data in left:
            parameter.data = data

    def _operate(self, batch: Batch, way: Way, is_nan: bool) -> None:
        parameters = list(self.replica.model.parameters())
        kept = [parameter.grad for parameter in parameters]
        _zero(self.replica.optimizers)
        self.loss(batch, way, is_nan, tells=False, task=1).backward()
        for parameter, first in zip(parameters, kept, strict=True):
            if first is not None and parameter.grad is not None:
                parameter.grad = first - 0.5 * parameter.grad

    def _optimize(self, way: Way) -> None:
        scaler, optimizers = self.replica.scaler, self.replica.optimizers
        if way.clip is not None:
            for optimizer in optimizers if way.scaled else ():
                scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(self.replica.model.parameters(), way.clip)
        for optimizer in optimizers:
            if way.scaled:
                scaler.step(optimizer)
            else:
                optimizer.step()
        if way.scaled:
            scaler.update()

    def _step_by_closure(self, batch: Batch, is_nan: bool, tells: bool = True) -> None:
        optimizer: Any = self.replica.optimizers[0]

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch, Way(), is_nan, tells)
            loss.backward()
            return loss

        optimizer.step(closure)

    # --- what is done to models

    def _freeze(self, move: Freeze) -> None:
        self.replica.model.get_submodule(move.layer).requires_grad_(False)

    def _unfreeze(self, move: Unfreeze) -> None:
        self.replica.model.get_submodule(move.layer).requires_grad_(True)

    def _hook(self, move: Hook) -> None:
        hook_on(self.replica.model, move.layer, move.by)

    def _rebind(self, move: Rebind) -> None:
        self._session.settle()
        for parameter in self.replica.model.parameters():
            parameter.data = parameter.data * move.by

    def _swap(self, move: Swap) -> None:
        self._session.settle()
        aside = {parameter: parameter.data for parameter in self.replica.model.parameters()}
        for parameter, own in aside.items():
            parameter.data = own * move.by
        if move.then == "look":
            with self._session.consensus():
                self._look()
        elif move.then == "distance":
            self._session.consensus_distance()
        else:
            self._save(None)
        for parameter, own in aside.items():
            parameter.data = own
        self._look()

    def _loadalone(self, move: LoadAlone) -> None:
        model = self.replica.model
        if self.rank == move.rank:
            scaled = {name: value.detach() * move.by for name, value in model.named_parameters()}
            model.load_state_dict({**model.state_dict(), **scaled})
        self._session.consensus()
        self._look()

    def _crash(self, move: Crash) -> None:
        batch = batch_of(move.seed, self.rank, 0, frozenset({0, 1, 2, 3}))
        try:
            self._crash_in_loop(move, batch)
        except MishapError as error:
            self._leave(error)
        self._renew(move.seed + self.rank)

    def _crash_in_loop(self, move: Crash, batch: Batch) -> None:
        optimizers: list[Any] = self.replica.optimizers
        for _ in self._session.data([batch, batch]):
            _zero(optimizers)
            loss = loss_of(self.called, batch)
            if move.where != "forward":
                loss.backward()
            if move.where == "step" and self.optimizer in ("sam", "lbfgs"):
                self._step_by_closure(batch, False, tells=False)
            elif move.where == "step":
                for optimizer in optimizers:
                    optimizer.step()
            raise MishapError

    # --- checkpoints

    def _save(self, move: Save | None) -> None:
        self._session.save(self.folder, scaler=self.replica.scaler)

    def _signal(self, move: Signal) -> None:
        self._session.save_on_signal(self.folder, scaler=self.replica.scaler)
        try:
            self._loop(move.epoch, is_asked=self.rank == move.rank)
        except SystemExit as error:
            self.records.tell("stopped", [self._place, error.code])
            self._leave(error)
            return
        raise AssertionError("a request to end was not heard")

    # --- errors

    def _poison(self, move: Poison) -> None:
        for number in range(3):
            nan = move.rank if number == 0 else None
            self.perform_step(Step(move.seed + number, nan=nan))
        raise AssertionError("NaN was exchanged without a word")

    def _refuse(self, move: Refuse) -> None:
        REFUSALS[move.what].do(self, move)
        if not REFUSALS[move.what].others or self.rank != move.rank:
            raise AssertionError(f"{move.what} was not refused")


class _Unsized:
    """A loader that nobody knows the length of."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches)


def _zero(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
