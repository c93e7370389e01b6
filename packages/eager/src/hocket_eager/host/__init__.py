"""Partial sums in memory that the ranks of a host share: one rank carries out a whole round, and wakes nobody."""

from hocket_eager.host.shared_sum import SharedSum, open_shared_sum

__all__ = ["SharedSum", "open_shared_sum"]
