"""The toy's training under a strategy, computed in one process from the definitions in NumPy.

Every collective is a matrix M over the ranks of a scope and a scale s: gradients become M C(s g), parameters
x + s M C(x) - C(x), where C is what the compressor lets through. Gradients are divided by the weight that M makes of
s everywhere, so that groups of different sizes weigh by their ranks.

Topologies are asked for their mixing matrices; of another plugin's collectives, compressors and scopes nothing is
known here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from trial import Toy, batches, flat, loss_of, optimizer_for

from hocket import draws
from hocket.collective.allreduce import Allreduce
from hocket.collective.gossip import Gossip
from hocket.collective.rooted import Broadcast, Reduce
from hocket.collective.sparse import Mean, SparseAlgorithm, SparseAllreduce
from hocket.compressor.cast import BFloat16, Float16
from hocket.compressor.error_feedback import ErrorFeedback
from hocket.compressor.local_clipping import LocalClipping
from hocket.compressor.momentum_correction import MomentumCorrection
from hocket.compressor.shared_random import SharedRandom
from hocket.compressor.topk import TopK
from hocket.compressor.wrapper import Identity
from hocket.outer.merge import AddDisplacement, Blend
from hocket.outer.sgd import Sgd
from hocket.segment.partition import Fragments, Pattern
from hocket.strategy import Bytes, Exchange, Group, Layers, Leaders, Model, Strategy, World

Vector = NDArray[np.float64]

#: Every parameter begins at a multiple of so many elements of its segment: 64 bytes of float64.
_ALIGNMENT = 8


class NoReferenceError(Exception):
    """A component that is defined elsewhere."""


# --- segments and scopes ---------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Segment:
    """One piece of the model.

    Attributes:
        index: its number in the exchange.
        places: of each element its place in the model's flat vector, -1 for padding.
        parameters: of each element the number of its parameter, -1 for padding.
    """

    index: int
    places: NDArray[np.int64]
    parameters: NDArray[np.int64]

    def read(self, values: NDArray[Any]) -> Vector:
        """Return this piece of [ranks, n], padding included."""
        piece: Vector = np.where(self.places >= 0, values[:, self.places], 0.0)
        return piece

    def write(self, values: NDArray[Any], rank: int, piece: NDArray[Any]) -> None:
        values[rank, self.places[self.places >= 0]] = piece[self.places >= 0]


def segments_of(exchange: Exchange) -> list[Segment]:
    """Cut the toy as the exchange says; gradients from the model's end, as backward completes them."""
    names, sizes = zip(*((name, p.numel()) for name, p in Toy().named_parameters()), strict=True)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    numbers = list(range(len(names)))
    if exchange.slot == "gradients":
        numbers.reverse()
    runs: dict[Any, list[int]] = {}
    layers = list(dict.fromkeys(names[number].rpartition(".")[0] for number in numbers))
    for number in numbers:
        layer = layers.index(names[number].rpartition(".")[0])
        match exchange.segments:
            case Fragments(count=count, pattern=Pattern.STRIDED):
                runs.setdefault(layer % count, []).append(number)
            case Layers():
                runs.setdefault(names[number].rpartition(".")[0], []).append(number)
            case Model():
                runs.setdefault("all", []).append(number)
            case Bytes(size_mb=size_mb, first_mb=first_mb) if min(size_mb, first_mb or size_mb) >= 1:
                runs.setdefault("all", []).append(number)  # the toy is smaller
            case other:
                raise NoReferenceError(other)
    segments = []
    for index, run in enumerate(runs.values()):
        places, parameters = [], []
        for number in run:
            padding = -sizes[number] % _ALIGNMENT
            places += [np.arange(starts[number], starts[number + 1]), np.full(padding, -1)]
            parameters += [np.full(sizes[number], number), np.full(padding, -1)]
        segments.append(Segment(index, np.concatenate(places), np.concatenate(parameters)))
    return segments


