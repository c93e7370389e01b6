"""Outer parameters of one segment: ranks send their distance from them, and step them by its mean.

Source: A. Douillard et al., "DiLoCo", arXiv:2311.08105, algorithm 1, and for segments that are due at different steps
and merged later "Streaming DiLoCo", arXiv:2501.18512, algorithm 2. The outer optimizer steps when the mean has arrived.

Each rank's distance counts as much as the batches that made it since the last: its own, or, where gradients are
exchanged, those of all ranks that it stepped with. A rank that was out of data counts less, or nothing. This weight
travels behind it, as a gradient's weight does, and where ranks mix their outer parameters these follow.

A parameter that no rank has moved since the last merge, as a frozen one, takes no part, as an optimizer leaves
parameters without gradients alone: it stays as it is, and so do its outer one, its momentum and its residual.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from hocket.plan.layout import OUTER, WEIGHT
from hocket.segment.segment import Segment, view_of
from hocket.segment.storage import Pieces
from hocket.session.exchange.active import ActiveExchange
from hocket.session.exchange.segment_state import WEIGHT_TOLERANCE
from hocket.session.island import Island
from hocket.session.step.kept_values import KeptValues
from hocket.strategy.exchange import Exchange
from hocket.transport.lane import Lane

# The integers of as many bytes as an element has.
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class OuterSegment:
    """The outer parameters φ of a segment, with the outer optimizer's state.

    Args:
        exchange: an exchange with an outer optimizer.
        segment: its `outgoing` gets distances, and its `incoming` their combination.
        pieces: the places of the parameters θ, which φ begins with.
        any_frozen: returns whether a parameter is frozen on this rank now.
        island: the ranks that hold the replica together: a parameter has moved if any of its shards has.
    """

    def __init__(
        self,
        exchange: Exchange,
        segment: Segment,
        pieces: Pieces,
        any_frozen: Callable[[], bool],
        island: Island,
    ) -> None:
        assert exchange.outer is not None
        self._exchange, self._outer = exchange, exchange.outer
        self._segment, self._pieces = segment, pieces
        data = segment.outgoing[: segment.numel]
        #: φ, flat.
        self.parameters = _zeros_like(data, exchange)
        self._state = {name: _zeros_like(data, exchange) for name in self._outer.remembers}
        # θ when it was sent, for merges that ask.
        self._sent = torch.zeros_like(data) if exchange.keeps_sent else None
        # What batches have counted since θ was sent, and in how many steps.
        self._counted = torch.zeros(2, dtype=torch.float64)
        self._places = [slice(span.start, span.start + span.numel) for span in segment.spans]
        # Where each parameter's θ lies.
        self._targets = [_target_in(pieces, own) for own in self._places]
        # Whether θ is φ, to the bit, until it moves; if not, what tells of each that it has: sums of its bits as they
        # were left, and whether it had moved before the last merge, since it was sent.
        whole = exchange.merge.takes_all and not exchange.delay
        self._is_outer = whole and all(t.dtype == data.dtype for t in self._targets)
        self._sums = torch.zeros(len(self._places), 2, dtype=torch.int64)
        self._had_moved = torch.zeros(len(self._places), dtype=torch.bool)
        # What is saved of that: on how many of the ranks it has moved, as a share.
        self._moved_share = torch.zeros(len(self._places), dtype=torch.float64)
        # Whether a combination is 0 for a parameter only if no rank has moved it.
        compressor = exchange.compressor
        self._shows_rest = compressor is None or not compressor.traits.leaves_out
        self._any_frozen, self._island = any_frozen, island
        self._rests: Sequence[int] | None = None
        self._held = KeptValues()
        self.begin()

    def begin(self) -> None:
        """Begin with the current parameters as the outer ones."""
        for place, target in self._pieces:
            self.parameters[place].copy_(target)
        self._note_placed()

    def _note_placed(self) -> None:
        """Note θ's checksums after a write to it that is no training, to detect training from now on."""
        if not self._is_outer:
            self._sums.copy_(self._sums_now())

    def _note_moved(self) -> None:
        """Note what training has moved so far, before a write to θ that is none."""
        if not self._is_outer:
            self._had_moved.copy_(self._has_moved())

    def _sums_now(self) -> Tensor:
        views = [t.detach().view(_BITS[t.itemsize]) for t in self._targets]
        # Squares, too: opposite changes of two elements leave a sum as it is.
        return torch.stack([s for bits in views for s in (bits.sum(), (bits * bits).sum())]).cpu().view(-1, 2)

    def _has_moved(self) -> Tensor:
        return self._had_moved | (self._sums_now() != self._sums).any(1)

    def moved(self) -> Sequence[bool]:
        """Return of each parameter whether it has moved, other than by merges, since it was sent."""
        if self._is_outer:
            pairs = zip(self._places, self._targets, strict=True)
            moved = [not torch.equal(self._on_model_device(place), target) for place, target in pairs]
        else:
            moved = self._has_moved().tolist()
        return self._island.any_of(moved)

    def hold(self, residual: Tensor | None, anywhere: Sequence[bool]) -> None:
        """Keep the residuals of parameters that no rank has moved out of the next message.

        Args:
            residual: the compressor's.
            anywhere: of each parameter, whether any rank has moved it since the last merge.
        """
        self._rests = [number for number, moved in enumerate(anywhere) if not moved]
        self._held.keep(residual, [self._places[number] for number in self._rests], empty=True)

    def give_back(self) -> None:
        """Give the held residuals back to the compressor."""
        self._held.give_back()

    def count(self, weight: float) -> None:
        """Count a step, whose batches had the weight `weight`."""
        self._counted += torch.tensor((weight, 1.0), dtype=torch.float64)

    @property
    def steps(self) -> int:
        """Return the number of steps since θ was sent."""
        return round(float(self._counted[1]))

    @property
    def weight(self) -> float:
        """Return the mean weight of batches over the steps since θ was sent."""
        weight = float(self._counted[0] / self._counted[1]) if self.steps else 1.0
        return 1.0 if abs(weight - 1) <= WEIGHT_TOLERANCE else weight

    def send(self, mean_weight: float = 1.0) -> None:
        """Fill `outgoing` with this rank's distance φ - θ times its weight, and the weight behind it.

        Args:
            mean_weight: the ranks' mean weight, a divisor where a compressor keeps a residual for later rounds, whose
                weights may differ; 0 where no rank's batches have counted.
        """
        segment = self._segment
        for place, target in self._pieces:
            torch.sub(self._on_model_device(place), target, out=segment.outgoing[place])
            if self._sent is not None:
                self._sent[place].copy_(target)
        if not self._is_outer:  # what is left of θ - φ by a blend, or by rounding, is no step
            for place, moved in zip(self._places, self.moved(), strict=True):
                if not moved:
                    segment.outgoing[place] = 0
            self._had_moved.zero_()
            self._note_placed()
        weight = self.weight / (mean_weight or 1.0)
        if weight != 1.0:
            segment.outgoing[: segment.numel].mul_(weight)
        segment.outgoing_trailer[WEIGHT] = weight
        if self._outer.mixes:
            torch.from_numpy(segment.outgoing_trailer[OUTER:]).copy_(self.parameters)
        self._counted.zero_()

    def take(self, scale: float) -> None:
        """Step by the received mean distance, and merge the outer parameters into the parameters.

        Args:
            scale: the factor that makes a combination the mean of the ranks' distances.
        """
        segment = self._segment
        factor = scale
        if self._exchange.collective.traits.divides_by_weight:
            mean_weight = float(segment.incoming_trailer[WEIGHT]) * scale
            if mean_weight and abs(mean_weight - 1) > WEIGHT_TOLERANCE:
                factor /= mean_weight
        gradient = segment.incoming[: segment.numel]
        if factor != 1.0:
            gradient.mul_(factor)
        mean = segment.incoming[segment.numel + OUTER :].mul_(scale) if self._outer.mixes else None
        rests = self._at_rest(gradient)
        own, theirs = KeptValues(), KeptValues()
        for kept in (self.parameters, *self._state.values()):
            theirs.keep(kept, [self._places[number] for number in rests])
        for number in () if self._is_outer else rests:
            own.keep(self._targets[number], [slice(None)])
        self.step(gradient, mean)
        theirs.give_back()
        self._note_moved()
        for place, target in self._pieces:
            self._merge(place, target)
        own.give_back()
        self._note_placed()

    def _at_rest(self, gradient: Tensor) -> Sequence[int]:
        """Return the numbers of parameters that no rank has moved, the same on all ranks of a combination."""
        self.give_back()
        rests, self._rests = self._rests, None
        if rests is not None:
            return rests
        goes_on = self._state or self._outer.mixes or not self._is_outer
        if not (goes_on and self._shows_rest):
            return []
        # A look waits for the device: there only what is frozen, as it is on all ranks, is looked for.
        if gradient.device.type != "cpu" and not self._any_frozen():
            return []
        moved = self._island.any_of(torch.stack([gradient[place].any() for place in self._places]).tolist())
        return [number for number, any_moved in enumerate(moved) if not any_moved]

    def step(self, gradient: Tensor, mean: Tensor | None = None) -> None:
        """Step the outer parameters by a mean distance [numel], which may be overwritten."""
        here = self.parameters.device
        self._outer.step(
            self.parameters, gradient.to(here), self._state, None if mean is None else mean.to(here)
        )

    def _on_model_device(self, place: slice) -> Tensor:
        """Return outer parameters on the model's device."""
        return self.parameters[place].to(self._segment.outgoing.device)

    def _merge(self, place: slice, target: Tensor) -> None:
        exchange, outer = self._exchange, self._on_model_device(place)
        if exchange.merge.takes_all and not exchange.delay:
            target.copy_(outer)
        else:
            exchange.merge.merge(target, outer, None if self._sent is None else self._sent[place])

    def show(self) -> Callable[[], None]:
        """Set parameters to the outer ones, which is no training.

        Returns:
            What forgets it, to be called when the parameters are as they were.
        """
        forget = _backup((self._sums, self._had_moved))
        self._note_moved()
        for place, target in self._pieces:
            target.copy_(self.parameters[place])
        self._note_placed()
        return forget

    def backup(self) -> Callable[[], None]:
        """Return what puts back all that a merge changes here, parameters aside."""
        sent = () if self._sent is None else (self._sent,)
        put_back_tensors = _backup(
            (self.parameters, *self._state.values(), *sent, self._counted, self._sums, self._had_moved)
        )
        rests = self._rests

        def put_back() -> None:
            put_back_tensors()
            self._rests = rests

        return put_back

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return the state for a resumed run, by parameter."""
        sent = {} if self._sent is None else {"sent": self._sent}
        kept = {"outer": self.parameters, **self._state, **sent}
        if not self._is_outer:
            self._moved_share.copy_(self._has_moved())
        return {
            span.name: {name: view_of(flat, span) for name, flat in kept.items()}
            | {"counted": self._counted, "moved": self._moved_share[number : number + 1]}
            for number, span in enumerate(self._segment.spans)
        }

    @property
    def remembered(self) -> dict[str, dict[str, Tensor]]:
        """Return the outer optimizer's state, by parameter."""
        return {
            span.name: {name: view_of(flat, span) for name, flat in self._state.items()}
            for span in self._segment.spans
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Continue from a result of `state_dict` or `remembered`, as far as it goes."""
        for name, kept in self.state_dict().items():
            for key, value in state.get(name, {}).items():
                if key in kept:
                    kept[key].copy_(value)
        if not self._is_outer:  # parameters are as they were saved
            self._had_moved.copy_(self._moved_share > 0)
            self._note_placed()


def _backup(tensors: Sequence[Tensor]) -> Callable[[], None]:
    """Return what sets tensors to the values that they hold now."""
    copies = [tensor.clone() for tensor in tensors]

    def put_back() -> None:
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.copy_(copy)

    return put_back


def agree_on_weights(
    outer: Mapping[int, OuterSegment], due: Sequence[int], opened: ActiveExchange, lane: Lane
) -> dict[int, float]:
    """Return the ranks' mean batch weight, by the index of segments that are due; collective.

    Residuals of parameters that no rank has moved are held back from the segments.

    Args:
        outer: the outer parameters of each segment.
        due: the segments that are sent now.
        opened: their exchange, through a compressor with residuals.
        lane: among its ranks.
    """
    moved = {index: outer[index].moved() for index in due}
    own = np.array([n for index in due for n in (outer[index].weight, *moved[index])], np.float64)
    total = np.empty_like(own)
    opened.wait_for(lambda: lane.iallreduce(own, total), "weights", own.nbytes)
    means, start = {}, 0
    assert opened.channel.packing is not None
    for index in due:
        means[index] = float(total[start]) / lane.size
        end = start + 1 + len(moved[index])
        outer[index].hold(
            opened.channel.packing.states[index].residual, (total[start + 1 : end] != 0).tolist()
        )
        start = end
    return means


def _zeros_like(data: Tensor, exchange: Exchange) -> Tensor:
    """Return zeros where an exchange keeps its outer parameters: beside the data, or in host memory."""
    if not exchange.offload:
        return torch.zeros_like(data)
    return torch.zeros_like(data, device=torch.device("cpu"), pin_memory=data.device.type == "cuda")


def _target_in(pieces: Pieces, own: slice) -> Tensor:
    """Return one parameter's part of the pieces' memory; a whole piece itself, which may be moved (shards)."""
    return next(
        target if place == own else target[own.start - place.start : own.stop - place.start]
        for place, target in pieces
        if place.start <= own.start and own.stop <= place.stop
    )
