"""Local clipping: each rank clips its contribution before residuals are added. Source: Lin et al., section 3.1;
RedSync, section 2.4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hocket.compressor.api import (
    CompressorTraits,
)
from hocket.compressor.wrapper import Wrapper

if TYPE_CHECKING:
    from torch import Tensor

    from hocket.segment.segment import Segment


@dataclass(frozen=True)
class LocalClipping(Wrapper):
    """Local clipping: a rank's own gradients get a norm of at most `max_norm` * sqrt(number of ranks).

    N is the number of ranks.

    The mean of N independent gradients has 1/sqrt(N) of the norm of each, so that the mean's norm is then about
    `max_norm` at most. The papers say N^-1/2: of gradients that were divided by N already, which is the same.
    With one rank this is `torch.nn.utils.clip_grad_norm_`.

    It needs the gradients of all segments, so nothing can overlap backward. Gradients with NaN or Inf are left
    as they are. Each rank's norm is of what it contributes, weighted if it is.

    Attributes:
        max_norm: the largest L2 norm of the mean gradient over all segments; finite and more than 0.

    Raises:
        ValueError: `max_norm` is not in its range.
    """

    max_norm: float

    def __post_init__(self) -> None:
        if not 0 < self.max_norm < math.inf:
            raise ValueError(f"max_norm must be finite and more than 0, not {self.max_norm}")

    @property
    def traits(self) -> CompressorTraits:
        return replace(super().traits, prepares=True)

    def prepare(self, segments: Sequence[Segment], round: int, size: int, scale: float) -> None:
        """Scale all segments' `outgoing` data down by one factor if their joint norm is too large."""
        if scale != 0:
            gradients = [segment.outgoing[: segment.numel] for segment in segments]
            norm = _norm(gradients)
            # The small number is torch's own, so that one rank clips as torch does.
            factor = self.max_norm * math.sqrt(size) / (norm / scale + 1e-6)
            if math.isfinite(norm) and factor < 1:
                for gradient in gradients:
                    _scale(gradient, factor)
        super().prepare(segments, round, size, scale)


def _norm(gradients: Sequence[Tensor]) -> float:
    """Return the joint L2 norm; not finite only if an element is not, or if float64 cannot hold it."""
    import torch

    def total(divisor: float) -> float:
        parts = (gradient if divisor == 1 else gradient / divisor for gradient in gradients)
        return math.hypot(*(float(torch.linalg.vector_norm(part, dtype=torch.float64)) for part in parts))

    norm = total(1.0)
    if math.isfinite(norm):
        return norm
    largest = max(float(gradient.abs().max()) for gradient in gradients)  # squares of float64 have overflowed
    return largest * total(largest) if math.isfinite(largest) else math.inf


def _scale(gradient: Tensor, factor: float) -> None:
    """Multiply by a factor, which the gradient's dtype may hold in a few bits only."""
    import torch

    if factor >= torch.finfo(gradient.dtype).tiny:
        gradient.mul_(factor)
    else:
        gradient.mul_(math.sqrt(factor)).mul_(math.sqrt(factor))
