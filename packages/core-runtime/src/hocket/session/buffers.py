"""Buffers that ranks average with the parameters: statistics that a model gathers, as BatchNorm does."""

from __future__ import annotations

from collections import defaultdict
from functools import partial

import torch
from torch import Tensor, nn

from hocket.plan.buffers import averaged_buffers, mean_cost
from hocket.segment.segment import wire_dtype
from hocket.session.exchange import ActiveExchange
from hocket.transport.network import NetworkModel

__all__ = ["BufferMean"]


class BufferMean:
    """Averages a model's buffers over the ranks of an exchange, at once; construction and closing are collective.

    Args:
        opened: whose ranks average, and whose counters count it.
        model: whose buffers; they are looked up each time, as a module may put another tensor in a buffer's place.
    """

    def __init__(self, opened: ActiveExchange, model: nn.Module) -> None:
        self._opened, self._model = opened, model
        self._lane = opened.peer.lane(f"{opened.exchange.name} buffers")

    @torch.no_grad()
    def average(self) -> None:
        """Set the buffers to their mean; collective."""
        alike: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for buffer in averaged_buffers(self._model):
            alike[wire_dtype(buffer.dtype)].append(buffer)
        for dtype, buffers in alike.items():
            own = torch.cat([buffer.reshape(-1).to("cpu", dtype) for buffer in buffers])
            total = torch.empty_like(own)
            send, receive = own.numpy(), total.numpy()
            self._opened.wait_for(partial(self._lane.iallreduce, send, receive), "buffers", send.nbytes)
            pieces = total.div_(self._lane.size).split([buffer.numel() for buffer in buffers])
            for buffer, piece in zip(buffers, pieces, strict=True):
                buffer.copy_(piece.view_as(buffer))
        # Bytes do not depend on the network.
        self._opened.counters.bytes_sent += mean_cost(self._model, self._lane.size, NetworkModel()).bytes

    def close(self) -> None:
        """Close the lane; collective."""
        self._lane.close()
