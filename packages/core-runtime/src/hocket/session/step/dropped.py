"""The results of partial allreduces that a step has dropped: the parts that a rank still owes and carries.

A rank takes its own part out of its next contribution. It carries what came, with others' late parts, to its next
result, or the next phase.
"""

from __future__ import annotations

import torch
from torch import Tensor


class DroppedSums:
    """The dropped sums of one parameter on this rank.

    Attributes:
        carry: what came and was dropped, for the next result; None for nothing.
        owed: what was contributed and dropped; None for nothing.
        copy: of what came last, which a program may change; None where none was made.
        sent: what the step's earlier rounds have contributed; None for nothing.
    """

    __slots__ = ("carry", "copy", "owed", "sent")

    def __init__(self) -> None:
        self.carry: Tensor | None = None
        self.owed: Tensor | None = None
        self.copy: Tensor | None = None
        self.sent: Tensor | None = None

    def note_sent(self, outgoing: Tensor) -> None:
        """Keep a contribution, before the step's next round."""
        self.sent = outgoing.clone() if self.sent is None else self.sent.add_(outgoing)

    def take_owed(self, outgoing: Tensor) -> None:
        """Take what is owed out of a contribution."""
        if self.owed is not None:
            outgoing.sub_(self.owed)
            # Of a further drop only the gradient itself is owed.
            self.sent = _plus(self.sent, self.owed)
            self.owed = None

    def take_carried(self) -> Tensor | None:
        """Take what is carried to the next result; None for nothing."""
        carried, self.carry = self.carry, None
        return carried

    def add_late(self, came: Tensor, factor: float) -> bool:
        """Carry a late part, multiplied by `factor`, if something is carried; return whether it is."""
        if self.carry is not None:
            self.carry.add_(came, alpha=1 / factor)
        return self.carry is not None

    def drop(self, came: Tensor | None, factor: float) -> bool:
        """Owe what the step's rounds have contributed, and carry what came; return whether both are known.

        Neither is done with NaN.

        Args:
            came: what came of all rounds, multiplied by `factor`; None where it is lost.
            factor: of results.
        """
        if came is None or self.sent is None:
            return False
        if bool(came.isfinite().all()) and bool(self.sent.isfinite().all()):
            self.carry = _plus(self.carry, came.detach() / factor)
            self.owed = _plus(self.owed, self.sent)
        return True

    @torch.no_grad()
    def take_share(self, like: Tensor, scale: float) -> Tensor:
        """Take this rank's share in the mean of what ranks carry, less what they owe; flat.

        Args:
            like: has its shape, in memory too.
            scale: of the ranks' contributions.
        """
        share = torch.zeros_like(like)
        if self.carry is not None:
            share.add_(self.carry, alpha=scale)
        if self.owed is not None:
            share.sub_(self.owed)
        self.carry = self.owed = None
        return share.as_strided((share.numel(),), (1,))


def _plus(total: Tensor | None, part: Tensor) -> Tensor:
    return part if total is None else total.add_(part)
