"""Partial allreduces in a session: each segment has rounds of its own, of which many can overlap."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from hocket.api import Channel, FunctionRequest, Outcome, Request, Segment, plain
from hocket_eager.partial_sum import PartialSum


class PartialAllreduceChannel(Channel):
    """The channel of partial allreduces: it proposes `outgoing` and fetches results into `incoming`.

    Args:
        segments: all segments of the channel.
        sums: the segments' sums by index, in the order in which all ranks have opened them.
        close: frees what the sums share; collective, after they have been closed.
    """

    def __init__(
        self, segments: Sequence[Segment], sums: Mapping[int, PartialSum], close: Callable[[], None]
    ) -> None:
        super().__init__(segments, {})
        self._sums = sums
        self._close = close

    def start(self, segments: Sequence[Segment], round: int) -> Request[Outcome]:
        [segment] = segments
        of_segment = self._sums[segment.index]
        of_segment.propose(segment.outgoing_array, round)
        summed = FunctionRequest(
            lambda: of_segment.ended(round), lambda timeout_s: of_segment.wait(round, timeout_s)
        )
        return summed.then(lambda _: of_segment.fetch(round, segment.incoming_array))

    def take_stale(self, segment: Segment) -> Tensor | None:
        of_segment = self._sums[segment.index]
        _, late = of_segment.left()
        of_segment.restore(None, late)
        return torch.from_numpy(late)[: segment.numel]

    def close(self) -> None:
        for of_segment in self._sums.values():
            of_segment.close()
        self._close()

    def state_dict(self) -> plain.Tree:
        state = {}
        for index, of_segment in self._sums.items():
            oldest, late = of_segment.left()
            state[str(index)] = {"oldest": oldest, "late": torch.from_numpy(late)}
        return state

    def resume(self, rounds: Mapping[int, int], state: plain.Tree | None) -> None:
        for index, of_segment in self._sums.items():
            of_segment.resume(rounds[index])
            if state is not None:
                saved = state[str(index)]
                of_segment.restore(saved["oldest"], saved["late"].numpy())
