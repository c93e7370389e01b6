"""The way in which one parameter is sent."""

from __future__ import annotations

from dataclasses import dataclass

from hocket_redsync.message import MessageForm
from hocket_redsync.selection import Method, most_selected


@dataclass(frozen=True)
class Sending:
    """The way that one parameter is sent.

    Attributes:
        method: the method that finds its communication-set.
        k: the number of elements wanted, 1 to numel, or 0 where there is none.
        form: the form in which they travel.
    """

    method: Method
    k: int
    form: MessageForm

    def expected_count(self, numel: int) -> float:
        """Return the elements that it sends on average: the threshold methods' sets have k to 2 k."""
        if self.form is MessageForm.DENSE:
            return numel
        return min(numel, 1.5 * self.k) if self.method in {Method.THRESHOLD, Method.SAMPLED} else self.k

    def most(self, numel: int) -> int:
        """Return the largest number of elements that it sends."""
        return numel if self.form is MessageForm.DENSE else most_selected(self.method, self.k, numel)
