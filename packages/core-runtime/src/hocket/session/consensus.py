"""The replicas' mean: to evaluate, to save, and to go on from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hocket.segment.segment import wire_dtype
from hocket.session.api import SessionState
from hocket.session.optimizers import Optimizers
from hocket.transport.lane import Lane

if TYPE_CHECKING:
    from hocket.session.session import Session

__all__ = ["Consensus", "average_optimizers", "distance_from_mean"]

_CHUNK_NUMEL = 1 << 22


class Consensus:
    """The model at the replicas' mean; as a context manager it gives the rank's own replica back.

    Where the strategy keeps replicas equal, parameters are left alone, bit for bit.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._outer = session.state
        self._tensors = [] if session.replicas_equal else list(session.flats)
        self._tensors += [b for b in session.model.buffers() if b.is_floating_point()]
        if session.size == 1:
            self._tensors = []
        with torch.no_grad():
            self._own = [tensor.clone() for tensor in self._tensors]
            # Push-sum keeps the mean of its values, not of what they are divided to.
            self._parameters = session.phase.parameters
            self._parameters.before_step()
            self._push_sums = self._parameters.push_sums()
            for tensor in self._tensors:
                _set_to_mean(tensor, session.control)
            for unrounded in self._parameters.unrounded():
                _set_to_mean(unrounded.value, session.control)
                unrounded.show()
            self._parameters.reset_weights()

    def __enter__(self) -> None:
        self._outer, self._session.state = self._session.state, SessionState.SETTLED

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with torch.no_grad():
            for tensor, own in zip(self._tensors, self._own, strict=True):
                tensor.copy_(own)
        self._parameters.restore(self._push_sums)
        if self._session.state is SessionState.SETTLED:
            self._session.state = self._outer


def distance_from_mean(session: Session) -> float:
    """Return the root mean square over ranks of || x_rank - mean ||; collective."""
    if session.replicas_equal:
        return 0.0
    squares = 0.0
    with torch.no_grad():
        for flat in session.flats:
            mean = flat.clone()
            _set_to_mean(mean, session.control)
            squares += float((flat.double() - mean.double()).square().sum())
    told = session.gather(squares)
    return float(sum(told) / len(told)) ** 0.5


@torch.no_grad()
def average_optimizers(optimizers: Optimizers, lane: Lane, gather: Callable[[Any], list[Any]]) -> None:
    """Set what the ranks' optimizers remember to its mean; collective.

    A parameter of which they do not all remember the same things, as one that had a gradient on some ranks only,
    begins anew.

    Args:
        optimizers: this rank's; their groups hold the same parameters in the same order everywhere.
        lane: among all ranks.
        gather: gives every rank's value, by rank.
    """
    held = [(each, p) for each in optimizers.every for group in each.param_groups for p in group["params"]]
    told = gather([_kinds(optimizer.state.get(parameter, {})) for optimizer, parameter in held])
    for number, (optimizer, parameter) in enumerate(held):
        if any(of_rank[number] != told[0][number] for of_rank in told):
            optimizer.state.pop(parameter, None)
            continue
        for key in sorted(told[0][number]):
            value = optimizer.state[parameter][key]
            if isinstance(value, Tensor) and value.is_floating_point():
                _set_to_mean(value, lane)


def _kinds(state: Mapping[str, Any]) -> dict[str, str]:
    return {
        key: str(tuple(v.shape)) if isinstance(v, Tensor) else type(v).__name__ for key, v in state.items()
    }


def _set_to_mean(tensor: Tensor, lane: Lane) -> None:
    """Set `tensor` (any shape) to the mean over the lane's ranks, a few million elements at a time."""
    flat = tensor.detach().reshape(-1)
    dtype = wire_dtype(tensor.dtype)
    for start in range(0, flat.numel(), _CHUNK_NUMEL):
        own = flat[start : start + _CHUNK_NUMEL].to(device="cpu", dtype=dtype).contiguous()
        total = torch.empty_like(own)
        lane.iallreduce(own.numpy(), total.numpy()).wait()
        flat[start : start + _CHUNK_NUMEL] = total.div_(lane.size).to(flat.device)
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view_as(tensor))
