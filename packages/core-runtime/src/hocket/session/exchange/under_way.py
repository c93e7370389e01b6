"""Delayed exchanges under way while replicas are read: they are merged for reading, and put back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hocket.collective.api import Ends, Outcome
from hocket.segment.segment import Segment
from hocket.session.exchange.parameters import ParameterMix
from hocket.session.exchange.push_sum import KeptPushSum


@dataclass(frozen=True)
class _ExchangeBackup:
    """The state that merging one exchange changes, beside parameters.

    Attributes:
        mix: the exchange.
        received: each segment under way, with its sent and its received data, and its outcome.
        push_sum: its weights, and the values that they come with.
        outer: what puts back outer parameters and their optimizer's state, of each segment.
    """

    mix: ParameterMix
    received: Sequence[tuple[Segment, Tensor, Tensor, Outcome]]
    push_sum: KeptPushSum
    outer: Sequence[Callable[[], None]]


class UnderWay:
    """A backup of exchanges under way and of the tensors that they merge into.

    It waits for exchanges under way. A delay merges them steps later; a reader of the replicas merges them at once, and
    calls `put_back`, so that training continues unchanged. Without delays, nothing is copied.

    Args:
        exchanges: of this rank. Where others change its values between rounds (`Ends.OPEN`), nothing is put back:
            that would undo their changes.
        flats: the parameters' memory, and what was noted of it.
    """

    @torch.no_grad()
    def __init__(self, exchanges: Sequence[ParameterMix], flats: Sequence[Tensor]) -> None:
        are_open = any(mix.opened.exchange.collective.traits.ends is Ends.OPEN for mix in exchanges)
        delayed = [mix for mix in exchanges if mix.opened.exchange.delay and not mix.opened.idle]
        self._kept = [] if are_open else [_keep(mix) for mix in delayed]
        self._flats = [(flat, flat.clone()) for flat in flats] if self._kept else []

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore parameters and exchanges."""
        for flat, copy in self._flats:
            flat.copy_(copy)
        for kept in self._kept:
            for segment, outgoing, incoming, outcome in kept.received:
                segment.outgoing.copy_(outgoing)
                segment.incoming.copy_(incoming)
                kept.mix.opened.put_back(segment, outcome)
            kept.mix.push_sum.set(*kept.push_sum)
            for put_back in kept.outer:
                put_back()


def _keep(mix: ParameterMix) -> _ExchangeBackup:
    opened = mix.opened
    received = []
    for segment in opened.segments:
        if opened.started(segment):
            outcome = opened.receive(segment)
            received.append((segment, segment.outgoing.clone(), segment.incoming.clone(), outcome))
    outer = [each.backup() for each in mix.outer.values()]
    return _ExchangeBackup(mix, received, mix.push_sum.keep(), outer)
