"""What delayed exchanges have under way while somebody looks at the replicas: it is merged to look, and put back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hocket.collective.api import Outcome
from hocket.segment.segment import Segment
from hocket.session.parameters import ParameterMix

__all__ = ["UnderWay"]


@dataclass(frozen=True)
class _Kept:
    """What merging one exchange changes, beside parameters.

    Attributes:
        mix: the exchange.
        come: each segment that is under way, with what was sent, what came, and its outcome.
        weights, values: the push-sums.
        outer: what outer parameters and their optimizer remember, in their own memory and copied.
    """

    mix: ParameterMix
    come: Sequence[tuple[Segment, Tensor, Tensor, Outcome]]
    weights: dict[int, float]
    values: dict[int, Tensor]
    outer: Sequence[tuple[Tensor, Tensor]]


class UnderWay:
    """A place in training to come back to: what is under way, and what it would be merged into.

    Waits for what is under way. A delay merges it steps later; who looks merges it at once, and puts it back by
    `put_back`, so that training goes on as if nobody had looked. Without delays, nothing is copied.

    Args:
        exchanges: of this rank. Where others change its values between rounds (`passive`), nothing is put back, as it
            would undo what they have changed.
        flats: the parameters.
    """

    @torch.no_grad()
    def __init__(self, exchanges: Sequence[ParameterMix], flats: Sequence[Tensor]) -> None:
        passive = any(mix.opened.exchange.collective.traits.passive for mix in exchanges)
        delayed = [mix for mix in exchanges if mix.opened.exchange.delay and not mix.opened.idle]
        self._kept = [] if passive else [_keep(mix) for mix in delayed]
        self._flats = [(flat, flat.clone()) for flat in flats] if self._kept else []

    @torch.no_grad()
    def put_back(self) -> None:
        """Let parameters and exchanges hold what they held."""
        for flat, copy in self._flats:
            flat.copy_(copy)
        for kept in self._kept:
            for segment, outgoing, incoming, outcome in kept.come:
                segment.outgoing.copy_(outgoing)
                segment.incoming.copy_(incoming)
                kept.mix.opened.put_back(segment, outcome)
            kept.mix.set_weights(kept.weights, kept.values)
            for tensor, copy in kept.outer:
                tensor.copy_(copy)


def _keep(mix: ParameterMix) -> _Kept:
    opened = mix.opened
    come = []
    for segment in opened.segments:
        if opened.started(segment):
            outcome = opened.receive(segment)
            come.append((segment, segment.outgoing.clone(), segment.incoming.clone(), outcome))
    remembered: list[dict[str, Any]] = [
        of_parameter for outer in mix.outer.values() for of_parameter in outer.state_dict().values()
    ]
    tensors = {id(t): t for of_parameter in remembered for t in of_parameter.values()}
    return _Kept(mix, come, dict(mix.weights), mix.values(), [(t, t.clone()) for t in tensors.values()])