@dataclass(frozen=True)
class Part:
    """Ranks that exchange one segment among themselves, and the place among them of the one that leads it."""

    ranks: list[int]
    leader: int


def parts_of(exchange: Exchange, ranks: int, segment: int) -> list[Part]:
    """Return who exchanges a segment with whom; nobody where no two ranks meet. All ranks are on one host."""
    over = exchange.over
    everyone = list(range(ranks))
    if type(over) is World:
        parts = [Part(everyone, 0)]
    elif isinstance(over, Group | Leaders) and over.count is None:
        size = over.size or ranks
        groups = [everyone[start : start + size] for start in range(0, ranks, size)]
        if type(over) is Leaders:
            groups = [[group[segment % len(group) if over.sharded else 0] for group in groups]]
        parts = [Part(group, segment % len(group) if over.sharded else 0) for group in groups]
    else:
        raise NoReferenceError(over)
    alone = exchange.outer is not None  # a rank has outer parameters to step even so
    return parts if alone or any(len(part.ranks) > 1 for part in parts) else []


# --- collectives -----------------------------------------------------------------------------------------


def matrix_of(exchange: Exchange, part: Part, round: int, segment: int) -> Vector:
    """Return M, [size, size]."""
    size, collective = len(part.ranks), exchange.collective
    match collective:
        case Allreduce() | SparseAllreduce():
            return np.ones((size, size))
        case Gossip():
            assert exchange.topology is not None
            return exchange.topology.mixing_matrix(size, round, segment)
        case Broadcast(root=root):
            matrix = np.zeros((size, size))
            matrix[:, part.leader if root is None else root] = 1
            return matrix
        case Reduce(root=root):
            matrix = np.eye(size)
            matrix[part.leader if root is None else root] = 1 / size
            return matrix
    raise NoReferenceError(collective)


def scale_of(exchange: Exchange, part: Part, parts: list[Part]) -> float:
    """Return s: a sum becomes a mean by it; of gradients, a mean to which groups contribute by their ranks."""
    if not isinstance(exchange.collective, Allreduce | SparseAllreduce):
        return 1.0
    alike = parts if exchange.slot == "gradients" else [part]
    return 1 / float(np.mean([len(each.ranks) for each in alike]))


def equal_weights(pieces: Sequence[tuple[int, Fraction]]) -> list[int]:
    """Cut pieces of so many elements and so much weight, evenly spread, into as many of equal weight."""
    total, cuts = sum((weight for _, weight in pieces), Fraction(0)), [0]
    for number in range(1, len(pieces)):
        left, place = total * number / len(pieces), Fraction(0)
        for length, weight in pieces:
            if left <= weight:
                place += length * left / weight
                break
            left, place = left - weight, place + length
        cuts.append(int(place))
    return [*cuts, sum(length for length, _ in pieces)]


