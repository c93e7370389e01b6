"""Batches of `hocket.loader` that come through iterables which read several at once: each counts by its samples."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset
from toys import flat, mlp, on_ranks, sgd

import hocket
from hocket.session.data.reading import LoaderReading

SAMPLES, BATCH = 11, 2
Passing = Callable[[Iterable[Any]], Iterable[Any]]


def prefetched(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield batches, each after the next one has been read."""
    batches = iter(loader)
    current = next(batches, None)
    while current is not None:
        following = next(batches, None)
        yield current
        current = following


def grouped(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield batches of which two are read at a time."""
    batches = iter(loader)
    while group := list(itertools.islice(batches, 2)):
        yield from group


def without_first(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield all but the first batch, in containers of another kind."""
    return ({"x": x, "more": [y]} for x, y in itertools.islice(loader, 1, None))


def copied(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield copies, each after the next batch has been read, as what moves them to a device does."""
    return ([x.clone(), y.clone()] for x, y in prefetched(loader))


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(3, (SAMPLES,), generator=generator))


def trained(passing: Passing, size: int, batch_size: int) -> Tensor:
    """Train for two epochs on some ranks, and return the weights."""

    def train(rank: int) -> Tensor:
        model = mlp()
        optimizer = sgd(model)
        loader = hocket.loader(dataset(), batch_size, shuffle=False)
        with hocket.attach(model, optimizer, "sgd") as session:
            for _ in range(2):
                for batch in session.data(passing(loader)):
                    x, y = (batch["x"], *batch["more"]) if isinstance(batch, dict) else batch
                    optimizer.zero_grad()
                    F.cross_entropy(model(x), y).backward()
                    optimizer.step()
            return flat(model)

    return on_ranks(size, train)[0]


@pytest.mark.parametrize("passing", [prefetched, grouped, without_first])
def test_each_batch_counts_by_its_samples(passing: Passing) -> None:
    # Two ranks' batches of 2 are one rank's of 4, and the last one has 3 samples: 2 and 1.
    torch.testing.assert_close(trained(passing, 2, BATCH), trained(passing, 1, 2 * BATCH))


def test_two_loaders_in_turn_of_which_one_is_read_ahead() -> None:
    def alternating(batch_size: int, reader: Passing) -> Passing:
        def both(loader: Iterable[Any]) -> Iterator[Any]:
            other = hocket.loader(dataset(), batch_size, shuffle=False)
            return itertools.chain.from_iterable(zip(reader(loader), other, strict=True))

        return both

    expected = trained(alternating(2 * BATCH, iter), 1, 2 * BATCH)
    torch.testing.assert_close(trained(alternating(BATCH, prefetched), 2, BATCH), expected)


def test_batches_that_were_handed_out_are_not_held() -> None:
    reading, loader = LoaderReading(0, 1, 0), object()
    batches = [torch.zeros(1) for _ in range(3)]
    for batch in batches:
        reading.note(loader, 1.0, batch)
    held = weakref.ref(batches[0])
    assert reading.take_weight(batches[0]) == 1.0
    del batch, batches
    assert held() is None
    assert reading.take_weight(torch.zeros(1)) is None


def test_copies_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "hocket"):
        trained(copied, 2, BATCH)
    assert "hides their sizes" in caplog.text


def test_reading_ahead_of_the_session_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    def train(rank: int) -> None:
        model = mlp()
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, "sgd") as session:
            for x, y in prefetched(session.data(hocket.loader(dataset(), BATCH, shuffle=False))):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()

    with caplog.at_level(logging.WARNING, "hocket"):
        on_ranks(2, train)
    assert "to read ahead, write session.data(prefetch(loader))" in caplog.text
