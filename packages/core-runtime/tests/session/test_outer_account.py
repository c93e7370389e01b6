"""Outer parameters among ranks with unequal numbers of batches, where a compressor keeps some of a distance back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import on_ranks

import hocket
from hocket.testing.session import inner_of

NUMEL = 8
FEEDBACK = {"name": "error_feedback", "compressor": {"name": "topk", "density": 0.25}}
DRAWN = {"name": "error_feedback", "compressor": {"name": "shared_random", "density": 0.25}}


def samples_of(rank: int, count: int) -> Tensor:
    return torch.randn(count, NUMEL, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


@pytest.mark.parametrize("counts", [(6, 6), (6, 3), (1, 5, 3)])
@pytest.mark.parametrize(("collective", "compressor"), [("sparse_allreduce", FEEDBACK), ("allreduce", DRAWN)])
@pytest.mark.parametrize("every", [1, 2])
def test_what_outer_steps_and_residuals_hold_is_what_ranks_have_moved(
    collective: str, compressor: Any, counts: tuple[int, ...], every: int
) -> None:
    """Of each period the mean of what ranks have moved, each counting as its batches."""
    exchange = {
        "collective": collective,
        "compressor": compressor,
        "outer": {"name": "sgd", "lr": 1.0, "momentum": 0.0, "nesterov": False},
        "every": every,
    }

    def run(rank: int) -> tuple[Tensor, Tensor]:
        model = nn.Linear(NUMEL, 1, bias=False).double()
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with hocket.attach(model, optimizer, {"parameters": [exchange]}) as session:
            for x in session.data(list(samples_of(rank, counts[rank]))):
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
            [opened] = inner_of(session).phase.opened
            assert opened.channel.packing is not None
            residual = opened.channel.packing.states[0].residual
            assert residual is not None
            kept = residual[:NUMEL].clone() * opened.scale
            with session.consensus():
                return -model.weight.detach()[0].clone(), kept

    expected = torch.zeros(NUMEL, dtype=torch.float64)
    for begin in range(0, max(counts) // every * every, every):
        moved, weights = torch.zeros(NUMEL, dtype=torch.float64), 0.0
        for rank, count in enumerate(counts):
            own = samples_of(rank, count)[begin : begin + every]
            weights += len(own) / every
            moved += own.sum(0) * (len(own) / every)
        expected += moved / weights
    ended = on_ranks(len(counts), run)
    kept = torch.stack([kept for _, kept in ended]).sum(0)
    torch.testing.assert_close(ended[0][0] + kept, expected, rtol=1e-12, atol=1e-12)
