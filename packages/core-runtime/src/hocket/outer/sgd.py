"""SGD as the outer optimizer: FedAvg, Lookahead, DiLoCo.

Source: DiLoCo, arXiv:2311.08105, section 2 (Nesterov); its formulation is torch.optim.SGD's, whose bits these are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hocket.outer.api import Outer

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Sgd(Outer):
    """SGD on outer parameters: φ -= lr d, where d is the mean distance g with momentum.

    u = momentum u + g; d is u, or g + momentum u with `nesterov`.

    A step from momentum 0 with `nesterov` moves (1 + momentum) lr of the distance, and with constant distances lr
    tends to lr / (1 - momentum). With lr 1 and no momentum φ becomes the mean of the ranks' parameters.

    Attributes:
        lr: the outer learning rate, more than 0.
        momentum: the factor of the momentum, 0 to less than 1; at 0 the optimizer keeps no state besides φ.
        nesterov: whether to look ahead; needs momentum.
    """

    lr: float
    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be finite and more than 0, not {self.lr}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be 0 or more and less than 1, not {self.momentum}")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs momentum: give momentum, or leave nesterov out")

    @property
    def remembers(self) -> tuple[str, ...]:
        return ("momentum",) if self.momentum else ()

    @property
    def additive(self) -> bool:
        return not self.momentum

    def step(
        self, parameters: Tensor, gradient: Tensor, state: Mapping[str, Tensor], mean: Tensor | None = None
    ) -> None:
        direction = gradient
        if self.momentum:
            momentum = state["momentum"].mul_(self.momentum).add_(gradient)
            direction = gradient.add_(momentum, alpha=self.momentum) if self.nesterov else momentum
        parameters.add_(direction, alpha=-self.lr)
