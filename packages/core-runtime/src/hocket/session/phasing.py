"""A change of phase: what one strategy leaves behind, for the next one to begin from.

Outstanding exchanges finish, what residuals hold is sent, push-sum values are divided by their weights, momentum
goes back to the optimizer, and replicas are averaged if the next strategy would keep them equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hocket.segment.segment import Segment, view_of
from hocket.session.exchanging import OpenExchange

if TYPE_CHECKING:
    from hocket.session.takeover import Takeover

__all__ = ["LateGradients", "send_residuals"]


class LateGradients:
    """What residuals held at a change of phase: it joins the next step's gradients, on every rank.

    Args:
        parameters: the trainable ones by name.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._late: dict[str, Tensor] = {}

    def add(self, name: str, gradient: Tensor) -> None:
        """Keep a late gradient of a parameter for the next step; it is the same on every rank of its exchange."""
        self._late[name] = self._late[name] + gradient if name in self._late else gradient

    @torch.no_grad()
    def join(self) -> None:
        """Add what is late to the gradients that the optimizer is about to get."""
        late, self._late = self._late, {}
        for name, gradient in late.items():
            parameter = self._parameters[name]
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def state_dict(self) -> dict[str, Tensor]:
        """Return what is late, by parameter."""
        return dict(self._late)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from what `state_dict` returned."""
        self._late = {name: gradient.clone() for name, gradient in state.items()}


@torch.no_grad()
def send_residuals(
    opened: Sequence[OpenExchange],
    parameters: Mapping[str, nn.Parameter],
    late: LateGradients,
    takeover: Takeover | None,
) -> None:
    """Give every rank the mean of what the ranks' residuals and late contributions hold, and clear them; collective.

    Where the compressor applies momentum and weight decay, a residual holds velocity, which is stepped at once by
    the learning rate alone: as a gradient it would be given momentum a second time.
    """
    for each in opened:
        kept = [(segment, own) for segment in each.segments if (own := _take_kept(each, segment)) is not None]
        if not kept:
            continue
        lane = each.peer.lane(f"{each.exchange.name} residuals")
        for segment, own in kept:
            total = torch.empty_like(own)
            lane.iallreduce(own.numpy(), total.numpy()).wait()
            for span in segment.spans:
                parameter = parameters[span.name]
                value = view_of(total, span).to(parameter.device, parameter.dtype)
                if takeover is None:
                    late.add(span.name, value.clone(memory_format=torch.preserve_format))
                else:
                    parameter.add_(value, alpha=-takeover.learning_rate(parameter))
        lane.close()


def _take_kept(opened: OpenExchange, segment: Segment) -> Tensor | None:
    """Take what an exchange holds back of a segment, on the CPU; None, on all ranks alike, if it holds nothing back."""
    packing = opened.channel.packing
    if packing is None or not packing.compressor.keeps_residual:
        return opened.channel.take_late(segment)
    residual = packing.states[segment.index].residual
    if residual is None:
        return None
    own = residual.to("cpu", copy=True).contiguous()
    residual.zero_()
    return own
