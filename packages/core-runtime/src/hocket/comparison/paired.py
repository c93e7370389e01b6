"""Differences between groups of runs, seed by seed, with confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hocket.comparison.group import RunGroup, spread_of
from hocket.comparison.measure import Measure
from hocket.comparison.record import Record

#: The two-sided 95 % quantile of Student's t, for 1 to 30 degrees of freedom.
#: NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2, column 0.975.
_T_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
_FEWEST_SEEDS = 2
# A smaller relative difference of two numbers counts as rounding.
_ROUNDING = 1e-9
_DIGITS = 3
_BEYOND_CHANCE = " *"


@dataclass(frozen=True)
class Paired:
    """The difference of two groups in a measure, paired by seed.

    Attributes:
        mean: the mean difference over the seeds.
        margin: half of the width of the 95 % confidence interval around the mean.
        seeds: the number of seeds for which both groups have a number, at least two.
    """

    mean: float
    margin: float
    seeds: int

    @property
    def leaves_out_zero(self) -> bool:
        """True if zero lies outside of the confidence interval."""
        return abs(self.mean) > self.margin


@dataclass(frozen=True)
class DifferenceTable:
    """The differences of groups from one of them, as text.

    Attributes:
        meaning: the meaning of the cells.
        head: the columns' names.
        rows: one for each other group that shares two seeds or more with it.
    """

    meaning: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def paired(group: RunGroup, base: RunGroup, measure: Callable[[Record], float | None]) -> Paired | None:
    """Return the difference of a group from another; None if they share fewer than two seeds with numbers.

    Several runs of a seed count as their mean.
    """
    of_group, of_base = (_by_seed(each, measure) for each in (group, base))
    found = [_difference(value, of_base[seed]) for seed, value in of_group.items() if seed in of_base]
    if len(found) < _FEWEST_SEEDS:
        return None
    spread = spread_of(found)
    # For more degrees of freedom than the table has, the last one's t is at most 4.2 % too large.
    t = _T_95[min(spread.count - 1, len(_T_95)) - 1]
    return Paired(spread.mean, t * spread.deviation / math.sqrt(spread.count), spread.count)


def difference_table(groups: Sequence[RunGroup], columns: Sequence[Measure]) -> DifferenceTable | None:
    """Return the differences from the first group that shares two seeds with another, or None if none does."""
    for base in groups:
        others = [each for each in groups if each is not base and _shared(each, base) >= _FEWEST_SEEDS]
        if others:
            return DifferenceTable(
                f"differences from {base.label}, seed by seed: mean ± 95 % confidence interval (Student's t). * marks "
                "intervals that exclude zero; with few seeds and many columns some do so by chance",
                ["run", "seeds", *(column.name for column in columns)],
                [
                    [each.label, str(_shared(each, base)), *(_cell(column, each, base) for column in columns)]
                    for each in others
                ],
            )
    return None


def _cell(column: Measure, group: RunGroup, base: RunGroup) -> str:
    found = paired(group, base, column.of)
    if found is None:
        return "-"
    largest = max(abs(found.mean), found.margin)
    text = column.written([found.mean, found.margin], largest, _DIGITS, sign="+" if found.mean else "")
    if found.seeds < _shared(group, base):
        text += f" ({found.seeds} of {_shared(group, base)})"
    return text + _BEYOND_CHANCE * found.leaves_out_zero


def _shared(one: RunGroup, other: RunGroup) -> int:
    """Return the number of seeds that two groups share."""
    first, second = ({record.config["seed"] for record in group.records} for group in (one, other))
    return len(first & second)


def _by_seed(group: RunGroup, measure: Callable[[Record], float | None]) -> Mapping[int, float]:
    """Return a group's numbers by seed; several runs of a seed count as their mean."""
    found: dict[int, list[float]] = {}
    for record in group.records:
        value = measure(record)
        if value is not None:
            found.setdefault(record.config["seed"], []).append(value)
    return {seed: sum(values) / len(values) for seed, values in found.items()}


def _difference(one: float, other: float) -> float:
    """Return one number less another: 0 for rounding, NaN if one is NaN or both are infinite."""
    found = one - other
    return 0.0 if abs(found) < _ROUNDING * max(abs(one), abs(other)) else found
