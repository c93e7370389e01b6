"""Measures of runs, which are the columns of a comparison."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hocket.comparison.group import RunGroup
from hocket.comparison.record import Record
from hocket.errors import UserError
from hocket.results.history import is_number

_TARGET = re.compile(r"(?P<name>[^<>=]+)(?P<relation><=|>=|=)(?P<value>.+)")


#: Units, the largest first, with their sizes.
_Units = Sequence[tuple[str, float]]

_PLAIN: _Units = (("", 1.0),)
_PERCENT: _Units = (("%", 0.01),)
_SECONDS: _Units = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))
_BYTES: _Units = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))

_NEVER = "never"
_DIGITS = 4
# Beyond these, numbers are written with exponents.
_SMALLEST, _LARGEST = 1e-4, 1e7


@dataclass(frozen=True)
class Measure:
    """A column of a comparison.

    Attributes:
        name: the column's header.
        of: returns a run's number, or None if it has none.
        units: the units of the column.
        absent: returns the text for a group in which no run has a number.
    """

    name: str
    of: Callable[[Record], float | None]
    units: _Units = _PLAIN
    absent: Callable[[RunGroup], str] = lambda group: "-"

    def cell(self, group: RunGroup) -> str:
        """Return a group's mean as text, with the standard deviation over its seeds."""
        found = group.spread(self.of)
        if found is None:
            return self.absent(group)
        of = len(group.records)
        values = [found.mean] if found.count == 1 else [found.mean, found.deviation]
        text = self.written(values, abs(found.mean), _DIGITS)
        return text + ("" if found.count == of else f" ({found.count} of {of})")

    def written(self, values: Sequence[float], largest: float, digits: int, sign: str = "") -> str:
        """Return values as text with ± between them, in the same unit and to the same place.

        Args:
            values: numbers of the column.
            largest: the number, 0 or more, by which the unit is chosen.
            digits: the number of digits of `largest`.
            sign: `+` to write the sign of a positive first value, too.
        """
        unit, size = next((u for u in self.units if largest >= u[1]), self.units[-1])
        ending = f".{digits}g"
        if _SMALLEST <= largest / size < _LARGEST:
            ending = f".{max(0, digits - 1 - math.floor(math.log10(largest / size)))}f"
        first, *others = (value / size for value in values)
        text = " ± ".join([f"{first:{sign}{ending}}", *(f"{each:{ending}}" for each in others)])
        return f"{text} {unit}".rstrip()


@dataclass(frozen=True)
class Target:
    """A value of a metric that runs are to reach.

    Attributes:
        name: the metric's name.
        value: the value to reach.
        rising: True if larger values are better.
        label: the target's name in columns and figures.
    """

    name: str
    value: float
    rising: bool
    label: str

    def __str__(self) -> str:
        return f"{self.name} of {self.value:g} or {'more' if self.rising else 'less'}"

    def first(self, record: Record, key: str) -> float | None:
        """Return the number `key` (such as `seconds`) of a run's first row that reaches the target, or None."""
        for row, value in record.series(self.name):
            if value >= self.value if self.rising else value <= self.value:
                return float(row[key]) if is_number(row.get(key)) else None
        return None

    def best(self, group: RunGroup) -> str:
        """Return the best value that a group's runs have reached, as text."""
        values = [value for record in group.records for _, value in record.series(self.name)]
        values = [value for value in values if not math.isnan(value)]
        if not values:
            return _NEVER
        return f"{_NEVER} (best {max(values) if self.rising else min(values):.{_DIGITS}g})"


def parse_targets(texts: Sequence[str], records: Sequence[Record]) -> list[Target]:
    """Read targets `NAME=VALUE`, `NAME>=VALUE` or `NAME<=VALUE`.

    For `=`, the direction in which most runs' values move counts as better.

    Raises:
        UserError: a target has another form, or a run has no such metric.
    """
    labels = ["target"] if len(texts) == 1 else [f"target {place}" for place in range(1, len(texts) + 1)]
    return [_parse_target(text, records, label) for text, label in zip(texts, labels, strict=True)]


def _parse_target(text: str, records: Sequence[Record], label: str) -> Target:
    parts = _TARGET.fullmatch(text)
    try:
        value = float(parts["value"]) if parts else None
    except ValueError:
        value = None
    if parts is None or value is None:
        raise UserError(f"--target {text!r}: not of the form NAME=VALUE, such as valid_accuracy=0.95")
    name = _resolved(parts["name"].strip(), records)
    if not any(record.series(name) for record in records):
        raise UserError(
            f"--target {text!r}: {name} is known only at the end of a run: choose a metric that runs log while they "
            "train"
        )
    rising = parts["relation"] == ">=" or (parts["relation"] == "=" and _rises(name, records))
    return Target(name, value, rising, label)


def _rises(name: str, records: Sequence[Record]) -> bool:
    """Return whether a metric rises from its first to its last value in most of the runs."""
    series = [[value for _, value in record.series(name)] for record in records]
    rises = [values[-1] > values[0] for values in series if len(values) > 1 and values[-1] != values[0]]
    return 2 * sum(rises) > len(rises) if rises else "loss" not in name


def measures(
    records: Sequence[Record], metrics: Sequence[str], targets: Sequence[Target] = ()
) -> list[Measure]:
    """Return the columns of a comparison.

    Args:
        records: the runs.
        metrics: the metrics to show; empty for all `Record.metrics` that all runs have.
        targets: each adds the seconds and bytes to it.

    Raises:
        UserError: a run has no such metric.
    """
    asked = [_resolved(name, records) for name in metrics] or _common(records)
    return [
        *(Measure(name, lambda record, name=name: record.last(name)) for name in asked),  # type: ignore[misc]
        *(measure for target in targets for measure in _to(target)),
        Measure("time", lambda record: record.seconds, _SECONDS),
        Measure(
            "steps/s",
            lambda record: _ratio(record.steps, record.seconds) if record.is_timed else None,
            absent=lambda group: "no computing" if not group.records[0].is_timed else "-",
        ),
        Measure("bytes/step", lambda record: _ratio(record.last("bytes_sent"), record.steps), _BYTES),
        Measure("waited", lambda record: _ratio(record.last("exposed_wait_s"), record.seconds), _PERCENT),
        Measure("distance", lambda record: record.last("consensus_distance")),
    ]


def _resolved(name: str, records: Sequence[Record]) -> str:
    first, *_ = [record.resolve(name) for record in records]
    return first


def _common(records: Sequence[Record]) -> list[str]:
    found = [record.metrics for record in records]
    return [name for name in found[0] if all(name in names for names in found)]


def _to(target: Target) -> list[Measure]:
    return [
        Measure(
            f"time to {target.label}", lambda record: target.first(record, "seconds"), _SECONDS, target.best
        ),
        Measure(
            f"bytes to {target.label}",
            lambda record: target.first(record, "bytes_sent"),
            _BYTES,
            lambda group: _NEVER,
        ),
    ]


def _ratio(one: float | None, other: float) -> float | None:
    return one / other if one is not None and other > 0 else None
