"""Values for which parameters are too short: x of push-sum beside float16 and bfloat16 parameters."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Unrounded"]


class Unrounded:
    """The value x of a segment, of which its parameters hold x, or x / w, as well as they can.

    Rounded to the parameter's own dtype in every round, as x, as x / w and as x again, it would drift away.

    Args:
        parameters: flat, of a shorter dtype.
        dtype: of x.

    Attributes:
        value: x, flat.
    """

    def __init__(self, parameters: Tensor, dtype: torch.dtype) -> None:
        self._parameters = parameters
        self.value = parameters.to(dtype)

    def bias(self, weight: float) -> None:
        """Make parameters, which hold x / w, hold x; what others have written into them since is taken as it is."""
        written = self._parameters != (self.value / weight).to(self._parameters.dtype)
        self.value = torch.where(written, self._parameters.to(self.value.dtype) * weight, self.value)
        self.show()

    def step(self) -> Tensor:
        """Add to x what the optimizer has added to the parameters, which hold x, and return it."""
        self.value += self._parameters.to(self.value.dtype) - self.value.to(self._parameters.dtype)
        return self.value

    def debias(self, weight: float) -> None:
        """Make parameters, which hold x, hold x / w."""
        self.step()
        self._parameters.copy_(self.value / weight)

    def show(self) -> None:
        """Make parameters hold x."""
        self._parameters.copy_(self.value)
