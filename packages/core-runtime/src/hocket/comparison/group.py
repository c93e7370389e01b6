"""Groups of runs that differ by their seeds only, and means and spreads over them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from hocket.comparison.record import Record
from hocket.config.settings import REPORTING
from hocket.errors import some
from hocket.plain import Tree, TreeView

#: The meaning of a group's numbers.
MEANING = "mean ± standard deviation (n - 1) over runs that differ by their seeds only"

#: The keys of a configuration that do not change a run's numbers.
_REPORTING = ("seed", *REPORTING)

_STRATEGY = ("strategy", "phases")

# The end to cut off the common start of names such as `agd-seed=0` and `agd-seed=1`.
_LOOSE_END = re.compile(r"[\s,;/_.=-]*(seed)?[\s,;/_.=-]*$")


@dataclass(frozen=True)
class Spread:
    """The mean and deviation of a number over several runs.

    Attributes:
        mean: the mean over the runs that have the number.
        deviation: the sample standard deviation (n - 1); 0 for a single run.
        count: the number of runs that have the number.
    """

    mean: float
    deviation: float
    count: int


@dataclass(frozen=True)
class Curve:
    """A metric over steps, seconds or bytes: means, and a band of the runs (or the ranks of one run)."""

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


@dataclass(frozen=True)
class RunGroup:
    """One run or more that differ by their seeds only."""

    label: str
    records: Sequence[Record]

    @property
    def settings(self) -> Tree:
        """The runs' shared settings, without those that change no number; `seed` lists all seeds.

        `transport` is the one that was used, also if the configuration leaves it open.
        """
        seeds = ", ".join(str(record.config["seed"]) for record in self.records)
        return {**_settings(self.records[0]), "seed": seeds}

    @property
    def marked(self) -> str:
        """The label, with a mark where a run warned of exchanges that it never reached."""
        return f"{self.label} (!)" if any(record.warnings for record in self.records) else self.label

    def spread(self, measure: Callable[[Record], float | None]) -> Spread | None:
        """Return a measure's mean and deviation over the runs, or None if no run has it."""
        values = [value for value in map(measure, self.records) if value is not None]
        if not values:
            return None
        return spread_of(values)

    def curve(self, name: str, over: str) -> Curve:
        """Return a metric's mean over the runs, and one standard deviation to both sides.

        Args:
            name: the metric, as `Record.series` takes it.
            over: the x-axis: `step`, `seconds` or `bytes_sent`, as a mean over the runs, too.
        """
        runs = [{row["step"]: (row[over], value) for row, value in r.series(name)} for r in self.records]
        steps = [step for step in runs[0] if all(step in run for run in runs)]
        spreads = [spread_of([run[step][1] for run in runs]) for step in steps]
        return Curve(
            [spread_of([run[step][0] for run in runs]).mean for step in steps],
            [at.mean for at in spreads],
            [at.mean - at.deviation for at in spreads],
            [at.mean + at.deviation for at in spreads],
        )

    def ranks_curve(self, name: str, over: str) -> Curve:
        """Return a metric of one run over its ranks: their mean, smallest and largest value."""
        [record] = self.records
        mean, low, high = (
            {row["step"]: (row[over], value) for row, value in record.series(name + end)}
            for end in ("", "_min", "_max")
        )
        steps = [step for step in mean if step in low and step in high]
        return Curve(
            [mean[step][0] for step in steps],
            *([values[step][1] for step in steps] for values in (mean, low, high)),
        )


def group_by_seed(records: Sequence[Record]) -> list[RunGroup]:
    """Group ended runs that differ by their seeds only, in the order given; an unended run stays alone."""
    found: dict[str, list[Record]] = {}
    for record in records:
        # A mean over a whole run and a part of one would be the mean of nothing.
        key = _key(record) if record.summary is not None else str(record.folder)
        found.setdefault(key, []).append(record)
    labels = _distinct([_label(members) for members in found.values()])
    return [RunGroup(label, members) for label, members in zip(labels, found.values(), strict=True)]


def differing_settings(runs: Sequence[tuple[str, TreeView]], chosen: Sequence[str] = ()) -> list[str]:
    """Return a line for each differing setting, but for strategy, seed and settings that change no number.

    Of components of different kinds, such as two optimizers, only the settings that all have are compared.

    Args:
        runs: labels, which may repeat, and complete configurations.
        chosen: keys that are meant to differ, with all keys below them.
    """
    configs = [
        {key: value for key, value in config.items() if key not in (*_REPORTING, *_STRATEGY)}
        for _, config in runs
    ]
    lines = []
    for key, values in _differing("", configs):
        if any(f"{key}.".startswith(f"{each}.") for each in chosen):
            continue
        having: dict[str, list[str]] = {}
        for (label, _), value in zip(runs, values, strict=True):
            having.setdefault(written(value), []).append(label)
        differing = (f"{value} in {some(list(dict.fromkeys(labels)))}" for value, labels in having.items())
        lines.append(f"runs differ in {key}: {'; '.join(differing)}")
    return lines


def written(value: object) -> str:
    """Return a setting's value as text."""
    return json.dumps(value, default=str).strip('"')


def _differing(path: str, values: Sequence[Any]) -> Iterator[tuple[str, Sequence[Any]]]:
    """Yield the differences between configurations: the path, and the value of each, None where it has none."""
    if all(isinstance(value, dict) for value in values):
        is_one_kind = all(value.get("name") == values[0].get("name") for value in values)
        for key in dict.fromkeys(key for value in values for key in value):
            if is_one_kind or all(key in value for value in values):
                yield from _differing(f"{path}.{key}" if path else key, [value.get(key) for value in values])
    elif any(value != values[0] for value in values):
        yield path, values


def spread_of(values: Sequence[float]) -> Spread:
    """Return mean and deviation of one value or more; a run that diverged gives NaN or infinities."""
    mean = sum(values) / len(values)
    squares = sum((value - mean) * (value - mean) for value in values)
    return Spread(mean, math.sqrt(squares / max(1, len(values) - 1)), len(values))


def _settings(record: Record) -> Tree:
    settings = {key: value for key, value in record.config.items() if key not in _REPORTING}
    return {**settings, "transport": record.transport or None}


def _key(record: Record) -> str:
    return json.dumps(_settings(record), sort_keys=True, default=str)


def _label(records: Sequence[Record]) -> str:
    first = records[0]
    if len(records) == 1:
        return first.label if first.summary is not None else f"{first.label} (until step {first.steps})"
    shared = _LOOSE_END.sub("", _common_start([record.label for record in records]))
    seeds = len({record.config["seed"] for record in records})
    count = f"{seeds} seed{'s' * (seeds > 1)}"
    if seeds < len(records):
        count = f"{len(records)} runs of {count}"
    return f"{shared or first.config.get('name') or 'run'} ({count})"


def _common_start(texts: Sequence[str]) -> str:
    columns = takewhile(lambda letters: len(set(letters)) == 1, zip(*texts, strict=False))
    return "".join(letters[0] for letters in columns)


def _distinct(labels: Sequence[str]) -> list[str]:
    return [
        label if labels.count(label) == 1 else f"{label} {labels[:place].count(label) + 1}"
        for place, label in enumerate(labels)
    ]