class Survivors:
    """The sums of gradients' messages that owners of regions of one segment keep, round after round."""

    def __init__(self, real: NDArray[np.bool_], size: int) -> None:
        self._places, self._size = np.flatnonzero(real), size
        self._cuts = [len(self._places) * i // size for i in range(size + 1)]

    def through(self, messages: Vector, where: NDArray[np.bool_], num_parameters: int) -> NDArray[np.bool_]:
        """Return which elements of the messages, [ranks, n], end in the result."""
        size, k = self._size, int(where[0].sum())
        head = 16 + 8 * math.ceil((2 + num_parameters) / size)
        share = 16 * math.ceil((head + 12 * math.ceil(k / size)) / 16)
        room_of_owner, room = ((nbytes - head) // 12 for nbytes in (share * 3 // 2, share))
        result, counts = np.zeros_like(where), []
        for low, high in pairwise(self._cuts):
            region = np.zeros(where.shape[1], bool)
            region[self._places[low:high]] = True
            counts.append(int((where & region).sum()))
            came = np.stack(
                [_first(np.abs(m), w & region, room_of_owner) for m, w in zip(messages, where, strict=True)]
            )
            sums = np.abs(np.where(came, messages, 0.0).sum(0))
            result |= came & _first(
                np.where(came.all(axis=0), np.inf, sums), np.logical_or.reduce(came), room
            )
        lengths = np.diff(self._cuts).tolist()
        self._cuts = equal_weights(
            [
                (length, Fraction(3 * count, sum(counts)) + Fraction(length, len(self._places)))
                for length, count in zip(lengths, counts, strict=True)
            ]
        )
        return result


def _first(sizes: Vector, among: NDArray[np.bool_], count: int) -> NDArray[np.bool_]:
    """The `count` largest of some, of equal ones the first."""
    order = np.argsort(np.where(among, -sizes, np.inf), kind="stable")
    chosen = np.zeros_like(among)
    chosen[order[:count]] = True
    return chosen & among


# --- compressors -----------------------------------------------------------------------------------------


@dataclass
class Offered:
    """The offer of a rank for a segment in one round.

    Attributes:
        data: [n], scaled.
        real: [n], whether it is an element of a parameter, and no padding.
        has: [n], whether the element's parameter has a gradient on any rank of those whose gradients end in one mean.
        weights: [n], the parameters before the step.
        scale: what the gradients were multiplied by.
    """

    round: int
    segment: int
    data: Vector
    real: NDArray[np.bool_]
    has: NDArray[np.bool_]
    weights: Vector
    scale: float


#: From what is offered to what gets through, [n], and where that is.
Send = Callable[[Offered], tuple[Vector, NDArray[np.bool_]]]


def sender_of(compressor: Any) -> Send:
    """Return a compressor with a state of its own."""
    kind = type(compressor)
    if compressor is None or kind in (Identity, Float16, BFloat16):
        dtype = {Float16: torch.float16, BFloat16: torch.bfloat16}.get(kind, torch.float64)
        return lambda o: (torch.from_numpy(o.data).to(dtype).double().numpy(), np.ones(len(o.data), bool))
    if kind is TopK:
        return lambda o: _selected(o, _largest(compressor, o))
    if kind is SharedRandom:
        return lambda o: _selected(o, _drawn(compressor, o))
    if kind is LocalClipping:
        return sender_of(compressor.compressor)  # the whole gradient has been clipped before
    if kind is ErrorFeedback:
        return _fed_back(sender_of(compressor.compressor), compressor.decay)
    if kind is MomentumCorrection:
        return _corrected(sender_of(compressor.compressor), compressor.masking)
    raise NoReferenceError(compressor)


def _count(compressor: Any, numel: int) -> int:
    density: float = compressor.density
    return max(1, round(density * numel))


def _largest(compressor: TopK, offered: Offered) -> NDArray[np.int64]:
    """The k largest of the parameters' elements; padding comes after the smallest."""
    order = np.argsort(np.where(offered.real, -np.abs(offered.data), 1.0), kind="stable")
    return order[: _count(compressor, int(offered.real.sum()))]


def _drawn(compressor: SharedRandom, offered: Offered) -> NDArray[np.int64]:
    """One element of each of k runs."""
    numel = len(offered.data)
    count = _count(compressor, numel)
    starts = np.arange(count + 1) * numel // count
    return starts[:-1] + draws.below(
        np.diff(starts), "shared", compressor.seed, offered.round, offered.segment
    )


def _selected(offered: Offered, indices: NDArray[np.int64]) -> tuple[Vector, NDArray[np.bool_]]:
    where = np.zeros(len(offered.data), bool)
    where[indices] = True
    return np.where(where, offered.data, 0.0), where


def _fed_back(send: Send, decay: float) -> Send:
    """V <- decay V + G, send C(V), V <- V - C(V); a parameter without a gradient keeps V, and sends nothing of it."""
    residual: Any = 0.0

    def sender(offered: Offered) -> tuple[Vector, NDArray[np.bool_]]:
        nonlocal residual
        kept = residual
        offered.data = np.where(offered.has, decay * residual + offered.data, 0.0)
        sent, where = send(offered)
        residual = np.where(offered.has, offered.data - sent, kept)
        return sent, where

    return sender


def _corrected(send: Send, masking: bool) -> Send:
    """u <- m u + g + d x, send C(u), u <- 0 where something was sent; with SGD's momentum m and decay d."""
    velocity: Any = 0.0
    settings = optimizer_for(Toy()).defaults

    def sender(offered: Offered) -> tuple[Vector, NDArray[np.bool_]]:
        nonlocal velocity
        gradient = offered.data + settings["weight_decay"] * offered.scale * offered.weights
        fresh = settings["momentum"] * velocity + gradient
        velocity = np.where(offered.has, fresh, velocity)
        offered.data = np.where(offered.has, velocity, 0.0)
        sent, where = send(offered)
        if masking:
            velocity = np.where(where & offered.has, 0.0, velocity)
        return sent, where

    return sender


def clipped(compressor: Any, gradients: Vector, size: int) -> Vector:
    """Clip a rank's whole gradient to max_norm sqrt(size), where a LocalClipping is asked to."""
    while compressor is not None:
        if type(compressor) is LocalClipping:
            largest = compressor.max_norm * math.sqrt(size)
            gradients = gradients * min(1.0, largest / (float(np.linalg.norm(gradients)) + 1e-6))
        compressor = getattr(compressor, "compressor", None)
    return gradients


# --- the moments -----------------------------------------------------------------------------------------


@dataclass
class Pending:
    """A segment of parameters that is under way since a step; each array is of the whole model."""

    step: int
    sent: Vector
    combined: Vector
    push_weights: Vector
    moved: NDArray[np.bool_]


#: The number of each element's parameter, [n].
PARAMETER_OF = np.concatenate([np.full(p.numel(), number) for number, p in enumerate(Toy().parameters())])


@dataclass
class Outer:
    """Outer parameters and their momentum on each rank, [ranks, n], and which elements' parameters ranks have moved.

    A parameter that no rank has moved since it was sent takes no part.
    """

    parameters: Vector
    momentum: Vector
    moved: NDArray[np.bool_]

    def note(self, changed: NDArray[np.bool_]) -> None:
        """Take note of which elements an inner step has changed."""
        for number in range(PARAMETER_OF.max() + 1):
            of_it = number == PARAMETER_OF
            self.moved[:, of_it] |= changed[:, of_it].any(1, keepdims=True)

    def distances(self, values: Vector) -> Vector:
        return np.where(self.moved, self.parameters - values, 0.0)

    def step(self, rank: int, places: NDArray[np.int64], gradient: Vector, outer: Any) -> None:
        """Step as torch's SGD does."""
        momentum = self.momentum[rank, places] = outer.momentum * self.momentum[rank, places] + gradient
        ahead = gradient + outer.momentum * momentum
        self.parameters[rank, places] -= outer.lr * (ahead if outer.nesterov else momentum)


@dataclass
class Running:
    """An exchange with its states."""

    exchange: Exchange
    ranks: int
    round: int = 0
    rounds: dict[int, int] = field(default_factory=dict)
    pending: dict[int, Pending] = field(default_factory=dict)
    outer: Outer | None = None
    senders: dict[tuple[int, int], Send] = field(default_factory=dict)
    survivors: dict[tuple[int, int], Survivors] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.segments = segments_of(self.exchange)

    @property
    def period(self) -> int:
        """In each how manieth step it takes place: `log2_ranks` is ceil(log2 p)."""
        every = self.exchange.every
        return every if isinstance(every, int) else max(1, math.ceil(math.log2(self.ranks)))

    def due(self, step: int) -> list[Segment]:
        """Return the segments that are sent after a step."""
        every, exchange, count = self.period, self.exchange, len(self.segments)
        starts = [round((s.index + 1) * every / count) if exchange.stagger else 0 for s in self.segments]
        return [
            s
            for s, start in zip(self.segments, starts, strict=True)
            if (step - start - exchange.offset) % every == 0
        ]

    def meetings(
        self, segments: Sequence[Segment] | None = None
    ) -> Iterator[tuple[Segment, Part, Vector, float]]:
        """Yield segments, who exchanges them, M and s."""
        for segment in self.segments if segments is None else segments:
            parts = parts_of(self.exchange, self.ranks, segment.index)
            round = self.round if segments is None else self.rounds.get(segment.index, 0)
            for part in parts:
                matrix = matrix_of(self.exchange, part, round, segment.index)
                yield segment, part, matrix, scale_of(self.exchange, part, parts)

    def send_all(self, ranks: Sequence[int], offered: Sequence[Offered]) -> tuple[Vector, Vector]:
        """Return what gets through of what ranks offer, [ranks, n], and what their sum is multiplied by, [n]."""
        sent = [self.send(rank, each) for rank, each in zip(ranks, offered, strict=True)]
        messages, where = (np.stack(parts) for parts in zip(*sent, strict=True))
        collective = self.exchange.collective
        if isinstance(collective, SparseAllreduce) and collective.algorithm is not SparseAlgorithm.GATHER:
            where = self._through(ranks[0], offered[0], messages, where)
            messages = np.where(where, messages, 0.0)
        factors = np.ones(messages.shape[1])
        if getattr(collective, "mean", None) is Mean.CONTRIBUTORS:
            factors = len(ranks) / np.maximum(where.sum(0), 1)
        return messages, factors

    def _through(
        self, rank: int, offered: Offered, messages: Vector, where: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """Return what of messages comes through, of which nobody is told."""
        compressor = self.exchange.compressor
        if compressor is None or compressor.traits.keeps_residual or self.exchange.slot != "gradients":
            raise NoReferenceError(compressor)
        known = self.survivors.setdefault((rank, offered.segment), Survivors(offered.real, len(messages)))
        segment = self.segments[offered.segment]
        return known.through(messages, where, len(set(segment.parameters[segment.places >= 0].tolist())))

    def send(self, rank: int, offered: Offered) -> tuple[Vector, NDArray[np.bool_]]:
        """Return what gets through of what a rank offers, and where that is."""
        key = (rank, offered.segment)
        if key not in self.senders:
            self.senders[key] = sender_of(self.exchange.compressor)
        return self.senders[key](offered)


@dataclass
class Gradients:
    """The values of all ranks [ranks, n], their holders, and the weight of each element [ranks, n]."""

    values: Vector
    present: NDArray[np.bool_]
    weights: Vector


def exchange_gradients(running: Running, own: Gradients, parameters: Vector, *, alone: bool) -> Gradients:
    """Exchange gradients.

    Args:
        running: the exchange.
        own: what ranks have.
        parameters: [ranks, n], before the step.
        alone: whether it is the slot's only exchange.
    """
    result = Gradients(own.values.copy(), own.present.copy(), own.weights.copy())
    for segment, part, matrix, scale in running.meetings():
        sharing = part.ranks if alone else range(len(own.present))
        anywhere = np.any(own.present[list(sharing)], axis=0)[None]
        offered = []
        for rank in part.ranks:
            values = clipped(running.exchange.compressor, own.values[rank], len(part.ranks))[None]
            offered.append(
                Offered(
                    running.round,
                    segment.index,
                    segment.read(values)[0] * scale,
                    segment.places >= 0,
                    segment.read(anywhere)[0] != 0,
                    segment.read(parameters[rank : rank + 1])[0],
                    scale,
                )
            )
        messages, factors = running.send_all(part.ranks, offered)
        combined = matrix @ messages * factors
        weights = matrix @ segment.read(own.weights)[part.ranks] * scale
        present = matrix @ segment.read(own.present)[part.ranks] > 0
        for place, rank in enumerate(part.ranks):
            segment.write(result.values, rank, combined[place])
            segment.write(result.weights, rank, weights[place])
            segment.write(result.present, rank, present[place])
    running.round += 1
    return result


def exchange_parameters(
    running: Running, values: Vector, push_weights: Vector, segments: Sequence[Segment]
) -> tuple[Vector, Vector]:
    """Return the parameters, or distances from outer ones, and their push-sum weights, each [ranks, n]."""
    result, result_weights = values.copy(), push_weights.copy()
    for segment, part, matrix, scale in running.meetings(segments):
        own = segment.read(values)[part.ranks]
        nothing = np.ones_like(own[0])
        offered = [
            Offered(
                running.rounds.get(segment.index, 0),
                segment.index,
                x,
                segment.places >= 0,
                nothing.astype(bool),
                nothing,
                1.0,
            )
            for x in own
        ]
        messages, factors = running.send_all(part.ranks, offered)
        combined = scale * matrix @ messages * factors
        if running.outer is None:
            combined = own + combined - messages
        weights = matrix @ segment.read(push_weights)[part.ranks]
        for place, rank in enumerate(part.ranks):
            segment.write(result, rank, combined[place])
            if getattr(running.exchange.collective, "push_sum", False):
                segment.write(result_weights, rank, weights[place])
    for segment in segments:
        running.rounds[segment.index] = running.rounds.get(segment.index, 0) + 1
    return result, result_weights


class Parameters:
    """The parameters of all ranks, and what becomes of them after each step.

    Args:
        exchanges: of the parameters slot.
        values: where they begin, float64 [ranks, n].
    """

    def __init__(self, exchanges: Sequence[Exchange], values: Vector) -> None:
        self._running = [Running(exchange, len(values)) for exchange in exchanges]
        for running in self._running:
            if running.exchange.outer is not None:
                if not isinstance(running.exchange.outer, Sgd):
                    raise NoReferenceError(running.exchange.outer)
                running.outer = Outer(values.copy(), np.zeros_like(values), np.zeros(values.shape, bool))
        #: What optimizers step, and the push-sum weights that models compute without; each [ranks, n].
        self.values, self.push_weights = values, np.ones_like(values)
        self._left = values.copy()

    @property
    def debiased(self) -> Vector:
        """The values that models compute with."""
        return self.values / self.push_weights

    def end_step(self, step: int) -> None:
        """Exchange what is due after step number `step`, counted from 1."""
        for running in self._running:
            if running.outer is not None:
                running.outer.note(self.values != self._left)
            self._merge(running, step)
            due = running.due(step)
            if due:
                outer = running.outer
                offered = self.values if outer is None else outer.distances(self.values)
                moved = np.ones(self.values.shape, bool) if outer is None else outer.moved.copy()
                combined = exchange_parameters(running, offered, self.push_weights, due)
                for segment in due:
                    running.pending[segment.index] = Pending(step, self.values.copy(), *combined, moved)
                    if outer is not None:
                        outer.moved[:, segment.places[segment.places >= 0]] = False
            self._merge(running, step)
        self._left = self.values.copy()

    def settle(self) -> None:
        for running in self._running:
            self._merge(running)

    def _merge(self, running: Running, step: int | None = None) -> None:
        """Merge what has come after a step, or everything."""
        for segment in running.segments:
            pending = running.pending.get(segment.index)
            if pending is not None and (step is None or pending.step <= step - running.exchange.delay):
                del running.pending[segment.index]
                for part in parts_of(running.exchange, len(self.values), segment.index):
                    places = segment.places[segment.places >= 0]
                    places = places[pending.moved[part.ranks][:, places].any(0)]
                    for rank in part.ranks:
                        self._take(running, places, rank, pending)

    def _take(self, running: Running, places: NDArray[np.int64], rank: int, pending: Pending) -> None:
        come, outer, merge = pending.combined[rank, places], running.outer, running.exchange.merge
        if outer is not None:
            outer.step(rank, places, come, running.exchange.outer)
            come = outer.parameters[rank, places]
        own = self.values[rank, places]
        match merge:
            case AddDisplacement():
                self.values[rank, places] = own + come - pending.sent[rank, places]
            case Blend(local=local):
                self.values[rank, places] = local * own + (1 - local) * come
        self.push_weights[rank, places] = pending.push_weights[rank, places]


def reference(strategy: Strategy, ranks: int, steps: int) -> Vector:
    """Train one toy per rank in one process; return their parameters, float64 [ranks, n].

    Raises:
        NoReferenceError: a component that nothing is known of here.
    """
    if strategy.samples is not None:
        raise NoReferenceError(strategy.samples)
    models = [Toy() for _ in range(ranks)]
    optimizers = [optimizer_for(model) for model in models]
    # An exchange in which no two ranks meet is left out, and takes nothing over.
    meeting = [exchange for exchange in strategy.gradients if parts_of(exchange, ranks, segment=0)]
    compressors = (exchange.compressor for exchange in meeting)
    takes = {term for each in compressors if each for term in each.traits.applies_optimizer_terms}
    for optimizer in optimizers:
        optimizer.param_groups[0].update(dict.fromkeys(takes, 0.0))
    data = [batches(rank, steps) for rank in range(ranks)]
    gradients = [Running(exchange, ranks) for exchange in strategy.gradients]
    parameters = Parameters(strategy.parameters, np.stack([flat(model) for model in models]))
    for step in range(1, steps + 1):
        _load(models, parameters.debiased)
        own = _gradients(models, [of_rank[step - 1] for of_rank in data])
        for running in gradients:
            own = exchange_gradients(running, own, parameters.values, alone=len(gradients) == 1)
        parameters.values = _stepped(models, optimizers, own, parameters.values)
        parameters.end_step(step)
    parameters.settle()
    return parameters.debiased


def _gradients(models: list[Toy], of_ranks: list[Any]) -> Gradients:
    values, present = [], []
    for model, batch in zip(models, of_ranks, strict=True):
        parameters = list(model.parameters())
        given = torch.autograd.grad(loss_of(model, batch), parameters, allow_unused=True)
        values.append(
            torch.cat(
                [
                    (torch.zeros_like(p) if g is None else g).reshape(-1)
                    for p, g in zip(parameters, given, strict=True)
                ]
            )
        )
        present.append(
            torch.cat(
                [torch.full((p.numel(),), g is not None) for p, g in zip(parameters, given, strict=True)]
            )
        )
    stacked = torch.stack(values).numpy()
    return Gradients(stacked, torch.stack(present).numpy(), np.ones_like(stacked))


def _stepped(
    models: list[Toy], optimizers: list[torch.optim.SGD], gradients: Gradients, values: Vector
) -> Vector:
    """Step each rank's optimizer from `values`; return where it leads."""
    _load(models, values)
    for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        mean = torch.from_numpy(gradients.values[rank] / gradients.weights[rank])
        start = 0
        for parameter in model.parameters():
            stop = start + parameter.numel()
            # What a residual held back may come when nobody has a gradient any more.
            has = gradients.present[rank, start] or bool(mean[start:stop].any())
            parameter.grad = mean[start:stop].view_as(parameter) if has else None
            start = stop
        optimizer.step()
    return np.stack([flat(model) for model in models])


def _load(models: list[Toy], values: Vector) -> None:
    for model, vector in zip(models, values, strict=True):
        torch.nn.utils.vector_to_parameters(torch.from_numpy(vector.copy()), model.parameters())
