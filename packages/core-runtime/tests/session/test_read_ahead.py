"""Loops that fetch batches before they train with them: the steps are those of a loop that does not.

A prefetcher holds some batches back; a reader of groups fetches all batches of a step before it trains with the first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_branches import BRANCHES, composed
from torch import Tensor
from toys import Batch, batches, flat, mlp, on_ranks, sgd

import hocket

#: Under `local` ranks tell each other of no batch: each that one does not train with is a step.
TOLD = [branch for branch in BRANCHES if branch != "local"]


def held_back(given: Iterable[Batch], number: int) -> Iterator[Batch]:
    """Yield each batch after `number` more have been fetched."""
    fetching = iter(given)
    held = deque(islice(fetching, number))
    for batch in fetching:
        held.append(batch)
        yield held.popleft()
    yield from held


def in_groups(given: Iterable[Batch], size: int) -> Iterator[Batch]:
    """Fetch `size` batches, then yield them."""
    fetching = iter(given)
    while group := list(islice(fetching, size)):
        yield from group


def trained(
    rank: int,
    branch: str,
    read: Any,
    *,
    length: int = 6,
    adds: int = 1,
    passes: int = 2,
    skips: Iterable[tuple[int, int]] = (),
    weight: Any = None,
) -> tuple[Tensor, int, int]:
    """Train by a loop over `read(session.data(...))`; return parameters, and the numbers of steps and passes."""
    model = mlp()
    optimizer = sgd(model)
    skipped = set(skips)
    with hocket.attach(model, optimizer, composed(branch)) as session:
        for _ in range(passes):
            for number, (x, y) in enumerate(read(session.data(batches(rank, length), weight=weight))):
                if (rank, number) in skipped:
                    continue
                ends = (number + 1) % adds == 0
                with nullcontext() if ends else session.accumulate():
                    (F.cross_entropy(model(x), y) / adds).backward()
                if ends:
                    optimizer.step()
                    optimizer.zero_grad()
        session.consensus()
        return flat(model), session.step, session.inner.epochs.ended


def equal(given: list[tuple[Tensor, int, int]], expected: list[tuple[Tensor, int, int]]) -> None:
    for (values, *counts), (others, *own) in zip(given, expected, strict=True):
        assert counts == own
        assert torch.equal(values, others)


@pytest.mark.parametrize(("branch", "size"), [*((branch, 2) for branch in TOLD), ("whole", 1), ("local", 1)])
@pytest.mark.parametrize("number", [1, 2])
def test_a_prefetcher_changes_no_step(branch: str, number: int, size: int) -> None:
    # Rank 1 has fewer batches, so that what it repeats counts nothing.
    def run(rank: int, read: Any) -> tuple[Tensor, int, int]:
        return trained(rank, branch, read, length=6 - 2 * rank)

    expected = on_ranks(size, lambda rank: run(rank, lambda given: given))
    equal(on_ranks(size, lambda rank: run(rank, lambda given: held_back(given, number))), expected)


@pytest.mark.parametrize("branch", ["whole", "compressed", "gossip", "outer"])
def test_each_batch_has_the_weight_of_its_own(branch: str) -> None:
    def weight(batch: Any) -> float:
        return float(batch[1].sum()) + 0.5

    expected = on_ranks(2, lambda rank: trained(rank, branch, lambda given: given, weight=weight))
    for number in (1, 2, 9):
        ahead = on_ranks(
            2,
            lambda rank, number=number: trained(
                rank, branch, lambda given: held_back(given, number), weight=weight
            ),
        )
        equal(ahead, expected)


@pytest.mark.parametrize("branch", TOLD)
def test_a_prefetcher_within_an_accumulation_changes_no_step(branch: str) -> None:
    def run(rank: int, read: Any) -> tuple[Tensor, int, int]:
        return trained(rank, branch, read, length=6 - rank, adds=2)

    expected = on_ranks(2, lambda rank: run(rank, lambda given: given))
    equal(on_ranks(2, lambda rank: run(rank, lambda given: held_back(given, 1))), expected)


@pytest.mark.parametrize("branch", TOLD)
@pytest.mark.parametrize("adds", [1, 3])
def test_a_reader_of_groups_changes_no_step(branch: str, adds: int) -> None:
    expected = on_ranks(2, lambda rank: trained(rank, branch, lambda given: given, adds=adds))
    equal(on_ranks(2, lambda rank: trained(rank, branch, lambda g: in_groups(g, 3), adds=adds)), expected)


@pytest.mark.parametrize("branch", ["whole", "in layers", "gossip"])
def test_a_batch_that_one_rank_leaves_out_of_a_loop_that_reads_ahead_shifts_no_step(branch: str) -> None:
    def run(rank: int, read: Any) -> tuple[Tensor, int, int]:
        return trained(rank, branch, read, skips={(1, 2), (0, 4)})

    expected = on_ranks(2, lambda rank: run(rank, lambda given: given))
    equal(on_ranks(2, lambda rank: run(rank, lambda given: held_back(given, 1))), expected)


@pytest.mark.parametrize(("branch", "size"), [("whole", 2), ("average", 2), ("whole", 1), ("local", 1)])
def test_a_loop_that_only_reads_makes_no_step(branch: str, size: int) -> None:
    def run(rank: int) -> tuple[int, int, bool]:
        model = mlp()
        before = flat(model)
        with hocket.attach(model, sgd(model), composed(branch)) as session:
            samples = sum(len(y) for _, y in session.data(batches(rank, 5)))
            return samples, session.step, torch.equal(before, flat(model))

    assert on_ranks(size, run) == [(20, 0, True)] * size


@pytest.mark.parametrize("branch", ["whole", "gossip"])
def test_a_save_before_the_first_batch_is_trained_with_is_no_step(branch: str, tmp_path: Path) -> None:
    def run(rank: int, saves: bool) -> tuple[Tensor, int]:
        model = mlp()
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, composed(branch)) as session:
            for number, (x, y) in enumerate(session.data(batches(rank, 4 - rank))):
                if saves and number == 0:
                    session.save(tmp_path)
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            session.consensus()
            return flat(model), session.step

    for (values, steps), (expected, own) in zip(
        on_ranks(2, lambda rank: run(rank, saves=True)),
        on_ranks(2, lambda rank: run(rank, saves=False)),
        strict=True,
    ):
        assert steps == own == 4
        assert torch.equal(values, expected)


def test_it_is_said_once_with_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    on_ranks(2, lambda rank: trained(rank, "whole", lambda given: held_back(given, 2)))
    [message] = caplog.messages
    assert message.startswith("the loop over session.data reads ahead")
    assert "session.data(prefetched(loader))" in message
