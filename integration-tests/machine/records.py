"""Records of what a rank sees of its training, in order, to be compared with what it has to see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

#: Sums come in another order, and optimizers count steps in float32; a wrong number is wrong by far more.
TOLERANCE = 1e-6


@dataclass
class Records:
    """A record of one rank: the number of the move, the object looked at, and its numbers."""

    move: int = 0
    seen: list[tuple[int, str, NDArray[np.float64]]] = field(default_factory=list)

    def tell(self, what: str, value: Any) -> None:
        self.seen.append((self.move, what, np.asarray(value, dtype=np.float64).copy()))


def state_of(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> NDArray[np.float64]:
    """Return parameters, buffers and what optimizers remember of each parameter, in one vector."""
    parts: list[Any] = [*model.parameters(), *model.buffers()]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parts += _numbers(optimizer.state.get(parameter, {}))
    flats = [torch.as_tensor(part, dtype=torch.float64).detach().reshape(-1) for part in parts]
    vector: NDArray[np.float64] = torch.cat(flats).numpy()
    return vector


def _numbers(state: Any) -> list[Any]:
    if isinstance(state, dict):
        state = [state[key] for key in sorted(state) if key != "prev_loss"]
    if isinstance(state, list | tuple):
        return [number for part in state for number in _numbers(part)]
    return [state] if isinstance(state, Tensor | float) else []


def difference(found: Records, expected: Records, tolerance: float) -> tuple[int, str] | None:
    """Return at which move, and in what, two records differ first; None where all that both have is alike."""
    for (move, what, ours), (other, of, theirs) in zip(found.seen, expected.seen, strict=False):
        if (move, what) != (other, of):
            return max(move, other), f"{what} in move {move}, and expected was {of} in move {other}"
        if ours.shape != theirs.shape:
            return move, f"{what} has {ours.size} numbers, and expected were {theirs.size}"
        if not np.allclose(ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True):
            worst = int(np.nanargmax(np.abs(ours - theirs)))
            return move, (
                f"{what}[{worst}] is {ours.flat[worst]:.9g}, and expected was {theirs.flat[worst]:.9g}"
            )
    return None
