"""Rounds that are taken back: with overlap backward a step is sent before all ranks know that it is left out."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from hocket.collective.packing import Packing
from hocket.session.exchanging import OpenExchange

__all__ = ["Undo"]

_log = logging.getLogger("hocket")


class Undo:
    """Gives compressors' states back what they held before a round that held NaN or Inf.

    That takes a copy of them in each round, which is made from `begin` on: where steps can be left out.

    Args:
        opened: the exchanges of a slot.
    """

    def __init__(self, opened: Sequence[OpenExchange]) -> None:
        self._packings: list[Packing] = [o.channel.packing for o in opened if o.channel.packing is not None]
        self._begun = False

    def begin(self) -> None:
        """Be able to take rounds back, from the next one on."""
        self._begun = True

    def begin_round(self, *, spoiled: bool) -> None:
        """Expect a round; `spoiled` says whether the last one held NaN or Inf."""
        if spoiled and not self._begun:
            self.begin()
            _log.warning(
                "a step with NaN or Inf was left out, by a GradScaler or by whoever trains, after residuals had been "
                "sent in it, and they are lost. From now on they are kept; on_nonfinite='skip' does it from the start"
            )
        for packing in self._packings:
            packing.keep(self._begun)

    def undo(self) -> None:
        """Take the last round back."""
        for packing in self._packings:
            packing.put_back()
