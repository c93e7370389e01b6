"""Closures: `optimizer.step(closure)`, whose backwards run within the step.

Optimizers that look at the loss (LBFGS, line searches) decide by it how often they call the closure. Ranks that get the
same gradients get the same loss, too, their weighted mean, so that all decide alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from hocket.session.exchange.active import ActiveExchange
from hocket.transport.lane import Lane


class SharedClosure:
    """A user's closure, wrapped for an optimizer: it returns the ranks' mean loss.

    Args:
        closure: the user's; returns the loss.
        lane: among the ranks that get the same gradients; None where each has its own.
        weight: returns the weight of this rank's loss in the mean; called after the closure.
        gradients_are_in: called after each call of the closure.
    """

    def __init__(
        self,
        closure: Callable[[], Any],
        lane: Lane | None,
        weight: Callable[[], float],
        gradients_are_in: Callable[[], None],
    ) -> None:
        self._closure = closure
        self._lane = lane
        self._weight = weight
        self._gradients_are_in = gradients_are_in
        self._own, self._sum = np.empty(2), np.empty(2)

    def __call__(self) -> Any:
        loss = self._closure()
        self._gradients_are_in()
        if self._lane is None or loss is None:
            return loss
        weight = self._weight()
        # A rank that is out of data has a loss all the same, also NaN, which must not count.
        own = float(loss.detach() if isinstance(loss, Tensor) else loss)
        self._own[:] = (weight * own if weight else 0.0), weight
        self._lane.iallreduce(self._own, self._sum).wait()
        mean = self._sum[0] / self._sum[1] if self._sum[1] else own
        if isinstance(loss, Tensor):
            return torch.as_tensor(mean, dtype=loss.dtype, device=loss.device)
        return float(mean)


class Before:
    """Parameters, optimizer state and residuals before a step with a closure, to undo the step.

    Args:
        flats: the parameters' memory.
        optimizer: the optimizer that is about to step.
        opened: exchanges, whose compressors' states change with each call of the closure.
    """

    def __init__(self, flats: list[Tensor], optimizer: Optimizer, opened: Sequence[ActiveExchange]) -> None:
        self._flats = [(flat, flat.clone()) for flat in flats]
        self._optimizer = optimizer
        self._state = {parameter: _copy(state) for parameter, state in optimizer.state.items()}
        packings = (each.channel.packing for each in opened)
        self._packings = [(packing, packing.state_dict()) for packing in packings if packing is not None]

    @torch.no_grad()
    def restore(self) -> None:
        """Undo the step."""
        for flat, values in self._flats:
            flat.copy_(values)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
        for packing, state in self._packings:
            packing.load_state_dict(state)


def _copy(state: Any) -> Any:
    return tree_map_only(Tensor, torch.clone, state)
