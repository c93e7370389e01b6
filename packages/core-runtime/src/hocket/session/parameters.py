"""The parameters' moment: what crosses the wire when the optimizer has stepped, and when it is merged.

- overlap none: the exchange is final when `optimizer.step()` returns.
- overlap forward: it is under way during data loading and the next forward; each segment is merged before it is
  first read (see `forward_merge`). The same numbers as none.
- overlap delayed: it is under way during the whole next step, and merged after that one's optimizer step as
  x += combination - what was sent, which keeps the replicas' mean. Staleness 1 (Assran et al. 2019, Overlap-SGP).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hocket.errors import NonFiniteError
from hocket.segment.segment import Segment
from hocket.session.exchanging import OpenExchange
from hocket.strategy.exchange import Overlap

__all__ = ["ParameterExchange", "ParameterMoment"]


class ParameterExchange:
    """One exchange of the slot, with what of it is under way.

    Args:
        opened: over more than one rank.
        targets: the flat part of the parameter storage of each segment.
        rank: for messages.
    """

    def __init__(self, opened: OpenExchange, targets: Sequence[Tensor], rank: int) -> None:
        self.opened = opened
        self.overlap = opened.exchange.overlap
        self._targets = targets
        self._rank = rank

    def start(self, step: int) -> None:
        """Send all segments.

        Raises:
            NonFiniteError: a parameter that was about to be sent is NaN or Inf.
        """
        for segment, target in zip(self.opened.segments, self._targets, strict=True):
            self._refuse_nonfinite(segment, target, step)
            if segment.outgoing.data_ptr() != target.data_ptr():
                segment.outgoing.copy_(target)
            self.opened.start(segment)

    def merge(self, index: int) -> None:
        """Finish segment number `index`, if it is under way, and write what came of it into the parameters."""
        segment, target = self.opened.segments[index], self._targets[index]
        if not self.opened.started(segment):
            return
        self.opened.finish(segment)
        combined = segment.incoming
        if self.overlap is Overlap.DELAYED:
            # What the parameters did since they were sent stays.
            target.add_(combined.mul_(self.opened.scale).sub_(segment.outgoing))
        elif combined.dtype == target.dtype:
            torch.mul(combined, self.opened.scale, out=target)
        else:
            target.copy_(combined.mul_(self.opened.scale))
        if self.opened.idle:
            self.opened.end_round()

    def merge_all(self) -> None:
        """Finish and merge everything that is under way."""
        for segment in self.opened.segments:
            self.merge(segment.index)

    def _refuse_nonfinite(self, segment: Segment, target: Tensor, step: int) -> None:
        if bool(torch.isfinite(target.sum())):
            return
        for span in segment.spans:
            if not bool(torch.isfinite(target[span.start : span.stop]).all()):
                raise NonFiniteError(
                    f"parameter {span.name} of rank {self._rank} is NaN or Inf after step {step}: it is not sent"
                )


class ParameterMoment:
    """Carries out the slot's exchanges, in order, after each step."""

    def __init__(self, exchanges: Sequence[ParameterExchange]) -> None:
        self.exchanges = exchanges

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Merge what is under way and start what is due after step number `step`, counted from 1."""
        for exchange in self.exchanges:
            exchange.merge_all()
            if step % exchange.opened.exchange.every == 0:
                exchange.start(step)
                if exchange.overlap is Overlap.NONE:
                    exchange.merge_all()

    @torch.no_grad()
    def settle(self) -> None:
        """Merge everything that is under way."""
        for exchange in self.exchanges:
            exchange.merge_all()
