"""A tensor's mean over the ranks of a lane."""

from __future__ import annotations

import torch
from torch import Tensor

from hocket.segment.shape import wire_dtype
from hocket.transport.lane import Lane

_CHUNK_NUMEL = 1 << 22


@torch.no_grad()
def set_to_mean(tensor: Tensor, lane: Lane, share: float = 1.0) -> None:
    """Set `tensor` (any shape) to its mean over the lane's ranks, in blocks of a few million elements; collective.

    Args:
        share: the weight of this rank's tensor; the ranks' shares have the mean 1.
    """
    flat = tensor.detach().reshape(-1)
    dtype = wire_dtype(tensor.dtype)
    for start in range(0, flat.numel(), _CHUNK_NUMEL):
        own = flat[start : start + _CHUNK_NUMEL].to(device="cpu", dtype=dtype).contiguous()
        if share != 1.0:
            own = own * share
        total = torch.empty_like(own)
        lane.iallreduce(own.numpy(), total.numpy()).wait()
        flat[start : start + _CHUNK_NUMEL] = total.div_(lane.size).to(flat.device)
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view_as(tensor))
