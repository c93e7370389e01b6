"""Exchanged gradients that no optimizer has stepped with, with a warning where one rank alone may have left them.

A `continue` between backward and step lets one rank's replica part from the others'. But gradient surgery, SAM and
caches of gradients drop some in every step, on all ranks, without a warning. The loop over `session.data` shows this,
as a batch's backwards belong together; without one, equal steps do.
"""

from __future__ import annotations

import logging

_log = logging.getLogger("hocket")

_DROPPED = "was followed by zero_grad() and another backward()"
_LEFT = "was followed by the next batch of session.data"


class UnusedGradients:
    """The count of one session's rounds of gradients that no step has used.

    Args:
        rank: this rank.

    Attributes:
        count: number of these rounds; equal on all ranks whose replicas stay equal.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.count = 0
        self._has_warned = False
        #: Whether each step so far has dropped some; unknown before the first has ended.
        self._always: bool | None = None
        self._in_this_step = False
        self._first = 0

    def drop(self, step: int, *, in_batch: bool) -> None:
        """Note gradients that `zero_grad` has dropped before another backward.

        Args:
            step: the step under way.
            in_batch: whether a loop over `session.data` says that both backwards are of one batch.
        """
        self.count += 1
        self._in_this_step = True
        if self.count == 1:
            self._first = step
        if self._always is False and not in_batch:
            self._tell(step, _DROPPED)

    def end_step(self, *, in_batch: bool) -> None:
        """Compare a step with those before."""
        if self._always is None:
            self._always = self._in_this_step
        elif self._always and not self._in_this_step:
            self._always = False
            if not in_batch:
                self._tell(self._first, _DROPPED)
        self._in_this_step = False

    def leave(self, step: int) -> None:
        """Note a batch of `session.data` that ends with exchanged gradients and no step."""
        self.count += 1
        self._tell(step, _LEFT)

    def _tell(self, step: int, what: str) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        _log.warning(
            "rank %d: backward() at step %d exchanged gradients, but %s without optimizer.step(). If other ranks "
            "step with them, replicas drift apart. To add gradients up over batches, put all but the last batch into "
            "session.accumulate(). To skip a batch, skip it before backward(), or on all ranks",
            self._rank,
            step,
            what,
        )
