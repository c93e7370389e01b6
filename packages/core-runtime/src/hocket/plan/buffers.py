"""The buffers of a model that ranks may average: statistics beside its parameters, as BatchNorm's."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import Tensor, nn

from hocket.collective.allreduce import Allreduce
from hocket.segment.shape import wire_dtype
from hocket.transport.network import Cost, NetworkModel

#: What modules call a statistic of the batches that they have seen: BatchNorm, InstanceNorm, and others' like them.
RUNNING = ("running_mean", "running_var")


def averaged_buffers(model: nn.Module, named: Sequence[str] = ()) -> dict[str, Tensor]:
    """Return the buffers that have a mean, by name: running statistics, and those that the user names.

    Args:
        named: more of them; `*` stands for any text.
    """
    return {
        name: buffer
        for name, buffer in model.named_buffers()
        if buffer.is_floating_point()
        and (name.rpartition(".")[2] in RUNNING or any(fnmatchcase(name, pattern) for pattern in named))
    }


def mean_cost(model: nn.Module, size: int, network: NetworkModel) -> Cost:
    """Return the cost for a rank of averaging a model's running statistics over `size` ranks, by an allreduce."""
    nbytes = sum(
        buffer.numel() * wire_dtype(buffer.dtype).itemsize for buffer in averaged_buffers(model).values()
    )
    return Allreduce().cost(nbytes, size, None, network)
