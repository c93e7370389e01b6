"""Values that parameters' dtypes are too short for: x of push-sum beside float16 and bfloat16 parameters."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Unrounded"]


class Unrounded:
    """The value x of a segment in full precision; its parameters hold x, or x / w, rounded.

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
        """Turn parameters from x / w into x, and take over changes that were written into them."""
        written = self._parameters != (self.value / weight).to(self._parameters.dtype)
        self.value = torch.where(written, self._parameters.to(self.value.dtype) * weight, self.value)
        self.show()

    def step(self) -> Tensor:
        """Add the optimizer's change of the parameters, which hold x, to x, and return it."""
        self.value += self._parameters.to(self.value.dtype) - self.value.to(self._parameters.dtype)
        return self.value

    def debias(self, weight: float) -> None:
        """Turn parameters from x into x / w."""
        self.step()
        self._parameters.copy_(self.value / weight)

    def show(self) -> None:
        """Set parameters to x, rounded."""
        self._parameters.copy_(self.value)
