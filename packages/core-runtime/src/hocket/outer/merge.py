"""The merges: a displacement that is added, and a blend.

Source: A. Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv:2501.18512, section 2.2 (blend);
M. Assran et al., "Stochastic Gradient Push", arXiv:1811.10792, Overlap-SGP (add).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hocket.outer.api import Merge

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AddDisplacement", "Blend"]


@dataclass(frozen=True)
class AddDisplacement(Merge):
    """θ += what has come - what was sent: the steps made meanwhile stay, as a displacement."""

    @property
    def takes_all(self) -> bool:
        return True

    @property
    def needs_sent(self) -> bool:
        return True

    def merge(self, parameters: Tensor, come: Tensor, sent: Tensor | None) -> None:
        assert sent is not None
        import torch

        parameters.add_(torch.sub(come, sent, out=sent))


@dataclass(frozen=True)
class Blend(Merge):
    """θ = local θ + (1 - local) what has come.

    Attributes:
        local: how much this rank's own parameters count, 0 to 1: at 0 they are overwritten, with the steps made
            meanwhile, and at 1 nothing is ever taken over.
    """

    local: float

    def __post_init__(self) -> None:
        if not 0 <= self.local <= 1:
            raise ValueError(f"local must be 0 to 1, not {self.local}")

    @property
    def takes_all(self) -> bool:
        return self.local == 0

    def merge(self, parameters: Tensor, come: Tensor, sent: Tensor | None) -> None:
        import torch

        # torch goes from the nearer end, so that 0 and 1 are exact.
        if parameters.dtype == come.dtype:
            torch.lerp(come, parameters, self.local, out=parameters)
        else:
            parameters.copy_(come.lerp(parameters.to(come.dtype), self.local))
