"""Values that a program writes into parameters after a step, such as its best weights or a moving average.

A consensus and a close then keep what was written, in place of merging exchanges under way into it, or of showing outer
parameters that do not have it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hocket.collective.api import Ends
from hocket.segment.storage import ParameterStorage
from hocket.strategy.exchange import Exchange, Overlap

#: Elements of each parameter that are looked at.
_SAMPLES = 16


class ValuesLeft:
    """The values of some elements of each parameter, as the session has left them.

    Samples also tell weights that were swapped out and in again from others. Where exchanges themselves change
    parameters between steps, nothing is noted.

    Args:
        storage: the parameters' memory.
        exchanges: of parameters, on any rank.
    """

    def __init__(self, storage: ParameterStorage, exchanges: Sequence[Exchange]) -> None:
        #: Whether a consensus or a close could lose what is written; the same on all ranks.
        self.matters = any(each.delay or each.outer for each in exchanges) and all(
            each.overlap is Overlap.NONE and each.collective.traits.ends is not Ends.OPEN
            for each in exchanges
        )
        self._sampled = storage.sampled(_SAMPLES) if self.matters else []
        #: What was noted of each buffer.
        self.samples = [flat.new_empty(len(places)) for flat, places in self._sampled]
        self.note()

    @torch.no_grad()
    def note(self, *, written: bool = False) -> None:
        """Note the parameters' values: what differs from them later is a program's; if `written`, they are already."""
        for (flat, places), samples in zip(self._sampled, self.samples, strict=True):
            torch.index_select(flat, 0, places, out=samples)
            if written:
                samples.fill_(math.nan)

    @torch.no_grad()
    def were_written(self) -> bool:
        """Return whether a program has written parameters since the last note."""
        noted = zip(self._sampled, self.samples, strict=True)
        return any(not _same_bits(flat.index_select(0, places), then) for (flat, places), then in noted)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
