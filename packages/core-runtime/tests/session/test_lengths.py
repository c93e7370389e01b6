"""Loaders whose length is a guess: they are read to their end, on any number of ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_branches import BRANCHES, EXCHANGED, composed, train_pass
from torch import Tensor
from toys import Batch, batches, flat, mlp, on_ranks, reference, sgd

import hocket
from hocket.errors import UserError


class Guessed:
    """A loader that takes its length for another one."""

    def __init__(self, content: list[Batch], length: int) -> None:
        self.content, self.length = content, length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.content)


def trained(
    branch: str, rank: int, count: int, length: int | None, passes: int = 2
) -> tuple[Tensor, list[int]]:
    """Train on `count` batches; return the parameters and the number of steps after each pass.

    Args:
        length: what the loader says; it has none where None.
    """
    model = mlp()
    optimizer = sgd(model)
    steps = []
    with hocket.attach(model, optimizer, composed(branch)) as session:
        data = batches(rank, count)
        for _ in range(passes):
            train_pass(session, model, optimizer, iter(data) if length is None else Guessed(data, length))
            steps.append(session.step)
        session.settle()
    return flat(model), steps


@pytest.mark.one_of_each
@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("length", [1, 2, 4])
def test_batches_beyond_a_loaders_length_are_read(branch: str, length: int) -> None:
    # Two ranks with 4 and 5 batches, against loaders of no length at all.
    guessed = on_ranks(2, lambda rank: trained(branch, rank, 4 + rank, length))
    plain = on_ranks(2, lambda rank: trained(branch, rank, 4 + rank, None))
    for rank, ((mine, steps), (expected, _)) in enumerate(zip(guessed, plain, strict=True)):
        assert torch.equal(mine, expected)
        own = 4 + rank if branch == "local" else 5
        assert steps == [own, 2 * own]


@pytest.mark.parametrize("branch", EXCHANGED)
def test_where_gradients_are_exchanged_they_count_as_in_one_process(branch: str) -> None:
    one, other = batches(0, 3), batches(1, 6)
    expected = reference([[(batch, 1.0) for batch in (*one[n : n + 1], *other[n : n + 1])] for n in range(6)])
    for mine, _ in on_ranks(2, lambda rank: trained(branch, rank, 3 + 3 * rank, 2, passes=1)):
        torch.testing.assert_close(mine, expected)
    [(alone, steps)] = on_ranks(1, lambda rank: trained(branch, 1, 6, 2, passes=1))
    torch.testing.assert_close(alone, reference([[(batch, 1.0)] for batch in other]))
    assert steps == [6]


@pytest.mark.parametrize("branch", [branch for branch in BRANCHES if branch != "local"])
def test_a_length_that_is_too_great_is_believed_once(branch: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="hocket"):
        ranks = on_ranks(2, lambda rank: trained(branch, rank, 3 + rank, 6, passes=3))
    assert [steps for _, steps in ranks] == [[6, 10, 14]] * 2
    told = [text for text in caplog.messages if "__len__" in text]
    assert len(told) == 1
    assert "at most 4 batches in this pass, but their len() is 6" in told[0]
    if branch in EXCHANGED:
        expected, _ = on_ranks(2, lambda rank: trained(branch, rank, 3 + rank, None, passes=3))[0]
        assert torch.equal(ranks[0][0], expected)


@pytest.mark.parametrize("leaves_at", [2, 3])
@pytest.mark.parametrize("who", [(0,), (0, 1)])
def test_who_leaves_the_loop_with_its_last_batch_goes_on_with_the_others(
    leaves_at: int, who: tuple[int, ...]
) -> None:
    def run(rank: int) -> list[int]:
        model = mlp()
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, "dpsgd") as session:
            for _ in range(2):
                for number, (x, y) in enumerate(session.data(Guessed(batches(rank, 3), leaves_at)), 1):
                    optimizer.zero_grad()
                    torch.nn.functional.cross_entropy(model(x), y).backward()
                    optimizer.step()
                    if rank in who and number == leaves_at:
                        break
            return session.gather(session.step)

    if leaves_at == 2 and who == (0,):
        with pytest.raises(
            UserError, match=r"rank 0 left after batch 2, rank 1 goes on after batch 2\. All ranks must leave"
        ):
            on_ranks(2, run)
    else:
        assert on_ranks(2, run) == [[2 * leaves_at] * 2] * 2


def leaving(branch: str, counts: tuple[int, ...], who: tuple[int, ...], leaves_at: int) -> list[Any]:
    """Train twice on loaders without a length, which ranks `who` leave after a batch; return parameters and steps."""

    def run(rank: int) -> tuple[Tensor, int]:
        model = mlp()
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, composed(branch)) as session:
            for _ in range(2):
                for number, (x, y) in enumerate(session.data(iter(batches(rank, counts[rank]))), 1):
                    optimizer.zero_grad()
                    torch.nn.functional.cross_entropy(model(x), y).backward()
                    optimizer.step()
                    if rank in who and number == leaves_at:
                        break
            session.settle()
        return flat(model), session.step

    return on_ranks(len(counts), run)


@pytest.mark.one_of_each
@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("counts", [(3, 3), (3, 2, 3)])
@pytest.mark.parametrize("who", [(0,), (0, 1, 2)])
def test_without_a_length_who_leaves_with_the_last_batch_ends_the_pass_as_who_has_no_more(
    branch: str, counts: tuple[int, ...], who: tuple[int, ...]
) -> None:
    given = leaving(branch, counts, who, leaves_at=3)
    expected = leaving(branch, counts, (), leaves_at=3)
    for (mine, steps), (by_itself, steps_by_itself) in zip(given, expected, strict=True):
        assert torch.equal(mine, by_itself)
        assert steps == steps_by_itself == 6


@pytest.mark.parametrize("branch", BRANCHES)
def test_without_a_length_who_leaves_while_others_have_more_is_named(branch: str) -> None:
    if branch == "local":
        assert [steps for _, steps in leaving(branch, (5, 4), (0,), leaves_at=2)] == [4, 8]
        return
    with pytest.raises(
        UserError, match=r"rank 0 left after batch 2, rank 1 goes on after batch 2\. All ranks must leave"
    ):
        leaving(branch, (5, 4), (0,), leaves_at=2)


def test_a_length_that_is_too_small_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="hocket"):
        on_ranks(2, lambda rank: trained("whole", rank, 4 + rank, 4, passes=1))
    told = [text for text in caplog.messages if "__len__" in text]
    assert [text.partition(". They are read")[0] for text in told] == [
        "rank 1: the loader of session.data has more batches than its len(), 4"
    ]
