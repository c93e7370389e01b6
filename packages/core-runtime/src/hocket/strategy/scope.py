"""The scopes of exchanges: the ranks that take part."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import pairwise

from hocket.configured import Configured

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Placement:
    """The placement of ranks on hosts.

    Attributes:
        hosts: by rank, the number of its host; hosts are numbered in the order of their first rank.
    """

    hosts: tuple[int, ...]

    @classmethod
    def on_one_host(cls, size: int) -> Placement:
        """Return `size` ranks on one host."""
        return cls((0,) * size)

    @classmethod
    def of_counts(cls, counts: Sequence[int]) -> Placement:
        """Return the placement on hosts with these numbers of ranks, one host after the other."""
        return cls(tuple(host for host, ranks in enumerate(counts) for _ in range(ranks)))

    @classmethod
    def of(cls, names: Sequence[str]) -> Placement:
        """Return the placement of ranks whose hosts have these names, by rank."""
        numbers: dict[str, int] = {}
        return cls(tuple(numbers.setdefault(name, len(numbers)) for name in names))

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.hosts)


class GroupBy(StrEnum):
    """A property that makes ranks a group."""

    HOST = "host"


class Scope(Configured, ABC):
    """The ranks that take part in an exchange; a frozen dataclass whose fields are its configuration.

    It is pure: every rank computes the same result, and `plan` calls it for any number of ranks.
    """

    @abstractmethod
    def parts(self, placement: Placement) -> tuple[Ranks, ...]:
        """Return the disjoint sets of ranks that exchange among themselves, each in the order of its ranks.

        Raises:
            ValueError: the scope is not defined for this number of ranks; says for which it is.
        """

    def carriers(self, segment: int, placement: Placement) -> tuple[Ranks, ...]:
        """Return the parts that exchange segment number `segment`; all by default."""
        return self.parts(placement)

    def leader(self, size: int, segment: int) -> int:
        """Return the place, in a part of `size` ranks, of the rank that leads segment number `segment`."""
        return 0

    def num_roles(self, placement: Placement) -> int:
        """Return the number of segments after which `carriers` and `leader` repeat."""
        return 1

    def part_of(self, rank: int, placement: Placement) -> Ranks | None:
        """Return the part that `rank` is in; None if it takes no part."""
        return next((part for part in self.parts(placement) if rank in part), None)


@dataclass(frozen=True)
class World(Scope):
    """The scope of all ranks."""

    def parts(self, placement: Placement) -> tuple[Ranks, ...]:
        """Return one part: 0, 1, ..., size - 1."""
        return (tuple(range(placement.size)),)


@dataclass(frozen=True)
class _Grouped(Scope):
    """The base of scopes by groups: the grouping of ranks.

    Attributes:
        size: ranks in a group, 1 or more; the last group is smaller if the ranks do not divide evenly.
        count: number of groups, 1 or more; their sizes differ by at most one.
        by: `host`: the ranks of one host are a group.
        sharded: whether every member of a group leads a share of the segments, so that no leader's link is the
            bottleneck: in a group of m, member s mod m leads segment s. Groups must then have equal sizes.

    Raises:
        ValueError: not exactly one of `size`, `count` and `by` is given, or one is below 1.
    """

    size: int | None = None
    count: int | None = None
    by: GroupBy | None = None
    sharded: bool = False

    def __post_init__(self) -> None:
        given = [name for name in ("size", "count", "by") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"give exactly one of size, count and by, not {' and '.join(given) or 'none'}: `size: 4`, `count: 2` "
                "or `by: host` (null removes one that a recipe gives)"
            )
        for name in ("size", "count"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be 1 or more, not {value}")

    def groups(self, placement: Placement) -> tuple[Ranks, ...]:
        """Return the groups, in the order of their first ranks.

        Raises:
            ValueError: there are fewer ranks than groups, or `sharded` groups are not of one size.
        """
        groups = _groups(self.size, self.count, self.by, placement)
        sizes = sorted({len(group) for group in groups})
        if self.sharded and len(sizes) > 1:
            raise ValueError(
                f"sharded leaders need groups of equal size, but these have {' and '.join(map(str, sizes))} ranks: "
                "choose a size that divides the number of ranks, or `sharded: false`"
            )
        return groups

    def leader(self, size: int, segment: int) -> int:
        return segment % size if self.sharded else 0

    def num_roles(self, placement: Placement) -> int:
        return len(self.groups(placement)[0]) if self.sharded else 1


@dataclass(frozen=True)
class Group(_Grouped):
    """The scope of each group's ranks among themselves, all groups at once."""

    def parts(self, placement: Placement) -> tuple[Ranks, ...]:
        """Return the groups."""
        return self.groups(placement)


@dataclass(frozen=True)
class Leaders(_Grouped):
    """The scope of one rank from each group: its first, or, with `sharded`, a different one for each segment."""

    def parts(self, placement: Placement) -> tuple[Ranks, ...]:
        """Return the first ranks of the groups; with `sharded` also the second ones, the third ones, ..."""
        groups = self.groups(placement)
        if self.sharded:
            return tuple(zip(*groups, strict=True))
        return (tuple(group[0] for group in groups),)

    def as_group(self) -> Group:
        """Return the scope of the groups that these lead."""
        return Group(self.size, self.count, self.by, self.sharded)

    def carriers(self, segment: int, placement: Placement) -> tuple[Ranks, ...]:
        """Return the ranks that lead that segment in their groups, as one part."""
        parts = self.parts(placement)
        return (parts[self.leader(len(parts), segment)],)


@lru_cache(maxsize=64)
def _groups(
    size: int | None, count: int | None, by: GroupBy | None, placement: Placement
) -> tuple[Ranks, ...]:
    ranks = range(placement.size)
    if by is not None:
        on_host: dict[int, list[int]] = {}
        for rank, host in enumerate(placement.hosts):
            on_host.setdefault(host, []).append(rank)
        return tuple(tuple(members) for members in on_host.values())
    if size is not None:
        return tuple(tuple(ranks[start : start + size]) for start in range(0, placement.size, size))
    assert count is not None
    if count > placement.size:
        raise ValueError(f"count: {count} groups need {count} ranks or more, but there are {placement.size}")
    # The first `rest` groups have one rank more.
    least, rest = divmod(placement.size, count)
    starts = [number * least + min(number, rest) for number in range(count + 1)]
    return tuple(tuple(ranks[a:b]) for a, b in pairwise(starts))
