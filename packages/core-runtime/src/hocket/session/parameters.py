"""The parameters' moment: what crosses the wire when the optimizer has stepped.

With overlap none the exchange is final when `optimizer.step()` returns.
"""

from __future__ import annotations

import torch

from hocket.errors import NonFiniteError
from hocket.segment.segment import Segment
from hocket.session.exchanging import OpenExchange

__all__ = ["ParameterMoment"]


class ParameterMoment:
    """Carries out the parameters slot's exchanges, in order, after each step.

    Args:
        opened: the slot's exchanges, each over more than one rank.
        targets: for each exchange, the flat part of the parameter storage of each of its segments.
        rank: for messages.
    """

    def __init__(self, opened: list[OpenExchange], targets: list[list[torch.Tensor]], rank: int) -> None:
        self._exchanges = list(zip(opened, targets, strict=True))
        self._rank = rank

    def after_step(self, step: int) -> None:
        """Carry out what is due after step number `step`, counted from 1.

        Raises:
            NonFiniteError: a parameter that was about to be sent is NaN or Inf.
        """
        for opened, targets in self._exchanges:
            if step % opened.exchange.every == 0:
                with torch.no_grad():
                    self._exchange(opened, targets, step)

    def _exchange(self, opened: OpenExchange, targets: list[torch.Tensor], step: int) -> None:
        for segment, target in zip(opened.segments, targets, strict=True):
            self._refuse_nonfinite(segment, target, step)
            if segment.outgoing.data_ptr() != target.data_ptr():
                segment.outgoing.copy_(target)
            opened.start(segment)
        for segment, target in zip(opened.segments, targets, strict=True):
            opened.finish(segment)
            if segment.incoming.dtype == target.dtype:
                torch.mul(segment.incoming, opened.scale, out=target)
            else:
                target.copy_(segment.incoming.mul_(opened.scale))
        opened.end_round()

    def _refuse_nonfinite(self, segment: Segment, target: torch.Tensor, step: int) -> None:
        if bool(torch.isfinite(target.sum())):
            return
        for span in segment.spans:
            if not bool(torch.isfinite(target[span.start : span.stop]).all()):
                raise NonFiniteError(
                    f"parameter {span.name} of rank {self._rank} is NaN or Inf after step {step}: it is not sent"
                )
