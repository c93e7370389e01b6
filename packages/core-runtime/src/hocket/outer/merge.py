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


@dataclass(frozen=True)
class AddDisplacement(Merge):
    """A displacement, θ += received - sent, which keeps the training steps in between."""

    @property
    def takes_all(self) -> bool:
        return True

    @property
    def needs_sent(self) -> bool:
        return True

    def merge(self, parameters: Tensor, received: Tensor, sent: Tensor | None) -> None:
        assert sent is not None
        import torch

        parameters.add_(torch.sub(received, sent, out=sent))


@dataclass(frozen=True)
class Blend(Merge):
    """A blend, θ = local θ + (1 - local) received.

    Attributes:
        local: the weight of this rank's own parameters, 0 to 1. At 0 the received values replace them, and the steps
            made in the meantime are lost; at 1 they stay as they are.
    """

    local: float

    def __post_init__(self) -> None:
        if not 0 <= self.local <= 1:
            raise ValueError(f"local must be 0 to 1, not {self.local}")

    @property
    def takes_all(self) -> bool:
        return self.local == 0

    def merge(self, parameters: Tensor, received: Tensor, sent: Tensor | None) -> None:
        import torch

        # torch goes from the nearer end, so that 0 and 1 are exact.
        if parameters.dtype == received.dtype:
            torch.lerp(received, parameters, self.local, out=parameters)
        else:
            parameters.copy_(received.lerp(parameters.to(received.dtype), self.local))
