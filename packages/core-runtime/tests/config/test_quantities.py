"""Quantities as people write them, on the command line and at keys whose names end in a unit."""

from __future__ import annotations

import pytest

from hocket.delays import RandomSubset
from hocket.quantities import bits_per_second, count, seconds
from hocket.training.run import load_run


@pytest.mark.parametrize(
    ("text", "meant"),
    [("200ms", 0.2), ("0.3 s", 0.3), ("50us", 5e-5), (".5", 0.5), ("1e-3s", 1e-3), ("90s", 90), ("60", 60)],
)  # fmt: skip
def test_seconds(text: str, meant: float) -> None:
    assert seconds(text) == meant


def test_bits_and_counts() -> None:
    assert [bits_per_second(text) for text in ("1gbit", "2.5 Gbit/s", "100mbit", "8bit")] == [
        1e9,
        2.5e9,
        1e8,
        8,
    ]
    assert [count(text) for text in ("25M", "1.3B", "7e9", "12k")] == [25e6, 1.3e9, 7e9, 12e3]


@pytest.mark.parametrize("text", ["soon", "", "-1s", "5min", "1ms2", "s"])
def test_what_is_no_time_is_refused_with_the_units(text: str) -> None:
    with pytest.raises(ValueError, match="allowed: a number with s, ms or us, such as 200ms"):
        seconds(text)


def test_a_number_that_is_of_another_unit_is_asked_about() -> None:
    with pytest.raises(ValueError, match=r"^got '200', which would be 200 seconds: write 200ms or 200s$"):
        seconds("200")
    with pytest.raises(ValueError, match=r"which would be 50 seconds: write 50us, 50ms or 50s$"):
        seconds("50", 1.0)


@pytest.mark.parametrize("text", ["1GB", "100", "0gbit", "fast"])
def test_what_is_no_bandwidth_is_refused_with_the_units(text: str) -> None:
    with pytest.raises(ValueError, match="allowed: a number with kbit, mbit, gbit or tbit, such as 1gbit"):
        bits_per_second(text)


def test_keys_that_end_in_a_unit_take_others() -> None:
    run = load_run(
        {
            "network": {"latency_s": "50us", "bandwidth_bits_per_s": "1gbit"},
            "compute": {"step_s": "200ms"},
            "delays": {"name": "random_subset", "count": 1, "seconds": "0.3s", "fraction": 0.1},
            "timeout_s": "20",
        }
    )
    assert (run.network.latency_s, run.network.bandwidth_bits_per_s) == (5e-5, 1e9)
    assert (run.compute.step_s, run.timeout_s) == (0.2, 20)
    assert run.delays == RandomSubset(1, 0.3, 0.1)
