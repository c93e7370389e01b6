"""Partial allreduces in a session: each segment has rounds of its own, many of which can be under way at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hocket.api import Channel, Outcome, Request, Segment
from hocket_eager.partial_sum import PartialSum

__all__ = ["PartialAllreduceChannel"]


class PartialAllreduceChannel(Channel):
    """Proposes `outgoing`, and puts into `incoming` what `PartialSum.fetch` gives.

    Args:
        segments: all of the channel.
        sums: each segment's, by its index, in the order in which all ranks have opened them.
        close: gives back what they share; collective, after they have been closed.
    """

    def __init__(
        self, segments: Sequence[Segment], sums: Mapping[int, PartialSum], close: Callable[[], None]
    ) -> None:
        super().__init__(segments, {})
        self._sums = sums
        self._close = close

    def start(self, segments: Sequence[Segment], round: int) -> Request:
        [segment] = segments
        of_segment = self._sums[segment.index]
        of_segment.propose(segment.outgoing_array, round)
        return _Step(of_segment, segment, round)

    def take_stale(self, segment: Segment) -> Tensor | None:
        of_segment = self._sums[segment.index]
        _, late = of_segment.left()
        of_segment.restore(None, late)
        return torch.from_numpy(late)[: segment.numel]

    def close(self) -> None:
        for of_segment in self._sums.values():
            of_segment.close()
        self._close()

    def state_dict(self) -> dict[str, Any]:
        state = {}
        for index, of_segment in self._sums.items():
            oldest, late = of_segment.left()
            state[str(index)] = {"oldest": oldest, "late": torch.from_numpy(late)}
        return state

    def resume(self, round: int, state: dict[str, Any] | None) -> None:
        for index, of_segment in self._sums.items():
            of_segment.resume(round)
            if state is not None:
                saved = state[str(index)]
                of_segment.restore(saved["oldest"], saved["late"].numpy())


class _Step(Request):
    """One segment's exchange in one step."""

    __slots__ = ("_of_segment", "_outcome", "_segment", "_step")

    def __init__(self, of_segment: PartialSum, segment: Segment, step: int) -> None:
        self._of_segment = of_segment
        self._segment = segment
        self._step = step
        self._outcome: Outcome | None = None

    def done(self) -> bool:
        if self._outcome is None and self._of_segment.ended(self._step):
            self._outcome = self._of_segment.fetch(self._step, self._segment.incoming_array)
        return self._outcome is not None

    def wait(self, timeout_s: float | None = None) -> Outcome:
        if not self.done():
            self._of_segment.wait(self._step, timeout_s)
        assert self.done()
        assert self._outcome is not None
        return self._outcome

    @property
    def result(self) -> Outcome | None:
        return self._outcome
