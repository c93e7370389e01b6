"""Outer steps among the leaders of groups whose ranks train on their mean gradient, with unequal numbers of batches.

A leader's distance is what its group has done: it counts as much as the batches of all ranks of the group, also where
the leader itself is out of data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import on_ranks

import hocket

NUMEL, LR, EVERY = 6, 0.1, 3
EVERYTHING = {"name": "error_feedback", "compressor": {"name": "topk", "density": 1.0}}
GRADIENTS: dict[str, dict[str, Any]] = {
    "overlap none": {"collective": "allreduce"},
    "overlap backward": {"collective": "allreduce", "overlap": "backward"},
    "what compressors remember": {"collective": "sparse_allreduce", "compressor": EVERYTHING},
}


def samples_of(rank: int, count: int) -> Tensor:
    return torch.randn(count, NUMEL, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def expected(counts: Sequence[int], group: int) -> Tensor:
    """Return the outer parameters, of a model whose gradient is its batch, in one process."""
    groups = [range(first, min(first + group, len(counts))) for first in range(0, len(counts), group)]
    data = [samples_of(rank, count) for rank, count in enumerate(counts)]
    outer = torch.zeros(NUMEL, dtype=torch.float64)
    for begin in range(0, max(counts) // EVERY * EVERY, EVERY):
        moved, batches = torch.zeros(NUMEL, dtype=torch.float64), 0
        for ranks in groups:
            distance, own = torch.zeros(NUMEL, dtype=torch.float64), 0
            for step in range(begin, begin + EVERY):
                given = [data[rank][step] for rank in ranks if step < counts[rank]]
                if given:
                    distance += LR * torch.stack(given).mean(0)
                own += len(given)
            moved += own * distance
            batches += own
        outer -= moved / batches
    return outer


def run(counts: Sequence[int], group: int, gradients: dict[str, Any], *, sharded: bool) -> list[Tensor]:
    over = {"size": group, "sharded": sharded}
    strategy = {
        "gradients": [gradients | {"over": {"name": "group", **over}}],
        "parameters": [
            {
                "collective": "allreduce",
                "over": {"name": "leaders", **over},
                "every": EVERY,
                "outer": {"name": "sgd", "lr": 1.0, "momentum": 0.0, "nesterov": False},
            },
            {"collective": "broadcast", "over": {"name": "group", **over}, "every": EVERY},
        ],
    }

    def of_rank(rank: int) -> Tensor:
        model = nn.Linear(NUMEL, 1, bias=False).double()
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        with hocket.attach(model, optimizer, strategy) as session:
            for x in session.data(list(samples_of(rank, counts[rank]))):
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
            with session.consensus():
                return model.weight.detach()[0].clone()

    return on_ranks(len(counts), of_rank)


@pytest.mark.one_of_each
@pytest.mark.parametrize("gradients", GRADIENTS.values(), ids=GRADIENTS)
@pytest.mark.parametrize(
    "counts",
    [(6, 6, 6, 6), (3, 6, 6, 6), (1, 6, 6, 4), (6, 2, 6, 6), (2, 2, 6, 6), (1, 6, 2, 6)],
    ids=str,
)
def test_a_group_counts_as_its_batches_whoever_leads_it(
    counts: tuple[int, ...], gradients: dict[str, Any]
) -> None:
    wanted = expected(counts, 2)
    for given in run(counts, 2, gradients, sharded=False):
        torch.testing.assert_close(given, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("counts", [(1, 6, 6), (6, 6, 6), (6, 6, 2)], ids=str)
def test_groups_of_other_sizes_count_as_their_batches(counts: tuple[int, ...]) -> None:
    wanted = expected(counts, 2)
    for given in run(counts, 2, GRADIENTS["overlap none"], sharded=False):
        torch.testing.assert_close(given, wanted, rtol=1e-6, atol=1e-6)


def test_leaders_of_a_share_each_count_as_their_group() -> None:
    counts = (1, 6, 6, 4)
    for given in run(counts, 2, GRADIENTS["overlap none"], sharded=True):
        torch.testing.assert_close(given, expected(counts, 2), rtol=1e-6, atol=1e-6)
