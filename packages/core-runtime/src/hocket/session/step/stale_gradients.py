"""The change of phase: the results that one strategy leaves for the next one.

Outstanding exchanges finish, residuals are sent, push-sum values are divided by their weights, momentum
goes back to the optimizer, and replicas are averaged if the next strategy would keep them equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from hocket.segment.shape import wire_dtype
from hocket.session.exchange.active import ActiveExchange
from hocket.strategy.exchange import Exchange
from hocket.transport.lane import Lane
from hocket.transport.peer import Peer

if TYPE_CHECKING:
    from hocket.session.step.optimizer_terms import AppliedTerms


class StaleGradients:
    """Residuals left by a finished phase, added to the next step's gradients on every rank.

    Args:
        parameters: the trainable ones by name.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._stale: dict[str, Tensor] = {}
        self._joined: set[str] = set()

    def add(self, name: str, gradient: Tensor) -> None:
        """Keep a stale gradient, equal on every rank of its exchange, for the next step."""
        self._stale[name] = self._stale[name] + gradient if name in self._stale else gradient

    @torch.no_grad()
    def join(self, parameters: Iterable[Tensor], loss_scale: Tensor | float = 1.0) -> None:
        """Add stale gradients to those of `parameters`, which an optimizer will divide by `loss_scale`."""
        if not self._stale:
            return
        used = set(map(id, parameters))
        for name, gradient in self._stale.items():
            parameter = self._parameters[name]
            if id(parameter) in used and parameter.requires_grad:  # a frozen one stays where it is
                self._joined.add(name)
                scaled = gradient * loss_scale
                parameter.grad = scaled if parameter.grad is None else parameter.grad + scaled

    def end_step(self, *, used: bool) -> None:
        """Drop stale gradients that the ended step has used; if it was skipped, keep them for the next."""
        if used:
            for name in self._joined:
                del self._stale[name]
        self._joined.clear()

    @torch.no_grad()
    def collect(
        self,
        exchanges: Sequence[Exchange],
        active: Sequence[ActiveExchange],
        peer: Peer,
        terms: AppliedTerms | None,
        carried: Mapping[str, Tensor],
    ) -> None:
        """Take over the mean of all ranks' residuals and unsent contributions; collective.

        Where the compressor applies momentum and weight decay, a residual holds velocity, which is stepped at once by
        the learning rate alone: as a gradient it would be given momentum a second time.

        Args:
            exchanges: the slot's, the same on every rank.
            active: the exchanges that this rank takes part in.
            peer: the ranks whose contributions end in one mean.
            terms: the optimizer's terms that the compressor applies.
            carried: this rank's share in what dropped gradients leave, by parameter, flat.
        """
        mine = {each.exchange.name: each for each in active}
        for exchange in exchanges:
            lane = peer.lane(f"{exchange.name} residuals")
            opened = mine.get(exchange.name)
            kept = {} if opened is None else _take_kept(opened)
            for name, share in carried.items() if exchange is exchanges[0] else ():
                kept[name] = kept[name] + share if name in kept else share
            scale = 0.0 if opened is None else opened.scale
            for name, value in _means(lane, kept, scale, self._parameters):
                parameter = self._parameters[name]
                if terms is None or not parameter.requires_grad:
                    self.add(name, value.clone(memory_format=torch.preserve_format))
                else:
                    parameter.add_(value, alpha=-terms.learning_rate(parameter))
            lane.close()

    def state_dict(self) -> dict[str, Tensor]:
        """Return stale gradients, by parameter."""
        return dict(self._stale)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a result of `state_dict`."""
        self._stale = {name: gradient.clone() for name, gradient in state.items()}


def _means(
    lane: Lane, kept: Mapping[str, Tensor], scale: float, parameters: Mapping[str, nn.Parameter]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the mean of the ranks' unsent values of each parameter in one exchange, if there are any."""
    any_kept = np.empty(1)
    lane.iallreduce(np.array([float(bool(kept))]), any_kept).wait()
    for name, parameter in parameters.items() if any_kept[0] else ():
        # Behind the values: what a gradient of 1 on every rank would add up to.
        own = torch.zeros(parameter.numel() + 1, dtype=wire_dtype(parameter.dtype))
        if name in kept:
            own[:-1], own[-1] = kept[name], scale
        total = torch.empty_like(own)
        lane.iallreduce(own.numpy(), total.numpy()).wait()
        if total[-1]:
            value = total[:-1].div_(total[-1]).as_strided(parameter.shape, parameter.stride())
            yield name, value.to(parameter.device, parameter.dtype)


def _take_kept(opened: ActiveExchange) -> dict[str, Tensor]:
    """Take an exchange's unsent values, by parameter, each flat; none where nothing is held back."""
    kept: dict[str, Tensor] = {}
    for segment in opened.segments:
        own = opened.channel.take_stale(segment)
        if own is not None:
            kept |= {span.name: own[span.start : span.stop] for span in segment.spans}
    return kept
