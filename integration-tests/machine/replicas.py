"""Replicas of the toy in one process, and what strategies make of them: the truth that sessions are compared with.

A plain loop over the ranks, with torch's own optimizers; exchanges are sums over the ranks, written from the
recipes' definitions.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from machine.strategies import Entry, Mixing, Rule, Sparse
from machine.toy import Holder, Lookahead, Optimizers, Sam, Toy, optimizers_for

#: Of one rank, by parameter.
Gradients = dict[str, Tensor | None]


@dataclass
class Replica:
    """The state that a rank holds of its own."""

    model: Toy
    optimizers: Optimizers
    scaler: Any = field(default_factory=lambda: torch.amp.GradScaler("cpu", init_scale=256.0))

    @classmethod
    def new(cls, seed: int, optimizer: str) -> Replica:
        model = Toy(seed)
        new = cls(model, optimizers_for(optimizer, model))
        new.scaler.scale(torch.zeros(()))  # so that it has a scale
        return new

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())

    @property
    def every_optimizer(self) -> Optimizers:
        """The optimizers, those within others first; not those that only hold one."""
        within = [each.base for each in self.optimizers if isinstance(each, Sam | Lookahead | Holder)]
        return [*within, *(each for each in self.optimizers if not isinstance(each, Lookahead | Holder))]

    @property
    def lookaheads(self) -> list[Lookahead]:
        return [each for each in self.optimizers if isinstance(each, Lookahead)]

    def gradients(self) -> Gradients:
        """Return copies."""
        return {name: None if p.grad is None else p.grad.clone() for name, p in self.parameters.items()}

    def give(self, gradients: Gradients) -> None:
        for name, parameter in self.parameters.items():
            given = gradients[name]
            parameter.grad = None if given is None else given.clone()


def layer_of(name: str) -> str:
    return name.rpartition(".")[0]


LAYERS = list(dict.fromkeys(layer_of(name) for name, _ in Toy(0).named_parameters()))


@dataclass
class Exchanges:
    """The state of a strategy from step to step, and its work, for all ranks at once.

    Attributes:
        entry: the strategy.
        begins_equal: whether the replicas did.
        names: the parameters that are exchanged: those that were not frozen when the session was attached.
        step: how many have ended.
        parameter_round: how often parameters have been exchanged in this phase.
        residuals: what ranks have not sent of their gradients: by layer, a vector each.
        push_weights: w of each rank, by layer.
        pending: W x - x, by parameter for each rank, and W w: still under way.
        is_due: whether parameters are to be exchanged before they are read.
        late: gradients that join each rank's next step, by parameter.
        outer: phi, by parameter, and its momentum; empty where there is none.
        counted: what each rank's batches have counted since phi - x was sent.
        sent: x of each rank, by parameter, and the mean of phi - x: still under way; None where no rank has moved it.
        left: x of each rank, by parameter, as it was when it was last sent or merged.
        moved: which ranks have moved it, but by merges, since it was sent.
        noted: x of each rank, by parameter, as the session has left it; what differs was written by the program.
    """

    entry: Entry
    ranks: int
    begins_equal: bool
    names: Sequence[str]
    step: int = 0
    parameter_round: int = 0
    residuals: list[dict[str, Tensor]] = field(default_factory=list)
    push_weights: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    pending: tuple[dict[str, Tensor], dict[str, Any]] | None = None
    is_due: bool = False
    late: list[dict[str, Tensor]] = field(default_factory=list)
    outer: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    counted: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros(0))
    sent: dict[str, tuple[Tensor, Tensor | None]] = field(default_factory=dict)
    left: dict[str, Tensor] = field(default_factory=dict)
    moved: dict[str, Tensor] = field(default_factory=dict)
    noted: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.late = [{} for _ in range(self.ranks)]
        self._begin_phase()

    def _begin_phase(self) -> None:
        self.rule = self.entry.at(self.step)
        self.parameter_round = 0
        self.residuals = [{} for _ in range(self.ranks)]
        self.push_weights = {layer: np.ones(self.ranks) for layer in LAYERS}
        self.pending = None
        self.sent = {}
        self.counted = np.zeros(self.ranks)

    @property
    def has_outer(self) -> bool:
        return self.rule.parameters is not None and self.rule.parameters.outer is not None

    @torch.no_grad()
    def begin_outer(self, replicas: Sequence[Replica]) -> None:
        """Begin with the replicas' mean for phi; momentum goes on where there is any."""
        before, self.outer = self.outer, {}
        for name in self.names if self.has_outer else ():
            mean = torch.stack([replica.parameters[name] for replica in replicas]).mean(0)
            self.outer[name] = mean, before[name][1] if before else torch.zeros_like(mean)
            self.moved[name] = torch.zeros(self.ranks, dtype=torch.bool)
        self.leave(replicas)

    @torch.no_grad()
    def leave(self, replicas: Sequence[Replica]) -> None:
        """Take note of where parameters are: what moves them from now on is no merge."""
        for name in self.outer:
            self.left[name] = _of_ranks(replicas, name)

    def note_moved(self, replicas: Sequence[Replica]) -> None:
        """Take note of which have moved since."""
        for name in self.outer:
            self.moved[name] = self.moved[name] | (_of_ranks(replicas, name) != self.left[name]).flatten(
                1
            ).any(1)
        self.leave(replicas)

    def note(
        self, replicas: Sequence[Replica], ranks: Tensor | None = None, *, written: bool = False
    ) -> None:
        """Take note of what the session has left in the parameters of ranks, of all if None; none if `written`."""
        for name in self.names:
            now = _of_ranks(replicas, name)
            if ranks is not None:
                now[~ranks] = self.noted[name][~ranks]
            self.noted[name] = now.fill_(np.inf) if written else now

    def written(self, replicas: Sequence[Replica]) -> Tensor:
        """Return on which ranks the program has written parameters since, as far as a session looks at them."""
        found = torch.zeros(self.ranks, dtype=torch.bool)
        for name in self.names if self.is_delayed or self.has_outer else ():
            change = (_of_ranks(replicas, name) - self.noted[name]).flatten(1)
            places = torch.linspace(0, change.shape[1] - 1, min(change.shape[1], 16)).long()
            found |= (change[:, places].abs() > 1e-12).any(1)
        return found

    @property
    def alone(self) -> bool:
        return self.ranks == 1

    @property
    def equal(self) -> bool:
        return self.begins_equal and (self.alone or self.rule.keeps_equal)

    # --- gradients

    def combine(self, own: Sequence[Gradients], weights: Sequence[float]) -> list[Gradients]:
        """Return what every rank steps with, of gradients that are multiplied by their weights already."""
        total = sum(weights)
        if self.rule.gradients is None or self.alone:
            return [dict(gradients) for gradients in own]
        names = own[0].keys()
        if isinstance(self.rule.gradients, Sparse):
            scaled = [{k: None if g is None else g / (total or 1) for k, g in of.items()} for of in own]
            combined = self._sparse(scaled, self.rule.gradients.density)
        else:
            combined = {name: _sum([of[name] for of in own], 1 / (total or 1)) for name in names}
        return [dict(combined) for _ in own]

    def _sparse(self, own: Sequence[Gradients], density: float) -> Gradients:
        combined: Gradients = {name: _sum([of[name] for of in own], 0.0) for name in own[0]}
        for layer in LAYERS:
            names = [name for name in self.names if layer_of(name) == layer]
            if not names:
                continue
            shapes = {name: p.shape for name, p in Toy(0).named_parameters()}
            # What has a gradient on no rank sends nothing of its residual, and keeps all of it.
            sends = torch.cat(
                [
                    torch.full((shapes[name].numel(),), any(of[name] is not None for of in own))
                    for name in names
                ]
            )
            total: Tensor | int = 0
            for rank, of_rank in enumerate(own):
                flat = torch.cat([_flat(of_rank[name], shapes[name]) for name in names])
                held = self.residuals[rank].get(layer, torch.zeros_like(flat)) + flat
                sent = _largest(held * sends, max(1, round(density * len(held))))
                self.residuals[rank][layer] = held - sent
                total = total + sent
            assert isinstance(total, Tensor)
            for name, part in zip(names, total.split([shapes[name].numel() for name in names]), strict=True):
                if combined[name] is not None or bool(part.any()):
                    combined[name] = part.view(shapes[name])
        return combined

    def join_late(self, rank: int, replica: Replica) -> None:
        """Add to a rank's gradients what the phase before has left, in all evaluations of a step."""
        for name, gradient in self.late[rank].items():
            parameter = replica.parameters[name]
            if not parameter.requires_grad:
                continue
            parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad + gradient

    def drop_late(self, rank: int, replica: Replica) -> None:
        """Take note of a rank's step, in which stale gradients were but for those of frozen parameters."""
        frozen = {name for name, parameter in replica.parameters.items() if not parameter.requires_grad}
        self.late[rank] = {name: late for name, late in self.late[rank].items() if name in frozen}

    # --- parameters

    @torch.no_grad()
    def bias(self, replicas: Sequence[Replica]) -> None:
        """Make models hold x, what optimizers step, in place of x / w."""
        for rank, replica in enumerate(replicas):
            for name in self.names:
                replica.parameters[name].mul_(self.push_weights[layer_of(name)][rank])

    @torch.no_grad()
    def debias(self, replicas: Sequence[Replica]) -> None:
        for rank, replica in enumerate(replicas):
            for name in self.names:
                replica.parameters[name].div_(self.push_weights[layer_of(name)][rank])

    def end_step(self, replicas: Sequence[Replica], weights: Sequence[float]) -> None:
        """Do what follows the optimizers' step; models hold x before, and x / w afterwards.

        Args:
            replicas: of all ranks.
            weights: what their batches count.
        """
        self.step += 1
        mixing = self.rule.parameters
        if mixing is not None and mixing.outer is not None:
            self._merge_outer(replicas)
            self.counted += weights
            if self.step % mixing.every == 0:
                self._send_outer(replicas)
                if not mixing.delayed:
                    self._merge_outer(replicas)
        elif mixing is not None and not self.alone:
            self._merge(replicas)
            if self.step % mixing.every == 0:
                self.is_due = True
                if not mixing.hidden:
                    self.exchange(replicas)
        self.debias(replicas)
        if self.entry.at(self.step) is not self.rule:
            self._change_phase(replicas)
        self.note(replicas)

    @property
    def is_delayed(self) -> bool:
        """True if exchanges of parameters are merged some steps later."""
        return self.rule.parameters is not None and self.rule.parameters.delayed

    def begin_forward(self, replicas: Sequence[Replica]) -> None:
        """Exchange the parameters x / w that models hold, if that is due."""
        self.bias(replicas)
        self.exchange(replicas)
        self.debias(replicas)

    def exchange(self, replicas: Sequence[Replica]) -> None:
        """Exchange the parameters x that models hold, if that is due."""
        if not self.is_due:
            return
        self.is_due = False
        assert self.rule.parameters is not None
        self._mix(replicas, self.rule.parameters)
        if not self.rule.parameters.delayed:
            self._merge(replicas)

    @torch.no_grad()
    def _mix(self, replicas: Sequence[Replica], mixing: Mixing) -> None:
        changes, weights = {}, {}
        for number, layer in enumerate(dict.fromkeys(map(layer_of, self.names))):
            matrix = mixing.matrix(self.ranks, self.parameter_round, number if mixing.layered else 0)
            for name in (name for name in self.names if layer_of(name) == layer):
                own = torch.stack([replica.parameters[name] for replica in replicas])
                changes[name] = torch.tensordot(torch.from_numpy(matrix), own, 1) - own
            weights[layer] = matrix @ self.push_weights[layer] if mixing.pushes else self.push_weights[layer]
        self.pending = changes, {**self.push_weights, **weights}
        self.parameter_round += 1

    @torch.no_grad()
    def _send_outer(self, replicas: Sequence[Replica]) -> None:
        """Send phi - x of what has moved; a layer that rests on all ranks, as a frozen one, takes no part."""
        self.note_moved(replicas)
        shares = torch.from_numpy(self.counted / (self.counted.sum() or 1))
        for name, (phi, _) in self.outer.items():
            own = _of_ranks(replicas, name)
            if self.is_delayed:  # what has moved may have been set to phi, by a consensus that nobody leaves
                moved = self.moved[name] & (own != phi).flatten(1).any(1)
            else:  # x is phi until it moves, and but for what ranks have begun with
                moved = ((own - phi).abs() > 1e-12).flatten(1).any(1)
            distance = torch.tensordot(shares * moved, phi - own, 1)
            self.sent[name] = own, distance if moved.any() else None
            self.moved[name] = torch.zeros_like(moved)
        self.counted = np.zeros(self.ranks)

    @torch.no_grad()
    def _merge_outer(self, replicas: Sequence[Replica]) -> None:
        """Step phi, and add to x what phi is more than x was."""
        if not self.sent:
            return
        assert self.rule.parameters is not None
        assert self.rule.parameters.outer is not None
        lr, momentum = self.rule.parameters.outer
        self.note_moved(replicas)
        for name, (own, distance) in self.sent.items():
            phi, velocity = self.outer[name]
            if distance is None:
                if not self.is_delayed:  # as ranks may have begun with parameters of their own
                    for replica in replicas:
                        replica.parameters[name].copy_(phi)
                continue
            velocity = momentum * velocity + distance
            phi = phi - lr * (distance + momentum * velocity)
            self.outer[name] = phi, velocity
            for rank, replica in enumerate(replicas):
                replica.parameters[name].add_(phi - own[rank])
        self.sent = {}
        self.leave(replicas)

    @torch.no_grad()
    def _merge(self, replicas: Sequence[Replica]) -> None:
        if self.pending is not None:
            changes, self.push_weights = self.pending
            for rank, replica in enumerate(replicas):
                for name in self.names:
                    replica.parameters[name].add_(changes[name][rank])
            self.pending = None

    def settle(self, replicas: Sequence[Replica]) -> None:
        written = self.written(replicas)
        self.bias(replicas)
        self.exchange(replicas)
        self._merge(replicas)
        self._merge_outer(replicas)
        self.debias(replicas)
        self.note(replicas, ~written)

    def settle_to_read(self, replicas: Sequence[Replica]) -> bool:
        """Settle; or, if a rank's program has written parameters, drop what is under way, and return True."""
        if not self.written(replicas).any():
            self.settle(replicas)
            return False
        if self.pending is not None:
            self.pending = None
            self.push_weights = {layer: np.ones(self.ranks) for layer in LAYERS}
        self.sent = {}
        return True

    def read_mean(self, replicas: Sequence[Replica]) -> None:
        """Set all replicas to what a user reads as their consensus."""
        self.consensus(replicas, whole=True, written=self.settle_to_read(replicas))

    @torch.no_grad()
    def consensus(self, replicas: Sequence[Replica], *, whole: bool = False, written: bool = False) -> None:
        """Set all replicas to phi where there is one, and else to sum x / sum w, and the frozen ones to their mean.

        Args:
            replicas: of all ranks, settled.
            whole: whether all get rank 0's buffer, too, which is no running statistic, of which alone there is a mean.
            written: whether a program has written parameters, of which phi knows nothing: then their mean counts.
        """
        if self.has_outer and not written:
            self.note_moved(replicas)
            for replica in replicas:
                for name, (phi, _) in self.outer.items():
                    replica.parameters[name].copy_(phi)
            self.leave(replicas)  # which is no training
        elif not self.alone and not self.equal:
            self.bias(replicas)
            for name in self.names:
                total = sum(replica.parameters[name].detach() for replica in replicas)
                for replica in replicas:
                    replica.parameters[name].copy_(total / self.push_weights[layer_of(name)].sum())
            self.push_weights = {layer: np.ones(self.ranks) for layer in LAYERS}
        for name in replicas[0].parameters.keys() - set(self.names):
            mean = torch.stack([replica.parameters[name] for replica in replicas]).mean(0)
            for replica in replicas:
                replica.parameters[name].copy_(mean)
        for replica in replicas if whole else ():
            replica.model.seen.copy_(replicas[0].model.seen)

    # --- checkpoints

    def mean_of(self, models: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return sum x / sum w of saved models that hold x / w, and rank 0's of the buffer."""
        mean: dict[str, Tensor] = mean_of(models)
        for name in self.names:
            weights = self.push_weights[layer_of(name)]
            total = sum(model[name] * w for model, w in zip(models, weights, strict=True))
            assert isinstance(total, Tensor)
            mean[name] = total / float(weights.sum())
        mean["seen"] = models[0]["seen"]
        return mean

    def count_on(self, before: Exchanges) -> None:
        """Go on where another number of ranks was, without what they kept."""
        self.step, self.begins_equal = before.step, True
        self._begin_phase()
        # A round that was under way is dropped, and begun again; one rank alone counts none.
        self.parameter_round = 0 if before.alone else before.parameter_round - (before.pending is not None)
        self.outer = before.outer
        self.moved = {name: moved.any().expand(self.ranks) for name, moved in before.moved.items()}
        self.counted = np.full(self.ranks, before.counted.mean())
        mean = mean_of(before.late) if before.late[0].keys() == before.late[-1].keys() else {}
        self.late = [mean for _ in self.late]

    # --- phases

    def _change_phase(self, replicas: Sequence[Replica]) -> None:
        self.settle(replicas)
        for of_rank in self.residuals:
            for layer, held in of_rank.items():
                named = replicas[0].parameters
                shapes = {name: named[name].shape for name in self.names if layer_of(name) == layer}
                parts = held.split([shape.numel() for shape in shapes.values()])
                for (name, shape), part in zip(shapes.items(), parts, strict=True):
                    for late in self.late:
                        late[name] = late.get(name, 0) + part.view(shape)
        following: Rule = self.entry.at(self.step)
        if self.has_outer:
            self.consensus(replicas)
        if following.keeps_equal and not self.equal:
            self.consensus(replicas)
            average_optimizers(replicas)
            self.begins_equal = True
        elif following.parameters is not None and following.parameters.outer is not None and not self.equal:
            self.consensus(replicas)
        self._begin_phase()
        self.begin_outer(replicas)


def average_optimizers(replicas: Sequence[Replica]) -> None:
    """Set what optimizers remember to its mean, and forget what not all ranks' remember, or has none."""
    for optimizers in zip(*(replica.every_optimizer for replica in replicas), strict=True):
        lists = [[p for group in each.param_groups for p in group["params"]] for each in optimizers]
        for parameters in zip(*lists, strict=True):
            states = [each.state.get(p, {}) for each, p in zip(optimizers, parameters, strict=True)]
            has_none = any(isinstance(value, list) for value in states[0].values())
            if has_none or any(state.keys() != states[0].keys() for state in states):
                for each, parameter in zip(optimizers, parameters, strict=True):
                    each.state.pop(parameter, None)
                continue
            for key, value in states[0].items():
                if isinstance(value, Tensor):
                    mean = torch.stack([state[key] for state in states]).mean(0)
                    for state in states:
                        state[key] = mean.clone()


def mean_of(states: Sequence[Any]) -> Any:
    """Return the mean of nested states of one form; of what is no floating-point tensor the first."""
    first = states[0]
    if isinstance(first, Tensor) and first.is_floating_point():
        return torch.stack(list(states)).mean(0)
    if isinstance(first, dict):
        return {key: mean_of([state[key] for state in states]) for key in first}
    if isinstance(first, list):
        return [mean_of(parts) for parts in zip(*states, strict=True)]
    return copy.deepcopy(first)


def form_of(state: Any) -> Any:
    """Return where a nested state holds tensors, and of what shapes."""
    if isinstance(state, Tensor):
        return tuple(state.shape)
    if isinstance(state, dict):
        return {key: form_of(value) for key, value in state.items()}
    return [form_of(value) for value in state] if isinstance(state, list) else None


def _sum(given: Sequence[Tensor | None], factor: float) -> Tensor | None:
    having = [g for g in given if g is not None]
    return torch.stack(having).sum(0) * factor if having else None


def _flat(given: Tensor | None, shape: torch.Size) -> Tensor:
    return torch.zeros(shape.numel(), dtype=torch.float64) if given is None else given.reshape(-1)


def _largest(values: Tensor, count: int) -> Tensor:
    chosen = torch.argsort(-values.abs(), stable=True)[:count]
    sent = torch.zeros_like(values)
    sent[chosen] = values[chosen]
    return sent


def _of_ranks(replicas: Sequence[Replica], name: str) -> Tensor:
    """Return a parameter of all ranks, [ranks, ...]."""
    return torch.stack([replica.parameters[name].detach() for replica in replicas])
