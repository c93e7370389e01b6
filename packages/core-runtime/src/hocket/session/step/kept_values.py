"""Places that a round must not change: their values are kept, and put back after it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class KeptValues:
    """The values of parameters that take no part in a round, in tensors that change in it."""

    def __init__(self) -> None:
        self._held: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def keep(self, tensor: Tensor | None, places: Iterable[slice], *, empty: bool = False) -> None:
        """Keep a flat tensor's values at places, and zero them there for the round if `empty`."""
        if tensor is None:
            return
        for place in places:
            self._held.append((tensor[place], tensor[place].clone()))
            if empty:
                tensor[place] = 0

    @torch.no_grad()
    def give_back(self) -> None:
        """Put back the kept values."""
        for place, value in self._held:
            place.copy_(value)
        self._held.clear()
