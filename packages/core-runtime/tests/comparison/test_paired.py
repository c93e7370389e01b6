"""Differences seed by seed: by numbers worked out by hand, and t by integrating its density."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from hocket.comparison.group import RunGroup
from hocket.comparison.measure import Measure
from hocket.comparison.paired import difference_table, paired
from hocket.comparison.record import Record

LOSS = Measure("loss", lambda record: record.last("loss"))


def group(name: str, losses: Mapping[int, float | None]) -> RunGroup:
    return RunGroup(
        name,
        [
            Record(Path(f"{name}-{seed}"), f"{name}-{seed}", {"seed": seed}, [{"loss": loss}], {})
            for seed, loss in losses.items()
        ],
    )


def within(t: float, degrees: int) -> float:
    """Return the probability that Student's t lies between -t and t, by Simpson's rule."""
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(degrees * math.pi)

    def density(x: float) -> float:
        return scale * math.pow(1 + x * x / degrees, -(degrees + 1) / 2)

    pieces = 2000
    width = t / pieces
    inner = sum((4 if place % 2 else 2) * density(place * width) for place in range(1, pieces))
    return 2 * width / 3 * (density(0.0) + inner + density(t))


@pytest.mark.parametrize("seeds", range(2, 33))
def test_the_interval_covers_95_percent(seeds: int) -> None:
    # Differences of 1 and -1 in turns, the last one 0 where their number is odd.
    losses = {seed: 0.0 if seed == seeds - 1 and seeds % 2 else (-1.0) ** seed for seed in range(seeds)}
    found = paired(group("b", losses), group("a", dict.fromkeys(range(seeds), 0.0)), LOSS.of)
    assert found is not None
    error = math.sqrt((seeds - seeds % 2) / (seeds - 1) / seeds)
    if seeds <= 31:
        assert within(found.margin / error, seeds - 1) == pytest.approx(
            0.95, abs=6e-5
        )  # t has three decimals
    else:
        assert 0.95 < within(found.margin / error, seeds - 1) < 0.9505


def test_by_hand() -> None:
    base = group("a", {0: 10.0, 1: 20.0, 2: 30.0, 7: 5.0})
    other = group("b", {2: 33.0, 0: 11.0, 1: 22.0, 9: 0.0})
    found = paired(other, base, LOSS.of)
    # Differences 1, 2, 3: mean 2, deviation 1, t for 2 degrees of freedom 4.303.
    assert found is not None
    assert (found.mean, found.seeds) == (2.0, 3)
    assert found.margin == pytest.approx(4.303 / math.sqrt(3))
    assert not found.leaves_out_zero
    back = paired(base, other, LOSS.of)
    assert back is not None
    assert back.mean == -2.0
    table = difference_table([base, other], [LOSS])
    assert table is not None
    assert list(table.rows) == [["b", "3", "+2.00 ± 2.48"]]


def test_what_leaves_out_zero_is_marked_and_rounding_is_none() -> None:
    base = group("a", {0: 1.0, 1: 2.0, 2: 3.0})
    far, equal, rounded = (
        group("far", {0: 0.5, 1: 1.4, 2: 2.6}),
        group("equal", {0: 1.0, 1: 2.0, 2: 3.0}),
        group("rounded", {0: 1.0 + 1e-15, 1: 2.0 + 1e-15, 2: 3.0 + 1e-15}),
    )
    table = difference_table([base, far, equal, rounded], [LOSS])
    assert table is not None
    # Differences -0.5, -0.6, -0.4: mean -0.5, deviation 0.1, margin 4.303 * 0.1 / sqrt(3) = 0.2484.
    assert list(table.rows) == [
        ["far", "3", "-0.500 ± 0.248 *"],
        ["equal", "3", "0 ± 0"],
        ["rounded", "3", "0 ± 0"],
    ]


def test_units_and_missing_numbers() -> None:
    share = Measure("waited", lambda record: record.last("loss"), (("%", 0.01),))
    base = group("a", {0: 0.5, 1: 0.5, 2: 0.5})
    some, one = group("some", {0: 0.51, 1: 0.53, 2: None}), group("one", {0: 0.5, 1: None, 2: None})
    table = difference_table([base, some, one], [share])
    assert table is not None
    # In percent: 1 and 3, mean 2, deviation sqrt(2), margin 12.706 * sqrt(2) / sqrt(2) = 12.7.
    assert list(table.rows) == [["some", "3", "+2.0 ± 12.7 % (2 of 3)"], ["one", "3", "-"]]


def test_a_seed_that_ran_twice_counts_once() -> None:
    twice = RunGroup("b", [*group("b", {0: 1.0, 1: 4.0}).records, *group("c", {0: 3.0}).records])
    found = paired(twice, group("a", {0: 0.0, 1: 0.0}), LOSS.of)
    # Differences 2 and 4: mean 3, deviation sqrt(2).
    assert found is not None
    assert (found.mean, found.seeds) == (3.0, 2)
    assert found.margin == pytest.approx(12.706)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_run_that_diverged_says_nothing(loss: float) -> None:
    found = paired(group("b", {0: loss, 1: 1.0, 2: 1.5}), group("a", {0: loss, 1: 0.0, 2: 0.0}), LOSS.of)
    assert found is not None
    assert math.isnan(found.mean)
    assert not found.leaves_out_zero


def test_without_two_shared_seeds_there_is_no_table() -> None:
    one, other, third = (
        group("a", {0: 1.0, 1: 1.0}),
        group("b", {1: 1.0, 2: 1.0}),
        group("c", {3: 1.0, 4: 1.0}),
    )
    assert difference_table([one], [LOSS]) is None
    assert difference_table([one, other, third], [LOSS]) is None
    # The first that can be compared is what others differ from.
    table = difference_table([third, one, group("d", {0: 2.0, 1: 2.0})], [LOSS])
    assert table is not None
    assert table.meaning.startswith("differences from a, seed by seed: ")
    assert [row[0] for row in table.rows] == ["d"]
