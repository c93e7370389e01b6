"""Batches that count by their tokens, and accumulation under a GradScaler where ranks' data are uneven."""

from __future__ import annotations

from itertools import chain, zip_longest

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from toys import GRADIENT_STRATEGIES, Batch, batches, flat, mlp, on_ranks, sgd, step_with

import hocket

COUNTS = (3, 6, 4, 0)
EVERY = 2


def padded(rank: int) -> list[Batch]:
    """Return batches in which some targets are padding; that of rank 1's second batch are all but one."""
    generator = torch.Generator().manual_seed(rank)
    made = []
    for number, (x, y) in enumerate(batches(rank, COUNTS[rank], samples=6)):
        kept = 1 if (rank, number) == (1, 1) else int(torch.randint(1, 7, (), generator=generator))
        targets = y.clone()
        targets[kept:] = -100
        made.append((x, targets))
    return made


def tokens(batch: Batch) -> float:
    return float((batch[1] != -100).sum())


@pytest.mark.parametrize("strategy", GRADIENT_STRATEGIES)
def test_every_token_counts_the_same(strategy: tuple[str, ...]) -> None:
    """The step is that of one process whose loss is the mean over all ranks' tokens."""

    def run(rank: int) -> Tensor:
        model = mlp()
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, hocket.compose(*strategy)) as session:
            for x, y in session.data(padded(rank), weight=tokens):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        return flat(model)

    model = mlp()
    optimizer = sgd(model)
    for column in zip_longest(*(padded(rank) for rank in range(4))):
        together = [batch for batch in column if batch is not None]
        x, y = (torch.cat(parts) for parts in zip(*together, strict=True))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    for of_rank in on_ranks(4, run):
        torch.testing.assert_close(of_rank, flat(model), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("strategy", GRADIENT_STRATEGIES)
def test_accumulation_under_a_scaler_of_uneven_data(strategy: tuple[str, ...]) -> None:
    """Unscaled and clipped, it is the mean over the real batches of each step."""

    def run(rank: int) -> tuple[Tensor, float]:
        model = mlp(0, torch.float32)
        optimizer = sgd(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        with hocket.attach(model, optimizer, hocket.compose(*strategy)) as session:
            data = session.data(batches(rank, COUNTS[rank], dtype=torch.float32))
            for number, (x, y) in enumerate(data, start=1):
                if number % EVERY:
                    with session.accumulate():
                        scaler.scale(F.cross_entropy(model(x), y) / EVERY).backward()
                    continue
                scaler.scale(F.cross_entropy(model(x), y) / EVERY).backward()
                scaler.unscale_(optimizer)
                session.clip_grad_norm_(1e3)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            assert session.step == max(COUNTS) // EVERY
        return flat(model), scaler.get_scale()

    columns = list(zip_longest(*(batches(rank, count) for rank, count in enumerate(COUNTS))))
    model = mlp()
    optimizer = sgd(model)
    for start in range(0, len(columns), EVERY):
        real = [batch for batch in chain(*columns[start : start + EVERY]) if batch is not None]
        step_with(model, optimizer, [(batch, 1.0) for batch in real])
    for of_rank, scale in on_ranks(4, run):
        torch.testing.assert_close(of_rank.double(), flat(model), rtol=1e-4, atol=1e-6)
        assert scale == 2.0**11
