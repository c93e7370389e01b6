"""Places that a round leaves alone: their values are kept, and put back when it is over."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["Held"]


class Held:
    """Values in tensors that change in a round, and must not for parameters that take no part in it."""

    def __init__(self) -> None:
        self._held: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def keep(self, tensor: Tensor | None, places: Iterable[slice], *, empty: bool = False) -> None:
        """Keep what a flat tensor holds at places, which are 0 in the round where `empty` says so."""
        if tensor is None:
            return
        for place in places:
            self._held.append((tensor[place], tensor[place].clone()))
            if empty:
                tensor[place] = 0

    @torch.no_grad()
    def give_back(self) -> None:
        """Put back what was kept."""
        for place, value in self._held:
            place.copy_(value)
        self._held.clear()
