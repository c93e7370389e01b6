"""The words and bars at the beginning of a page, against a division by hand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hocket.comparison.answer import answer, bars
from hocket.comparison.group import RunGroup
from hocket.comparison.record import Record


def group(label: str, seconds: float, waited: float, *, step_s: float = 0.1) -> RunGroup:
    """A run of 10 steps."""
    row = {"step": 10, "seconds": seconds, "exposed_wait_s": waited, "bytes_sent": 5e6}
    config = {"seed": 0, "ranks": 4, "compute": {"step_s": step_s}, "delays": None, "transport": "virtual"}
    return RunGroup(label, [Record(Path(label), label, config, [row], None)])


def test_one_run_is_divided_into_computing_and_waiting() -> None:
    [parts, without] = answer([group("agd", 4.0, 3.0)])
    assert parts == "A step took 400 ms: 100 ms of computing and 300 ms (75%) of waiting for other ranks."
    assert without == "Without the waits it would take 25% of the time. A rank sent 500 kB a step."


def test_the_fastest_of_several_is_held_against_the_first() -> None:
    groups = [group("agd", 4.0, 3.0), group("diloco", 1.6, 0.6), group("sgp", 2.0, 1.0)]
    [sentence] = answer(groups)
    assert sentence == "diloco took the shortest steps, 160 ms each: 2.5 times as fast as agd, 400 ms."
    [sentence] = answer(groups[1:])
    assert sentence == "diloco took the shortest steps, 160 ms each."


def test_bars_are_as_long_as_steps() -> None:
    widths = [
        float(each)
        for each in re.findall(r"width:([\d.]+)%", bars([group("a", 4.0, 3.0), group("<b>", 1.0, 0.0)]))
    ]
    assert widths == pytest.approx([22.5, 67.5, 22.5, 0.0])
    assert "<b><b>" not in bars([group("<b>", 1.0, 0.0)])


def test_seconds_without_computing_are_no_answer() -> None:
    untimed = group("agd", 4.0, 3.0, step_s=0.0)
    [sentence] = answer([untimed])
    assert sentence.startswith("agd: no computing time was set (compute.step_s)")
    assert bars([untimed]) == ""
