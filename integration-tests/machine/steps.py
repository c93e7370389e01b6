"""Steps of all replicas at once, in the ways that users make them."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from machine.batches import Given
from machine.records import Records
from machine.replicas import Exchanges, Gradients, Replica
from machine.toy import Sam, ascend, loss_of, mask_of


class FailedError(Exception):
    """A step that has to be an error on all ranks."""


class Steps:
    """Steps of one session.

    Args:
        skips: whether steps with NaN are skipped, else they fail.
        records: what each rank has to see.
        calls_a_part: whether programs call a part of the attached model, so that no forward of it begins an exchange.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        exchanges: Exchanges,
        skips: bool,
        records: Sequence[Records],
        *,
        calls_a_part: bool,
    ) -> None:
        self.replicas = replicas
        self.exchanges = exchanges
        self.skipped = [0] * len(replicas)
        self._skips = skips
        self._calls_a_part = calls_a_part
        self._is_skipped = False
        self._leaving: set[int] = set()
        self._records = records

    @property
    def is_local(self) -> bool:
        """Return whether each rank steps with its own gradients."""
        return self.exchanges.rule.gradients is None or self.exchanges.alone

    @property
    def notices_nan(self) -> bool:
        """Return whether a session looks for NaN in gradients; one rank alone does, too."""
        return self.exchanges.rule.gradients is not None

    def batch(self, given: Given) -> None:
        """Do with a batch of each rank what the way says."""
        self.exchanges.begin_forward(self.replicas)
        self._leaving = set()
        if given.micro == 0:
            self._own: list[Gradients] = [dict.fromkeys(replica.parameters) for replica in self.replicas]
            self._shares = [0.0] * len(self.replicas)
            self._counted = [0.0] * len(self.replicas)
            self._repeated: dict[int, Gradients] = {}
        for rank, weight in enumerate(given.weights):
            self._counted[rank] += weight / given.way.micros
        if given.way.how == "closure" or isinstance(self.replicas[0].optimizers[0], Sam):
            self._by_closures(given)
        else:
            self._gather(given)
            if not given.ends:
                return
            residuals = copy.deepcopy(self.exchanges.residuals)
            self._exchange(given)
            if given.way.how == "sam":
                # What comes of gradients that are dropped is taken out of what a compressor remembers.
                self.exchanges.residuals = residuals
                self._ascend(given)
            elif given.way.how == "twice":
                self._add(given)
            elif given.way.how == "surgery":
                self._operate(given)
            self._optimize(given)
        for rank in range(len(self.replicas)):
            if rank in self._leaving or rank == given.left_out:
                self._counted[rank] = 0.0
        self.exchanges.end_step(self.replicas, self._counted)
        if self._calls_a_part and not self.exchanges.is_delayed:
            self.exchanges.begin_forward(self.replicas)
        for lookahead in (each for replica in self.replicas for each in replica.lookaheads):
            lookahead.look_ahead()
        _write_after(given, self.replicas)

    # --- gradients

    def _gather(self, given: Given, tells: bool = True, task: int = 0) -> None:
        """Add to what each rank has gathered the gradient of its batch, by its weight where that counts."""
        for rank in range(len(self.replicas)):
            if rank == given.left_out:
                continue
            own, weight = self._gradient(given, rank, tells, task), given.weights[rank]
            self._shares[rank] += weight / given.way.micros
            if not weight:
                self._repeated[rank] = own
            else:
                factor = 1.0 if self.is_local else weight
                held = self._own[rank]
                self._own[rank] = {name: _plus(held[name], own[name], factor) for name in own}

    def _gradient(self, given: Given, rank: int, tells: bool = True, task: int = 0) -> Gradients:
        replica, way = self.replicas[rank], given.way
        loss = loss_of(replica.model, given.batches[rank], task)
        if tells:
            self._records[rank].tell("loss", loss.item())
        loss = loss * (math.nan if rank == given.is_nan else 1.0) / way.micros
        if way.scaled:
            loss = replica.scaler.scale(loss)
        names = [name for name, p in replica.parameters.items() if p.requires_grad]
        found = torch.autograd.grad(loss, [replica.parameters[name] for name in names], allow_unused=True)
        return {**dict.fromkeys(replica.parameters), **dict(zip(names, found, strict=True))}

    def _exchange(self, given: Given) -> None:
        """Give each replica what comes of the gradients that were gathered."""
        poisoned, scaled = self._poisoned(), given.way.scaled
        self._is_skipped = poisoned and not scaled and self.notices_nan
        self._leaving = set(range(len(self.replicas))) if self._is_skipped else set()
        if self._is_skipped:
            if not self._skips:
                raise FailedError
            combined = [dict.fromkeys(own) for own in self._own]
        elif poisoned and scaled and self.notices_nan:
            # Nothing is sent, and scalers find it.
            combined = [
                {name: torch.full_like(p, math.nan) for name, p in r.parameters.items()}
                for r in self.replicas
            ]
        else:
            combined = self._combine(scaled)
            if self._skips and not scaled and not self.notices_nan:
                self._leaving = {rank for rank, own in enumerate(self._own) if _is_poisoned(own)}
        for rank in self._leaving:
            self.skipped[rank] += 1
            combined[rank] = dict.fromkeys(combined[rank])
        for replica, gradients in zip(self.replicas, combined, strict=True):
            replica.give(gradients)
        self._own = [dict.fromkeys(own) for own in self._own]
        self._shares = [0.0] * len(self._shares)

    def _combine(self, scaled: bool) -> list[Gradients]:
        """Exchange gradients as they are without the ranks' scales."""
        scales = [replica.scaler.get_scale() if scaled else 1.0 for replica in self.replicas]
        own = [_times(of, 1 / scale) for of, scale in zip(self._own, scales, strict=True)]
        combined = self.exchanges.combine(own, self._shares)
        return [_times(of, scale) for of, scale in zip(combined, scales, strict=True)]

    def _poisoned(self) -> bool:
        return any(_is_poisoned(own) for own in self._own)

    def _ascend(self, given: Given) -> None:
        """Take the gradients uphill of the parameters in place of those where they are."""
        for rank, replica in enumerate(self.replicas if self.is_local else ()):
            if not given.weights[rank]:  # of a repetition, which nobody drops before the optimizer steps
                replica.give(self._repeated[rank])
        left = [ascend(list(replica.parameters.values())) for replica in self.replicas]
        self._gather(given, tells=False)
        self._exchange(given)
        for parameter, data in (each for of_rank in left for each in of_rank):
            parameter.data = data

    def _add(self, given: Given) -> None:
        """Add what comes of a second backward of the same batch."""
        first = [replica.gradients() for replica in self.replicas]
        self._gather(given, tells=False)
        self._exchange(given)
        for replica, held in zip(self.replicas, first, strict=True):
            more = replica.gradients()
            replica.give({name: _plus(held[name], more[name], 1.0) for name in held})

    def _operate(self, given: Given) -> None:
        """Put what comes of two tasks together."""
        first = [replica.gradients() for replica in self.replicas]
        self._gather(given, tells=False, task=1)
        self._exchange(given)
        for replica, kept in zip(self.replicas, first, strict=True):
            second = replica.gradients()
            replica.give({name: _plus(kept[name], second[name], -0.5) for name in kept})

    # --- optimizers

    def _optimize(self, given: Given) -> None:
        self.exchanges.bias(self.replicas)
        for rank, replica in enumerate(self.replicas):
            unscaled = _unscale(replica) if given.way.scaled else []
            if given.way.clip is not None and rank != given.left_out:
                torch.nn.utils.clip_grad_norm_(replica.parameters.values(), given.way.clip)
            is_left_out = rank in self._leaving or (given.way.scaled and not _is_finite(replica))
            if not is_left_out:
                self.exchanges.join_late(rank, replica)
                self.exchanges.drop_late(rank, replica)
            # One that leaves its batch out and has nobody else's gradients does not step.
            if not (self.is_local and rank == given.left_out):
                _step(replica, unscaled)

    # --- closures

    def _by_closures(self, given: Given) -> None:
        """Step with closures: each rank on its own, or, where gradients are combined, all together."""
        self.exchanges.bias(self.replicas)
        if self.is_local:
            for rank, replica in enumerate(self.replicas):
                replica.optimizers[0].step(self._closure(given, rank))  # type: ignore[arg-type]  # torch says float
        else:
            self._step_together(given)
        for rank in range(0 if self._is_skipped else len(self.replicas)):
            self.exchanges.drop_late(rank, self.replicas[rank])

    def _closure(self, given: Given, rank: int) -> Callable[[], Tensor]:
        """Return what a rank calls that steps with gradients of its own."""

        def closure() -> Tensor:
            self.exchanges.debias(self.replicas)
            with torch.enable_grad():
                own = self._gradient(given, rank)
            self.replicas[rank].give(own if given.weights[rank] else dict.fromkeys(own))
            self.exchanges.join_late(rank, self.replicas[rank])
            self.exchanges.bias(self.replicas)
            return torch.tensor(0.0)

        return closure

    def _step_together(self, given: Given) -> None:
        """Let all optimizers step in threads, whose closures meet."""
        residuals = copy.deepcopy(self.exchanges.residuals)

        def meet() -> None:
            # An earlier closure's gradients are dropped, and taken out of what a compressor remembers.
            self.exchanges.residuals = copy.deepcopy(residuals)
            self._meet(given)

        meeting = threading.Barrier(len(self.replicas), action=meet, timeout=20)
        failures: list[BaseException] = []

        def closure() -> Tensor:
            meeting.wait()
            return torch.tensor(0.0)

        def step(replica: Replica) -> None:
            try:
                replica.optimizers[0].step(closure)  # type: ignore[arg-type]  # torch says float
            except (FailedError, threading.BrokenBarrierError) as error:
                failures.append(error)

        threads = [threading.Thread(target=step, args=(replica,)) for replica in self.replicas]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            self.exchanges.debias(self.replicas)
            assert any(isinstance(failure, FailedError) for failure in failures), failures
            raise FailedError

    def _meet(self, given: Given) -> None:
        """Give every rank what comes of all ranks' gradients, where the parameters are now."""
        self.exchanges.debias(self.replicas)
        with torch.enable_grad():
            self._gather(given)
        self._exchange(given)
        for rank, replica in enumerate(self.replicas if not self._is_skipped else ()):
            self.exchanges.join_late(rank, replica)
        self.exchanges.bias(self.replicas)


