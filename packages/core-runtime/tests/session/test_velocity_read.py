"""Velocity that programs read for a gradient: where a compressor applies momentum, `p.grad` holds it; told once."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from toys import on_ranks

import hocket
from hocket.testing.account import LAYERS, Sums, sample

FEEDBACK = {"name": "error_feedback", "compressor": {"name": "topk", "density": 1.0}}
CORRECTED = {"name": "momentum_correction", "masking": False, "compressor": FEEDBACK}
STEPS = 3


def sharpness_aware(
    rank: int, *overrides: str, momentum: float = 0.5, strategy: Any = None
) -> list[torch.Tensor]:
    """Train as SAM does: what the first backward brings is read, and dropped; return it."""
    model = Sums()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    given = {"gradients": [{"collective": "sparse_allreduce", "compressor": CORRECTED}]}
    read = []
    with hocket.attach(model, optimizer, hocket.compose(given if strategy is None else strategy, *overrides)):
        for step in range(STEPS):
            model(sample(2 * step, rank), range(LAYERS)).backward()
            read.append(torch.cat([p.grad.clone() for p in model.parameters() if p.grad is not None]))
            optimizer.zero_grad()
            model(sample(2 * step + 1, rank), range(LAYERS)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return read


def test_it_is_told_once_with_the_cure(caplog: pytest.LogCaptureFixture) -> None:
    def warnings() -> list[str]:
        told = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return [message for message in told if "p.grad holds momentum" in message]

    on_ranks(2, sharpness_aware)
    first, second = sorted(warnings())
    assert first.startswith("rank 0: ")
    assert second.startswith("rank 1: ")
    assert "momentum_correction" in first

    found = re.search(r"set (gradients\.0\.compressor=.*), which leaves momentum to the optimizer", first)
    assert found is not None
    for read in on_ranks(2, lambda rank: sharpness_aware(rank, found[1])):
        for step, given in enumerate(read):
            mean = (sample(2 * step, 0) + sample(2 * step, 1)) / 2
            torch.testing.assert_close(given, mean)
    assert warnings() == []


def test_nothing_is_told_where_there_is_no_momentum(caplog: pytest.LogCaptureFixture) -> None:
    on_ranks(2, lambda rank: sharpness_aware(rank, momentum=0.0))
    assert not [record for record in caplog.records if "p.grad holds momentum" in record.getMessage()]
