"""The replicas' mean: to evaluate, to save, and to go on from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor

from hocket.checkpoint.subclasses import is_composite, plain_tensors
from hocket.segment.partition import partition
from hocket.segment.shape import wire_dtype
from hocket.segment.shards import local
from hocket.segment.storage import ParameterStorage
from hocket.session.exchange.parameter_sync import ParameterSync
from hocket.session.ranks import broadcast_tensors
from hocket.session.save.set_to_mean import set_to_mean
from hocket.session.save.untrained import Differing
from hocket.session.step.optimizers import Optimizers
from hocket.strategy.equality import outer_holders
from hocket.strategy.exchange import Exchange
from hocket.strategy.scope import Placement
from hocket.transport.gathering import Gather
from hocket.transport.lane import Lane


class Consensus:
    """Tensors set to their mean over ranks; as a context manager it restores each rank's values at the end; collective.

    Args:
        tensors: this rank's tensors, to be set.
        parameters: the exchanges whose push-sum values are set, too.
        lane: among the ranks that hold the same parameters.
        outer: sets parameters to the outer ones in place of a mean; None where there are none.
        beside: other tensors of the model to make equal on all ranks; None for none.
    """

    @torch.no_grad()
    def __init__(
        self,
        tensors: Sequence[Tensor],
        parameters: ParameterSync,
        lane: Lane,
        outer: OuterValues | None = None,
        beside: Differing | None = None,
    ) -> None:
        outer_flats = outer.storage.flats if outer else []
        self._tensors = [*tensors, *outer_flats, *(beside.tensors if beside else ())]
        self._parameters = parameters
        self._own = [tensor.clone() for tensor in self._tensors]
        # Push-sum keeps the mean of its values, not of what they are divided to.
        parameters.before_step()
        self._push_sums = parameters.push_sums()
        for tensor in tensors:
            set_to_mean(tensor, lane)
        for unrounded in parameters.unrounded():
            set_to_mean(unrounded.value, lane)
            unrounded.show()
        self._forget_outer = [] if outer is None else outer.show(parameters, lane)
        if beside is not None:
            beside.make_one()
        parameters.reset_weights()

    def __enter__(self) -> None:
        pass

    @torch.no_grad()
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for tensor, own in zip(self._tensors, self._own, strict=True):
            tensor.copy_(own)
        self._parameters.restore(self._push_sums)
        for forget in self._forget_outer:
            forget()


@dataclass(frozen=True)
class OuterValues:
    """The outer parameters of an exchange, with the ranks that hold them.

    Attributes:
        exchange: keeps them, on the ranks of its scope.
        storage: of the parameters.
        placement: of all ranks.
    """

    exchange: Exchange
    storage: ParameterStorage
    placement: Placement

    @torch.no_grad()
    def show(self, parameters: ParameterSync, lane: Lane) -> list[Callable[[], None]]:
        """Set parameters to the outer ones, or to their mean if they differ; without messages if they are equal.

        Args:
            parameters: this rank's.
            lane: among all ranks.

        Returns:
            What is called when the parameters are set back.
        """
        forget = parameters.show_outer(self.exchange)
        for number, spans in enumerate(partition(self.storage.spans, self.exchange.segments)):
            holders = outer_holders(self.exchange, self.placement, number)
            for _, values in self.storage.pieces_of(spans):
                if len(holders) > 1:
                    set_to_mean(values, lane)
                elif len(holders[0]) < lane.size:
                    _take_from(holders[0][0], values, lane)
        return forget


@torch.no_grad()
def average(tensors: Iterable[Tensor], lane: Lane) -> None:
    """Set tensors (any shape) to their mean over the lane's ranks; collective."""
    for tensor in tensors:
        set_to_mean(tensor, lane)


@torch.no_grad()
def squared_distance(
    tensors: Iterable[Tensor], lane: Lane, holders: Callable[[Tensor], int] = lambda _: 1
) -> float:
    """Return the square of this rank's Euclidean distance from the ranks' mean; collective.

    Args:
        tensors: this rank's.
        lane: among the ranks that hold the same.
        holders: returns on how many ranks of this replica a tensor counts; each counts a share of it.
    """
    squares = 0.0
    for tensor in tensors:
        mean = tensor.clone()
        set_to_mean(mean, lane)
        squares += float((tensor.double() - mean.double()).square().sum()) / holders(tensor)
    return squares


@torch.no_grad()
def average_optimizers(optimizers: Optimizers, lane: Lane, gather: Gather) -> None:
    """Set the state of the ranks' optimizers to its mean; collective.

    A parameter whose states differ in kind, as one that had a gradient on some ranks only, begins anew. So does one
    whose state has no mean, as a history's (LBFGS): its replicas would drift apart.

    Args:
        optimizers: this rank's; their groups hold the same parameters in the same order everywhere.
        lane: among all ranks.
        gather: gives every rank's value, by rank.
    """
    held = [(each, p) for each in optimizers.every for group in each.param_groups for p in group["params"]]
    gathered = gather([_kinds(optimizer.state.get(parameter, {})) for optimizer, parameter in held])
    for number, (optimizer, parameter) in enumerate(held):
        differs = any(of_rank[number] != gathered[0][number] for of_rank in gathered)
        if differs or any(map(_is_history, optimizer.state.get(parameter, {}).values())):
            optimizer.state.pop(parameter, None)
            continue
        for key in sorted(gathered[0][number]):
            value = local(optimizer.state[parameter][key])
            if is_composite(value):  # which has no mean of its parts
                broadcast_tensors(plain_tensors(value), lane, 0)
            elif isinstance(value, Tensor) and value.is_floating_point():
                set_to_mean(value, lane)


def _kinds(state: Mapping[str, object]) -> dict[str, str]:
    return {
        key: f"{wire_dtype(v.dtype)} {tuple(v.shape)}" if isinstance(v, Tensor) else type(v).__name__
        for key, v in state.items()
    }


def _is_history(value: object) -> bool:
    return isinstance(value, Sequence | Mapping) and not isinstance(value, str)


def _take_from(root: int, values: Tensor, lane: Lane) -> None:
    """Set flat `values` to those of rank `root` of the lane."""
    own = values.cpu().view(torch.uint8)
    lane.ibroadcast(own.numpy(), root).wait()
    values.copy_(own.view(values.dtype))
