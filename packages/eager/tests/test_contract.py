"""The four properties of partial collectives and conservation, on virtual ranks with random delays."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from typing import Any

import pytest
from contract import Case, check, take_part
from hypothesis import given, settings
from hypothesis import strategies as st

import hocket
from hocket.transport.virtual import VirtualWorld
from hocket_eager import Algorithm


def run(case: Case, seed: int = 0) -> list[Any]:
    return VirtualWorld(case.size, seed=seed).run(lambda: take_part(hocket.join(), asdict(case)))


@st.composite
def cases(draw: st.DrawFn, sizes: st.SearchStrategy[int], steps: st.SearchStrategy[int]) -> Case:
    size, most = draw(sizes), draw(steps)
    collective = {
        "candidates": draw(st.one_of(st.none(), st.integers(1, size))),
        "starts": draw(st.sampled_from(["first", "last"])),
        "missed": draw(st.sampled_from(["newest", "sum"])),
        "staleness": draw(st.one_of(st.none(), st.none(), st.integers(0, 4))),
        "algorithm": draw(st.sampled_from(list(Algorithm))),
        "seed": draw(st.integers(0, 5)),
    }
    return Case(
        size,
        collective,
        steps=[most] * size,
        nulls=[most] * size,
        segments=draw(st.integers(1, 3)),
        pace=[draw(st.sampled_from([0.0, 0.1, 1.0, 1.0, 30.0])) for _ in range(size)],
        seed=draw(st.integers(0, 10**6)),
    )


@settings(max_examples=60 if os.environ.get("HOCKET_CELLS") == "all" else 25, derandomize=True)
@given(case=cases(st.integers(1, 11), st.integers(1, 12)), seed=st.integers(0, 10**6))
def test_contract(case: Case, seed: int) -> None:
    check(case, run(case, seed))


@settings(max_examples=20, derandomize=True)
@given(case=cases(st.integers(2, 8), st.integers(2, 10)), data=st.data())
def test_ranks_that_have_run_out_of_data(case: Case, data: st.DataObject) -> None:
    """They propose nothing, at once; and in the end one has no data at all."""
    nulls = [data.draw(st.integers(0, case.most_steps)) for _ in range(case.size)]
    check(replace(case, nulls=nulls), run(replace(case, nulls=nulls)))


@settings(max_examples=20, derandomize=True)
@given(case=cases(st.integers(2, 8), st.integers(2, 10)), data=st.data())
def test_ranks_that_leave_early(case: Case, data: st.DataObject) -> None:
    """Among them ranks that never compute: nobody waits for an application that has gone."""
    steps = [data.draw(st.integers(0, case.most_steps)) for _ in range(case.size)]
    steps[data.draw(st.integers(0, case.size - 1))] = case.most_steps
    case = replace(case, steps=steps)
    check(case, run(case))


@pytest.mark.parametrize(
    ("candidates", "starts", "missed"),
    [
        pytest.param(None, "first", "newest", marks=pytest.mark.full),
        (None, "last", "sum"),
        pytest.param(1, "first", "newest", marks=pytest.mark.full),
        pytest.param(2, "first", "sum", marks=pytest.mark.full),
        (2, "last", "newest"),
    ],
)
def test_hundreds_of_rounds(candidates: int | None, starts: str, missed: str) -> None:
    """A rank that is a hundred times slower than the others lags by many rounds."""
    collective = {"candidates": candidates, "starts": starts, "missed": missed}
    case = Case(5, collective, [200] * 5, [200] * 5, pace=[1.0, 0.5, 100.0, 1.0, 2.0], seed=3)
    check(case, run(case))
