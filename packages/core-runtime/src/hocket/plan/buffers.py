"""A model's buffers of which ranks may take the mean: statistics beside its parameters, as BatchNorm keeps them."""

from __future__ import annotations

from torch import Tensor, nn

from hocket.collective.allreduce import Allreduce
from hocket.segment.segment import wire_dtype
from hocket.transport.network import Cost, NetworkModel

__all__ = ["averaged_buffers", "mean_cost"]


def averaged_buffers(model: nn.Module) -> list[Tensor]:
    """Return the buffers of which there is a mean."""
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]


def mean_cost(model: nn.Module, size: int, network: NetworkModel) -> Cost:
    """Return what it costs a rank that `size` ranks set a model's buffers to their mean, by an allreduce."""
    nbytes = sum(buffer.numel() * wire_dtype(buffer.dtype).itemsize for buffer in averaged_buffers(model))
    return Allreduce().cost(nbytes, size, None, network)
