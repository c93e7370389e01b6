"""One parameter of a segment in one round: its way of sending, and the update of its residual."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from hocket_redsync.kernels import Found, Memory, Ranking
from hocket_redsync.kernels.api import NOTHING_PASSES
from hocket_redsync.message import Content, MessageForm
from hocket_redsync.selection import Method, Selected, capacity_of, select
from hocket_redsync.sending import Sending
from hocket_redsync.state import ResidualState, SharedTerms

if TYPE_CHECKING:
    from torch import Tensor

    from hocket.api import Array, OptimizerTerms, Segment

#: The places of a parameter that is sent whole: none.
NO_INDICES = np.empty(0, np.int32)


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


def accelerate(state: ResidualState, segment: Segment) -> None:
    """Turn G of the parameters that travel elsewhere into the optimizer's step, in place.

    Those side by side with the same terms are one run of memory: a small one by itself would take as long.
    """
    import torch

    if state.shared_terms is None:
        state.shared_terms = _shared_terms(state)
    runs, decayed = state.shared_terms
    for its in decayed.values():
        if decay := state.decay(its[0][0]):
            given = [state.memories[position].given for _, position in its]
            torch._foreach_add_(given, [state.decayed(terms) for terms, _ in its], alpha=decay)
    momentum = state.momentum
    if momentum is None:
        return
    for terms, first, last in runs:
        place = slice(segment.spans[first].start, segment.spans[last].stop)
        terms.accelerate(segment.outgoing[place], momentum[place])


def _shared_terms(state: ResidualState) -> SharedTerms:
    rule = attrgetter("momentum", "nesterov", "continues")
    runs: list[tuple[OptimizerTerms, int, int]] = []
    decayed: dict[float, list[tuple[OptimizerTerms, int]]] = {}
    for position in sorted(state.elsewhere) if state.terms else ():
        terms, first = state.terms[position], position
        if terms is None:  # the optimizer does it, or the parameter has no gradient
            continue
        if terms.weight_decay:
            decayed.setdefault(terms.weight_decay, []).append((terms, position))
        if runs and runs[-1][2] == position - 1 and rule(runs[-1][0]) == rule(terms):
            first = runs.pop()[1]
        runs.append((terms, first, position))
    return runs, decayed


def values_of(parts: Sequence[Tensor]) -> list[Array]:
    """Return copies of flat tensors in host memory, brought there together."""
    import torch

    if not parts:
        return []
    together = torch.cat(list(parts)).cpu().numpy()
    return np.split(together, np.cumsum([len(part) for part in parts])[:-1])


def nonfinite_of(
    segment: Segment, sendings: Sequence[Sending], elsewhere: frozenset[int]
) -> dict[int, Content]:
    """Return, by position, what spoils the step as the gradient would: its NaN and Inf, up to a message's limit."""
    contents = {}
    for position, (span, sending) in enumerate(zip(segment.spans, sendings, strict=True)):
        if position in elsewhere:
            continue
        values = segment.outgoing_array[span.start : span.stop]
        if sending.form is MessageForm.DENSE:
            contents[position] = Content(MessageForm.DENSE, len(values), values, NO_INDICES)
            continue
        bad = np.flatnonzero(~np.isfinite(values))[: sending.k]
        values = values[bad]
        if sending.form is MessageForm.MEAN:
            values = values[:1] if len(bad) else np.zeros(1, values.dtype)
        places = (bad + span.start).astype(np.int32)
        contents[position] = Content(sending.form, len(bad), values, places)
    return contents
