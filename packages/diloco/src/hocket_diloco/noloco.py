"""NoLoCo's outer step: a pair of ranks steps towards the mean of what both have trained, and towards each other.

Source: "NoLoCo: No-all-reduce Low Communication Training", 2025, arXiv:2506.10911; settings as in the
authors' code, where the pull is the learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hocket.api import Outer

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class NoLoCo(Outer):
    """The update φ += u, where u = momentum u - lr g + pull (mean(φ) - φ).

    g is the pair's mean distance. Each rank has a φ of its own, which the pull keeps near the others'. A rank without a
    partner, of an odd number, steps by its own distance.

    Attributes:
        lr: the outer learning rate, more than 0.
        momentum: the factor of the momentum, 0 to less than 1.
        pull: the pull towards the pair's mean φ, 0 to 1; at 0 ranks drift apart.
    """

    lr: float = 0.7
    momentum: float = 0.5
    pull: float = 0.7

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be finite and more than 0, not {self.lr}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be 0 or more and less than 1, not {self.momentum}")
        if not 0 <= self.pull <= 1:
            raise ValueError(f"pull must be 0 to 1, not {self.pull}")

    @property
    def remembers(self) -> tuple[str, ...]:
        return ("momentum",)

    @property
    def mixes(self) -> bool:
        return True

    def step(
        self, parameters: Tensor, gradient: Tensor, state: Mapping[str, Tensor], mean: Tensor | None = None
    ) -> None:
        assert mean is not None
        momentum = state["momentum"].mul_(self.momentum).add_(gradient, alpha=-self.lr)
        momentum.add_(mean.sub_(parameters), alpha=self.pull)
        parameters.add_(momentum)
