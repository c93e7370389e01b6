"""Warnings: phases, exchanges and last steps that training ends before, and outer steps that overshoot."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import hocket
from hocket.strategy.advice import outer_age, overshooting, unreached, widened

OUTER = {"name": "sgd", "lr": 0.7}


def told(config: Mapping[str, Any], steps: int, ranks: int = 2) -> list[str]:
    return list(unreached(hocket.compose(config), steps, ranks))


def exchange(**choices: Any) -> dict[str, Any]:
    return {"parameters": [{"collective": "allreduce", **choices}]}


@given(
    steps=st.integers(1, 60),
    every=st.integers(1, 40),
    start=st.integers(0, 30),
    offset=st.integers(0, 5),
)
def test_an_exchange_that_is_never_due_is_told(steps: int, every: int, start: int, offset: int) -> None:
    assume(offset < every)
    config = (
        {"phases": {start: exchange(every=every, offset=offset)}}
        if start
        else exchange(every=every, offset=offset)
    )
    strategy = hocket.compose(config)
    placed = strategy.at(start).parameters[0]
    due = any(placed.is_due(step, 0, 1, 2) for step in range(start + 1, steps + 1))
    sentences = list(unreached(strategy, steps, 2))
    if start >= steps:
        assert [each.split(" is ")[0] for each in sentences] == [f"phases.{start}"]
    else:
        name = f"phases.{start}.parameters.0" if start else "parameters.0"
        assert [each.split(" never takes place")[0] for each in sentences] == ([] if due else [name])


def test_a_phase_that_is_too_short_for_its_exchange_is_told() -> None:
    config = {**exchange(every=40), "phases": {30: {"parameters": []}}}
    assert told(config, 100) == [
        "parameters.0 never takes place: it is due every 40 steps, but the phase ends after step 30. Lower `every`, "
        "or raise steps or epochs"
    ]


def test_what_a_phase_replaces_at_once_is_not_told() -> None:
    assert not told({**exchange(every=40), "phases": {0: exchange(every=10)}}, 100)


def test_last_steps_count_where_outer_parameters_are_what_is_saved() -> None:
    [sentence] = told(exchange(every=100, outer=OUTER), 146)
    assert sentence == (
        "parameters.0 steps outer parameters every 100 steps: the evaluated and saved model lacks the last 46 of "
        "146 steps. End after step 100, or lower `every`"
    )
    assert not told(exchange(every=100, outer=OUTER), 1_046)
    assert not told(exchange(every=100), 146)


def test_a_rank_alone_exchanges_nothing_but_with_outer_parameters() -> None:
    assert not told(exchange(every=8), 4, ranks=1)
    assert told(exchange(every=8, outer=OUTER), 4, ranks=1)


@pytest.mark.parametrize("within", [True, False])
@pytest.mark.parametrize(("steps", "warnings"), [(0, 0), (2, 1), (3, 0)])
def test_a_script_is_told_at_its_sessions_end(
    steps: int, warnings: int, within: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING, "hocket"):
        session = hocket.attach(model, optimizer, exchange(every=3, outer=OUTER))
        for _ in range(steps):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        session.settle()
        if within:
            with session:
                pass
        else:
            session.close()
    assert caplog.text.count("parameters.0 never takes place: it is due every 3 steps") == warnings


STRONG = {**OUTER, "momentum": 0.9, "nesterov": True}


@pytest.mark.parametrize(
    ("config", "overshoots"),
    [
        (exchange(every=29, outer=STRONG), True),
        (exchange(every=8, outer={**STRONG, "momentum": 0.95}), True),
        (exchange(every=30, outer=STRONG), False),
        (exchange(every=8, outer={**STRONG, "momentum": 0.89}), False),
        (exchange(every=8), False),
        ({**exchange(every=8, outer=STRONG), "synchronous_steps": 1}, False),
        ({**exchange(every=8), "phases": {50: exchange(every=8, outer=STRONG)}}, False),
    ],
)
def test_outer_steps_that_add_up_from_the_first_step_on(
    config: Mapping[str, Any], overshoots: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert bool(list(overshooting(hocket.compose(config)))) is overshoots
    model = torch.nn.Linear(2, 2)
    with hocket.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), config, peer=None):
        warned = [record.message for record in caplog.records if "this overshoots" in record.message]
    every = config["parameters"][0]["every"]
    assert [text.partition(" with momentum")[0] for text in warned] == (
        [f"parameters.0 steps outer parameters every {every} steps"] if overshoots else []
    )


def test_outer_parameters_are_as_old_as_their_last_step() -> None:
    outer = {"name": "sgd", "lr": 0.7, "momentum": 0.9, "nesterov": True}
    every = {"parameters": [{"collective": "allreduce", "every": 100, "outer": outer}]}
    strategy = hocket.compose(every)
    text = outer_age(strategy, 150, 4)
    assert "at step 150: the model holds the outer parameters of step 100" in text
    assert "the 50 steps of training since" in text
    assert outer_age(strategy, 200, 4) == ""
    assert outer_age(hocket.compose("periodic_average"), 3, 4) == ""  # its consensus is the mean of today


def test_short_dtypes_travel_as_float32() -> None:
    assert widened(hocket.compose("agd"), ["float32"]) == ""
    text = widened(hocket.compose("agd"), ["bfloat16", "float32"])
    assert text.startswith("parameters are bfloat16: gradients.0 sends and sums them as float32")
    packed = {"gradients": [{"collective": "sparse_allreduce", "compressor": "bf16"}]}
    assert widened(hocket.compose(packed), ["bfloat16"]) == ""
