"""The expected result of a program, carried out on replicas in one process, move by move, for all ranks at once."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hocket.session.save.save_point import ENDED_STATUS
from machine.batches import Given, batches_of
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
    Rebind,
    Save,
    Settle,
    Signal,
    Start,
    Step,
    Swap,
    Unfreeze,
)
from machine.records import Records, state_of
from machine.replicas import Exchanges, Replica, form_of, mean_of
from machine.steps import FailedError, Steps
from machine.strategies import STRATEGIES
from machine.toy import hook_on


@dataclass
class Saved:
    """A checkpoint: by rank, and what exchanges kept; in which epoch it was, and after how many batches.

    Attributes:
        written: whether a program had written parameters since the last step.
    """

    models: list[dict[str, Tensor]]
    optimizers: list[list[Any]]
    scalers: list[dict[str, Any]]
    exchanges: Exchanges
    skipped: list[int]
    epoch: int | None
    place: int
    written: bool


class Truth:
    """Performs moves; `records` says what each rank has to see since the job began."""

    def __init__(self) -> None:
        self.records: list[Records] = []
        self.saved: Saved | None = None
        #: After how many batches ranks that were asked to end have left.
        self.stopped: int | None = None
        self._replicas: list[Replica] = []
        self._steps: Steps | None = None
        self._continues: tuple[int, int] | None = None

    @property
    def attached(self) -> bool:
        return self._steps is not None

    @property
    def steps(self) -> Steps:
        assert self._steps is not None
        return self._steps

    @property
    def exchanges(self) -> Exchanges:
        return self.steps.exchanges

    def perform(self, number: int, move: Move) -> None:
        for records in self.records:
            records.move = number
        getattr(self, f"_{type(move).__name__.lower()}")(move)

    # --- sessions

    def _start(self, move: Start) -> None:
        self._optimizer = move.optimizer
        self._calls_a_part = move.wraps == {"attached"}
        self._counted = 0
        self._replicas = _replicas(range(move.ranks), move.optimizer)
        self.records = [Records() for _ in range(move.ranks)]
        self._steps = None

    def _attach(self, move: Attach) -> None:
        ranks = len(self._replicas)
        names = [name for name, p in self._replicas[0].parameters.items() if p.requires_grad]
        exchanges = Exchanges(
            STRATEGIES[move.strategy], ranks, ranks == 1 or not move.keeps, names, self._counted
        )
        self._steps = Steps(
            self._replicas, exchanges, move.skips, self.records, calls_a_part=self._calls_a_part
        )
        self._continues = None
        if not move.keeps:
            first = self._replicas[0]
            states = [each.state_dict() for each in first.every_optimizer]
            for replica in self._replicas[1:]:
                _give(replica, *copy.deepcopy((first.model.state_dict(), states)))
        exchanges.begin_outer(self._replicas)
        exchanges.note(self._replicas)
        if move.loads:
            self._load()
        self._look()

    def _close(self, move: Close) -> None:
        self.exchanges.settle_to_read(self._replicas)
        self._look()
        self._leave()

    def _leave(self) -> None:
        """Note how many steps the model has made, which another session goes on counting."""
        self._counted = self.exchanges.step
        self._steps = None

    def _settle(self, move: Settle) -> None:
        self.exchanges.settle(self._replicas)
        self._look()

    def _look(self) -> None:
        for rank, (replica, records) in enumerate(zip(self._replicas, self.records, strict=True)):
            records.tell("state", state_of(replica.model, replica.every_optimizer))
            records.tell("steps", [self.exchanges.step, self.steps.skipped[rank]])

    def _consensus(self, move: Consensus) -> None:
        # What is due before the next forward comes before a look, too; what is under way stays so.
        if not self.exchanges.is_delayed:
            self.exchanges.begin_forward(self._replicas)
        models = [copy.deepcopy(replica.model.state_dict()) for replica in self._replicas]
        exchanges = copy.deepcopy(self.exchanges) if move.leaves else self.exchanges
        self.exchanges.read_mean(self._replicas)
        self._look()
        if move.leaves:
            for replica, model in zip(self._replicas, models, strict=True):
                replica.model.load_state_dict(model)
            self.steps.exchanges = exchanges
            self._look()

    # --- steps

    def _step(self, move: Step) -> None:
        self._go(batches_of(move, len(self._replicas)))

    def _epoch(self, move: Epoch) -> None:
        begin = 0
        if self._continues is not None and self._continues[0] == move.seed:
            begin = self._continues[1]
        self._continues = None
        given = batches_of(move, len(self._replicas))[begin:]
        if move.stops is not None and begin == 0:
            given = given[: move.stops]
        if self._go(given) and move.saves and begin == 0:
            self._save(None, move.seed, len(given))

    def _go(self, given: list[Given]) -> bool:
        """Train on batches; return False where an error has ended the session."""
        try:
            for each in given:
                self.steps.batch(each)
        except FailedError:
            self._leave()
        return self.attached

    # --- what is done to models

    def _freeze(self, move: Freeze) -> None:
        for replica in self._replicas:
            replica.model.get_submodule(move.layer).requires_grad_(False)

    def _unfreeze(self, move: Unfreeze) -> None:
        for replica in self._replicas:
            replica.model.get_submodule(move.layer).requires_grad_(True)

    def _hook(self, move: Hook) -> None:
        for replica in self._replicas:
            hook_on(replica.model, move.layer, move.by)

    def _rebind(self, move: Rebind) -> None:
        self.exchanges.settle(self._replicas)
        self._scale(self._replicas, move.by)

    def _swap(self, move: Swap) -> None:
        self.exchanges.settle(self._replicas)
        weights = [copy.deepcopy(replica.model.state_dict()) for replica in self._replicas]
        exchanges = copy.deepcopy(self.exchanges)
        self._scale(self._replicas, move.by)
        if move.then == "look":
            self.exchanges.read_mean(self._replicas)
            self._look()
        elif move.then == "save":
            self._save(None)
        for replica, own in zip(self._replicas, weights, strict=True):
            replica.model.load_state_dict(own)
        self.steps.exchanges = exchanges
        self._look()

    @torch.no_grad()
    def _scale(self, replicas: Sequence[Replica], by: float) -> None:
        for replica in replicas:
            for parameter in replica.parameters.values():
                parameter.mul_(by)

    def _loadalone(self, move: LoadAlone) -> None:
        self._scale(self._replicas[move.rank : move.rank + 1], move.by)
        if not self.exchanges.is_delayed:
            self.exchanges.begin_forward(self._replicas)
        self._even()
        self._look()

    @torch.no_grad()
    def _even(self) -> None:
        """Set replicas that are to be equal, and are found not to be so, to their mean."""
        exchanges = self.exchanges
        if exchanges.equal and not exchanges.alone and not exchanges.has_outer:
            for of_ranks in zip(*(replica.parameters.values() for replica in self._replicas), strict=True):
                mean = torch.stack(list(of_ranks)).mean(0)
                for parameter in of_ranks:
                    parameter.copy_(mean)
        exchanges.read_mean(self._replicas)

    def _crash(self, move: Crash) -> None:
        self._start_anew(move.seed)

    def _start_anew(self, seed: int) -> None:
        self._counted = 0
        self._replicas = _replicas(range(seed, seed + len(self._replicas)), self._optimizer)
        self._steps = None

    # --- checkpoints

    def _save(self, move: Save | None, epoch: int | None = None, place: int = 0) -> None:
        self.exchanges.begin_forward(self._replicas)
        self.exchanges.note_moved(self._replicas)
        self.saved = copy.deepcopy(
            Saved(
                [replica.model.state_dict() for replica in self._replicas],
                [[each.state_dict() for each in replica.every_optimizer] for replica in self._replicas],
                [replica.scaler.state_dict() for replica in self._replicas],
                self.exchanges,
                self.steps.skipped,
                epoch,
                place,
                bool(self.exchanges.written(self._replicas).any()),
            )
        )

    def _signal(self, move: Signal) -> None:
        if self.stopped is None:
            return
        if self._go(batches_of(move.epoch, len(self._replicas))[: self.stopped]):
            for records in self.records:
                records.tell("stopped", [self.stopped, ENDED_STATUS])
            self._save(None, move.epoch.seed, self.stopped)
            self._leave()

    def _load(self) -> None:
        saved = copy.deepcopy(self.saved)
        assert saved is not None
        self.steps.skipped = saved.skipped[:1] * len(self._replicas)
        if len(saved.models) == len(self._replicas):
            self.steps.skipped = saved.skipped
            self.steps.exchanges = saved.exchanges
            if saved.epoch is not None:
                self._continues = saved.epoch, saved.place
            states = zip(saved.models, saved.optimizers, saved.scalers, strict=True)
            for replica, state in zip(self._replicas, states, strict=True):
                _give(replica, *state)
            return
        self.exchanges.count_on(saved.exchanges)
        alike = all(form_of(of_rank) == form_of(saved.optimizers[0]) for of_rank in saved.optimizers)
        for replica in self._replicas:
            model = saved.exchanges.mean_of(saved.models)
            optimizers = mean_of(saved.optimizers) if alike else None
            _give(replica, model, optimizers, mean_of(saved.scalers))
        self.exchanges.leave(self._replicas)
        self.exchanges.note(self._replicas, written=saved.written)


def _replicas(seeds: Sequence[int], optimizer: str) -> list[Replica]:
    replicas = [Replica.new(seed, optimizer) for seed in seeds]
    for lookahead in (each for replica in replicas for each in replica.lookaheads):
        lookahead.apart = True
    return replicas


def _give(replica: Replica, model: Any, optimizers: list[Any] | None, scaler: Any = None) -> None:
    replica.model.load_state_dict(model)
    if scaler is not None:
        replica.scaler.load_state_dict(scaler)
    if optimizers is not None:
        for each, state in zip(replica.every_optimizer, optimizers, strict=True):
            each.load_state_dict(state)
    for lookahead in replica.lookaheads:
        lookahead.share()
