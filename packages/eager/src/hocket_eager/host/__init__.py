"""Partial sums in memory that the ranks of a host share: whoever starts a round does all of it, and wakes nobody."""

from hocket_eager.host.shared_sum import SharedSum, open_shared_sum

__all__ = ["SharedSum", "open_shared_sum"]