def _is_poisoned(own: Gradients) -> bool:
    return any(gradient is not None and not torch.isfinite(gradient).all() for gradient in own.values())


def _unscale(replica: Replica) -> list[Optimizer]:
    """Divide gradients by the loss scale, and return the optimizers that have any."""
    having = [each for each in replica.optimizers if _has_gradients(each)]
    for optimizer in having:
        replica.scaler.unscale_(optimizer)
    return having


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


def _is_finite(replica: Replica) -> bool:
    return all(g is None or bool(torch.isfinite(g).all()) for g in replica.gradients().values())


def _step(replica: Replica, unscaled: Sequence[Optimizer]) -> None:
    """Step, by the scaler where it has unscaled: it would divide what has joined since then by the scale, too."""
    for optimizer in replica.optimizers:
        if optimizer in unscaled:
            replica.scaler.step(optimizer)
        else:
            optimizer.step()
    if unscaled:
        replica.scaler.update()


@torch.no_grad()
def _write_after(given: Given, replicas: Sequence[Replica]) -> None:
    for rank, replica in enumerate(replicas):
        if rank != given.left_out:
            mask_of(given.way.then, replica.model)


def _times(gradients: Gradients, factor: float) -> Gradients:
    return {name: None if g is None else g * factor for name, g in gradients.items()}


def _plus(held: Tensor | None, given: Tensor | None, factor: float) -> Tensor | None:
    if given is None:
        return held
    return given * factor if held is None else held + given * factor
