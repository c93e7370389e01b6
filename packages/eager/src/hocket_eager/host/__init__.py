"""Partial sums in memory shared by a host's ranks: one rank carries out a whole round, and wakes nobody."""

from hocket_eager.host.shared_sum import SharedSum, open_shared_sum

__all__ = ["SharedSum", "open_shared_sum"]
