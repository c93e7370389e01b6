"""One parameter of a segment in one round: its way of sending, and the update of its residual."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hocket_redsync.kernels import Found, Memory, Ranking, Update
from hocket_redsync.kernels.api import NOTHING_PASSES
from hocket_redsync.message import Content, MessageForm
from hocket_redsync.selection import Method, Selected, capacity_of, most_selected, select
from hocket_redsync.state import ResidualState

if TYPE_CHECKING:
    from torch import Tensor

    from hocket.api import Array, Segment

__all__ = ["NO_INDICES", "Part", "Sending", "accelerate", "nonfinite_of", "nothing_of", "values_of"]

#: The places of a parameter that is sent whole: none.
NO_INDICES = np.empty(0, np.int32)


@dataclass(frozen=True)
class Sending:
    """The way that one parameter is sent.

    Attributes:
        method: the method that finds its communication-set.
        k: the number of elements wanted, 1 to numel, or 0 where there is none.
        form: the form in which they travel.
    """

    method: Method
    k: int
    form: MessageForm

    def expected_count(self, numel: int) -> float:
        """Return the elements that it sends on average: the threshold methods' sets have k to 2 k."""
        if self.form is MessageForm.DENSE:
            return numel
        return min(numel, 1.5 * self.k) if self.method in {Method.THRESHOLD, Method.SAMPLED} else self.k

    def most(self, numel: int) -> int:
        """Return the largest number of elements that it sends."""
        return numel if self.form is MessageForm.DENSE else most_selected(self.method, self.k, numel)


class Part:
    """One parameter in one round.

    Attributes:
        position: its place in the segment's list.
        sending: its way of sending.
        memory: its own.
        ranking: the order by which elements are large in this round.
        column: its floor's column.
    """

    def __init__(self, position: int, sending: Sending, memory: Memory, round: int) -> None:
        self.position = position
        self.sending = sending
        self.memory = memory
        self.ranking, self.column = Ranking.MAGNITUDE, 0
        if sending.form is MessageForm.MEAN:
            self.column = round % 2
            self.ranking = (Ranking.LARGEST, Ranking.SMALLEST)[self.column]

    @property
    def is_whole(self) -> bool:
        """True if all elements are sent."""
        return self.sending.form is MessageForm.DENSE

    def advance(self, state: ResidualState) -> object:
        """Update V and u, and look for candidates."""
        numel, dtype = len(self.memory.residual), self.memory.residual.dtype
        update = state.update(self.position, self.memory)
        if self.is_whole:
            return state.kernels.advance(self.memory, update, self.ranking, NOTHING_PASSES[dtype.itemsize], 0)
        floor = int(state.floors[self.position, self.column])
        capacity = capacity_of(self.sending.k, numel)
        return state.kernels.advance(self.memory, update, self.ranking, floor, capacity)

    def select(self, state: ResidualState, found: Found) -> Selected:
        """Return the communication-set, and remember the floor of the next round."""
        floors, ages = state.floors[self.position], state.ages
        selected = select(
            state.kernels,
            self.memory,
            self.ranking,
            self.sending.method,
            self.sending.k,
            found,
            int(floors[self.column]),
            int(ages[self.position]),
        )
        floors[self.column], ages[self.position] = selected.floor, selected.age
        return selected

    def send_all(self, values: Array, *, masking: bool) -> Content:
        """Return all elements, and keep nothing of them."""
        self.memory.residual.zero_()
        # A parameter that is dense by its method was never selected: its momentum is that without compression.
        if masking and self.memory.velocity is not None and self.sending.method is not Method.DENSE:
            self.memory.velocity.zero_()
        return Content(MessageForm.DENSE, len(values), values, NO_INDICES)


def nothing_of(segment: Segment) -> Content:
    """Return the content of a parameter that travels elsewhere: none."""
    return Content(MessageForm.SPARSE, 0, segment.outgoing_array[:0], NO_INDICES)


def accelerate(memory: Memory, update: Update) -> None:
    """Turn G into the optimizer's step, in place, as the collective sends it from there."""
    if update.parameter is not None:
        memory.given.add_(update.parameter, alpha=update.decay)
    if update.momentum:
        assert memory.velocity is not None
        memory.velocity.mul_(update.momentum).add_(memory.given)
        if update.nesterov:
            memory.given.add_(memory.velocity, alpha=update.momentum)
        else:
            memory.given.copy_(memory.velocity)


def values_of(parts: Sequence[Tensor]) -> list[Array]:
    """Return copies of flat tensors in host memory, brought there together."""
    import torch

    if not parts:
        return []
    together = torch.cat(list(parts)).cpu().numpy()
    return np.split(together, np.cumsum([len(part) for part in parts])[:-1])


def nonfinite_of(segment: Segment, sendings: Sequence[Sending], elsewhere: frozenset[int]) -> list[Content]:
    """Return contents that spoil the step as the gradient would: its NaN and Inf, up to a message's limit."""
    contents = []
    for position, (span, sending) in enumerate(zip(segment.spans, sendings, strict=True)):
        if position in elsewhere:
            contents.append(nothing_of(segment))
            continue
        values = segment.outgoing_array[span.start : span.stop]
        if sending.form is MessageForm.DENSE:
            contents.append(Content(MessageForm.DENSE, len(values), values, NO_INDICES))
            continue
        bad = np.flatnonzero(~np.isfinite(values))[: sending.k]
        values = values[bad]
        if sending.form is MessageForm.MEAN:
            values = values[:1] if len(bad) else np.zeros(1, values.dtype)
        contents.append(Content(sending.form, len(bad), values, (bad + span.start).astype(np.int32)))
    return contents
