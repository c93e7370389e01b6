"""RedSync where ranks have different numbers of batches and steps are left out, against SGD and sums in one process."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from toys import on_ranks

import hocket
from hocket.testing.session import inner_of

NUMEL = 40
COMPRESSORS: tuple[dict[str, Any], ...] = (
    {"name": "redsync.trimmed"},
    {"name": "redsync.sampled", "correct_momentum": False},
    {"name": "redsync.asq", "feedback": "error"},
    {"name": "redsync.hybrid", "methods": {"*.1.*": "dense"}},
)
SCALABLE = {"name": "redsync.allreduce", "auto": False, "algorithm": "scalable"}
COLLECTIVES = ("sparse_allreduce", {"name": "redsync.allreduce", "auto": False}, SCALABLE)
#: Means of several ranks' elements are no values that could be added up.
PAIRS = [
    (collective, compressor)
    for collective, compressor in product(COLLECTIVES, COMPRESSORS)
    if not (collective is SCALABLE and compressor["name"] == "redsync.asq")
]

Bad = set[tuple[int, int]]


def strategy(collective: Any, compressor: dict[str, Any], overlap: str, **fields: Any) -> dict[str, Any]:
    compressor = {"dense_below_kb": 0.0, **compressor, **fields}
    return {"gradients": [{"collective": collective, "compressor": compressor, "overlap": overlap}]}


def model_of() -> nn.ModuleList:
    layers = nn.ModuleList(nn.Linear(NUMEL, 1, bias=False).double() for _ in range(3))
    for parameter in layers.parameters():
        nn.init.constant_(parameter, 0.1)
    return layers


def samples_of(rank: int, count: int) -> Tensor:
    """Return [count, layers, NUMEL]."""
    return torch.randn(count, 3, NUMEL, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def loss_of(layers: nn.ModuleList, x: Tensor) -> Tensor:
    loss: Tensor = sum(layer(x[number]).square().sum() / NUMEL for number, layer in enumerate(layers))
    return loss


def having(counts: list[int], step: int, bad: Bad) -> list[int]:
    """Return the ranks whose samples count in a step; none where one of them is poisoned."""
    ranks = [rank for rank, count in enumerate(counts) if step < count]
    return [] if any((rank, step) in bad for rank in ranks) else ranks


CASES = {
    "counts": st.lists(st.integers(1, 5), min_size=2, max_size=3),
    "bad": st.sets(st.tuples(st.integers(0, 2), st.integers(0, 4)), max_size=3),
    "overlap": st.sampled_from(["none", "backward"]),
}


@given(**CASES, collective=st.sampled_from(COLLECTIVES), nesterov=st.booleans())
def test_at_density_1_it_is_sgd_with_momentum(
    counts: list[int], bad: Bad, overlap: str, collective: Any, nesterov: bool
) -> None:
    def sgd(layers: nn.Module) -> torch.optim.SGD:
        return torch.optim.SGD(
            layers.parameters(), lr=0.1, momentum=0.9, weight_decay=0.05, nesterov=nesterov
        )

    def run(rank: int) -> list[Tensor]:
        layers = model_of()
        optimizer = sgd(layers)
        own = strategy(collective, {"name": "redsync.hybrid"}, overlap, density=1.0, masking=False)
        with hocket.attach(layers, optimizer, own, on_nonfinite="skip") as session:
            for x in session.data(list(samples_of(rank, counts[rank]))):
                optimizer.zero_grad()
                (loss_of(layers, x) * (torch.nan if (rank, session.step) in bad else 1.0)).backward()
                optimizer.step()
        return [p.detach().clone() for p in layers.parameters()]

    layers = model_of()
    optimizer = sgd(layers)
    for step in range(max(counts)):
        ranks = having(counts, step, bad)
        optimizer.zero_grad()
        for rank in ranks:
            (loss_of(layers, samples_of(rank, counts[rank])[step]) / len(ranks)).backward()
        optimizer.step()
    for own in on_ranks(len(counts), run):
        torch.testing.assert_close(own, list(layers.parameters()), rtol=1e-12, atol=1e-13)


@given(**CASES, pair=st.sampled_from(PAIRS))
def test_what_was_applied_and_what_is_kept_are_what_was_contributed(
    counts: list[int], bad: Bad, overlap: str, pair: tuple[Any, dict[str, Any]]
) -> None:
    collective, compressor = pair

    def run(rank: int) -> tuple[Tensor, Tensor]:
        layers = model_of()
        optimizer = torch.optim.SGD(layers.parameters(), lr=1.0)
        own = strategy(collective, compressor, overlap, density=0.1)
        with hocket.attach(layers, optimizer, own, on_nonfinite="skip") as session:
            for x in session.data(list(samples_of(rank, counts[rank]))):
                optimizer.zero_grad()
                loss = sum(layer(x[number]).sum() for number, layer in enumerate(layers))
                (loss * (torch.inf if (rank, session.step) in bad else 1.0)).backward()
                optimizer.step()
            [opened] = inner_of(session).phase.opened
            kept = torch.zeros(3, NUMEL, dtype=torch.float64)
            assert opened.channel.packing is not None
            for segment in opened.segments:
                for span in segment.spans:
                    residual = opened.channel.packing.states[segment.index].residual
                    assert residual is not None
                    kept[int(span.name.split(".")[0])] = residual[span.start : span.stop]
        return 0.1 - torch.cat([p.detach() for p in layers.parameters()]), kept

    total = torch.zeros(3, NUMEL, dtype=torch.float64)
    for step in range(max(counts)):
        ranks = having(counts, step, bad)
        total += sum(samples_of(rank, counts[rank])[step] / len(ranks) for rank in ranks)
    ended = on_ranks(len(counts), run)
    for applied, _ in ended:
        torch.testing.assert_close(applied + sum(kept for _, kept in ended), total, rtol=1e-12, atol=1e-12)


@pytest.mark.one_of_each
@pytest.mark.parametrize("overlap", ["none", "backward"])
@pytest.mark.parametrize(("collective", "compressor"), PAIRS)
def test_after_a_step_that_was_left_out_all_is_as_if_it_had_not_been(
    collective: Any, compressor: dict[str, Any], overlap: str
) -> None:
    """Residuals, velocities and thresholds, bit for bit."""

    def run(rank: int, count: int) -> dict[str, Any]:
        layers = model_of()
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.1, momentum=0.9)
        own = strategy(collective, compressor, overlap, density=0.1)
        with hocket.attach(layers, optimizer, own, on_nonfinite="skip") as session:
            for x in session.data(list(samples_of(rank, 3)[:count])):
                optimizer.zero_grad()
                (loss_of(layers, x) * ((1e20, torch.nan)[rank] if session.step == 2 else 1.0)).backward()
                optimizer.step()
            packing = inner_of(session).phase.opened[0].channel.packing
            assert packing is not None
            return packing.state_dict()

    before, after = (on_ranks(2, partial(run, count=count)) for count in (2, 3))
    for expected, own in zip(before, after, strict=True):
        torch.testing.assert_close(own, expected, rtol=0, atol=0)
