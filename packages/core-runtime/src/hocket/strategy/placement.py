"""Where the ranks of a world are: what a scope is computed from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Placement"]


@dataclass(frozen=True)
class Placement:
    """Which host each rank is on.

    Attributes:
        hosts: by rank, the number of its host; hosts are numbered in the order of their first rank.
    """

    hosts: tuple[int, ...]

    @classmethod
    def on_one_host(cls, size: int) -> Placement:
        """Return `size` ranks on one host."""
        return cls((0,) * size)

    @classmethod
    def of(cls, names: Sequence[str]) -> Placement:
        """Return the placement of ranks whose hosts have these names, by rank."""
        numbers: dict[str, int] = {}
        return cls(tuple(numbers.setdefault(name, len(numbers)) for name in names))

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.hosts)
