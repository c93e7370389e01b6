"""What a session says once where a user may take one thing for another: old outer parameters, longer dtypes."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import hocket

OUTER = {"name": "sgd", "lr": 0.7}


def told(
    caplog: pytest.LogCaptureFixture, strategy: object, steps: int, dtype: torch.dtype = torch.float32
) -> list[str]:
    def train() -> list[torch.Tensor]:
        model = nn.Linear(3, 1, bias=False).to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with hocket.attach(model, optimizer, hocket.compose(strategy)) as session:  # type: ignore[arg-type]
            for _ in range(steps):
                optimizer.zero_grad()
                model(torch.full((1, 3), 1.0 + session.rank, dtype=dtype)).sum().backward()
                optimizer.step()
            for _ in range(2):
                with session.consensus():
                    seen = model.weight.detach().clone()
        return [seen]

    with caplog.at_level(logging.WARNING, logger="hocket"):
        hocket.virtual(2).run(train)
    return [record.getMessage() for record in caplog.records]


def test_a_consensus_between_outer_steps_says_of_which_step_it_is(caplog: pytest.LogCaptureFixture) -> None:
    strategy = {"parameters": [{"collective": "allreduce", "every": 4, "outer": OUTER}]}
    [text, *_] = [each for each in told(caplog, strategy, 6) if "consensus at step" in each]
    assert "at step 6: the model holds the outer parameters of step 4" in text
    assert len([each for each in caplog.messages if "consensus at step" in each]) == 1
    caplog.clear()
    assert not [each for each in told(caplog, strategy, 8) if "consensus at step" in each]


def test_bfloat16_parameters_say_that_they_travel_as_float32(caplog: pytest.LogCaptureFixture) -> None:
    texts = told(caplog, "agd", 1, torch.bfloat16)
    assert [each for each in texts if "sends and sums them as float32" in each] == texts[:1]
    caplog.clear()
    assert told(caplog, "agd", 1) == []
