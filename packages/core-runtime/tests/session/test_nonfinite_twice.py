"""NaN in the first of two backwards of a step, under compressors: what the second one brings is added to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toys import batches, flat, mlp, on_ranks, sgd

import hocket
from hocket.errors import NonFiniteElsewhereError, NonFiniteError

TOP_K: dict[str, Any] = {"name": "error_feedback", "compressor": {"name": "topk", "density": 1.0}}
COMPRESSORS = {
    "error feedback": TOP_K,
    "velocity": {"name": "momentum_correction", "masking": False, "compressor": TOP_K},
}
BAD = 1


def strategy(compressor: str, overlap: str) -> dict[str, Any]:
    exchange = {"collective": "sparse_allreduce", "compressor": COMPRESSORS[compressor], "overlap": overlap}
    return {"gradients": [exchange]}


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, *, nan: bool) -> None:
    data = batches(0, 8)
    for number in range(4):
        if number == BAD and not nan:
            continue
        optimizer.zero_grad()
        for turn, (x, y) in enumerate(data[2 * number : 2 * number + 2]):
            poisoned = number == BAD and turn == 0
            (F.cross_entropy(model(x), y) * (torch.nan if poisoned else 1.0)).backward()
        optimizer.step()


@pytest.mark.one_of_each
@pytest.mark.parametrize("overlap", ["none", "backward"])
@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_the_step_is_left_out(compressor: str, overlap: str) -> None:
    def run(_: int) -> tuple[Tensor, int]:
        model = mlp()
        optimizer = sgd(model)
        given = strategy(compressor, overlap)
        with hocket.attach(model, optimizer, given, on_nonfinite="skip") as session:
            loop(model, optimizer, nan=True)
            return flat(model), session.skipped_steps

    model = mlp()
    loop(model, sgd(model), nan=False)
    for found, skipped in on_ranks(2, run):
        torch.testing.assert_close(found, flat(model), rtol=1e-12, atol=1e-13)
        assert skipped == 1


@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_the_error_names_the_parameters(compressor: str) -> None:
    def run(_: int) -> str:
        model = mlp()
        optimizer = sgd(model)
        with (
            pytest.raises((NonFiniteError, NonFiniteElsewhereError)) as told,
            hocket.attach(model, optimizer, strategy(compressor, "none")),
        ):
            loop(model, optimizer, nan=True)
        return str(told.value)

    for message in on_ranks(2, run):
        assert f"at step {BAD} hold NaN or Inf, in 2.bias" in message, message
