"""Ranks with different numbers of batches: all get as many as the longest, and repetitions count nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, zip_longest

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from toys import GRADIENT_STRATEGIES, Batch, batches, flat, mlp, on_ranks, reference, replicas, sgd, train

import hocket

COUNTS = (3, 5, 4, 0)
LONGEST = max(COUNTS)


def assert_all_close(given: Sequence[Tensor], expected: Tensor) -> None:
    for of_rank in given:
        torch.testing.assert_close(of_rank, expected, rtol=1e-12, atol=1e-13)


def real_batches(counts: Sequence[int] = COUNTS) -> list[list[tuple[Batch, float]]]:
    """Return for each step the batches that ranks really have, each with weight 1."""
    columns = zip_longest(*(batches(rank, count) for rank, count in enumerate(counts)))
    return [[(batch, 1.0) for batch in column if batch is not None] for column in columns]


class Sized:
    """A loader with a length."""

    def __init__(self, content: list[Batch]) -> None:
        self.content = content

    def __len__(self) -> int:
        return len(self.content)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.content)


def generator(content: list[Batch]) -> Iterator[Batch]:
    yield from content


def sized_on_even_ranks(content: list[Batch]) -> Iterable[Batch]:
    return Sized(content) if hocket.join().rank % 2 == 0 else generator(content)


@pytest.mark.one_of_each
@pytest.mark.parametrize("loader", [list, Sized, generator, sized_on_even_ranks])
@pytest.mark.parametrize("strategy", GRADIENT_STRATEGIES)
def test_equals_the_mean_over_real_batches(
    strategy: tuple[str, ...], loader: Callable[[list[Batch]], Iterable[Batch]]
) -> None:
    given = on_ranks(4, lambda rank: train(strategy, loader(batches(rank, COUNTS[rank]))))
    assert_all_close(given, reference(real_batches()))
    assert all(torch.equal(of_rank, given[0]) for of_rank in given)


@pytest.mark.parametrize("counts", [(2, 2, 2), (0, 0, 1), (1, 0, 6), (0, 0, 0)])
def test_other_lengths(counts: tuple[int, ...]) -> None:
    given = on_ranks(3, lambda rank: train(("agd",), batches(rank, counts[rank])))
    assert_all_close(given, reference(real_batches(counts)))


def test_everyone_gets_as_many_batches_as_the_longest() -> None:
    def count(rank: int) -> list[tuple[float, bool]]:
        own = batches(rank, COUNTS[rank])
        model = mlp()
        optimizer = sgd(model)
        seen = []
        with hocket.attach(model, optimizer, "sgd") as session:
            for x, y in session.data(own):
                seen.append((session.weight, any(x is mine for mine, _ in own)))
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        assert session.step == LONGEST
        return seen

    for rank, seen in enumerate(on_ranks(4, count)):
        real = [(1.0, True)] * COUNTS[rank]
        # The rank without data of its own is lent another's.
        assert seen == real + [(0.0, COUNTS[rank] > 0)] * (LONGEST - COUNTS[rank])


def test_several_epochs() -> None:
    def epochs(rank: int) -> Tensor:
        model = mlp()
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, "agd") as session:
            data = session.data(batches(rank, COUNTS[rank]))
            for _ in range(3):
                for x, y in data:
                    optimizer.zero_grad()
                    F.cross_entropy(model(x), y).backward()
                    optimizer.step()
        return flat(model)

    assert_all_close(on_ranks(4, epochs), reference(real_batches() * 3))


@pytest.mark.parametrize("strategy", GRADIENT_STRATEGIES)
def test_weight_by_samples(strategy: tuple[str, ...]) -> None:
    """Ranks have batches of 1, 2, 3, 4 samples: weighted, every sample counts the same."""
    sizes = (1, 2, 3, 4)
    given = on_ranks(
        4,
        lambda rank: train(
            strategy, batches(rank, COUNTS[rank], samples=sizes[rank]), weight=lambda batch: len(batch[0]) / 4
        ),
    )
    columns = zip_longest(*(batches(rank, count, samples=sizes[rank]) for rank, count in enumerate(COUNTS)))
    steps = [[(batch, float(len(batch[0]))) for batch in column if batch is not None] for column in columns]
    assert_all_close(given, reference(steps))


def accumulating(strategy: Sequence[str], rank: int, counts: Sequence[int], every: int) -> Tensor:
    """Accumulate over `every` batches, each loss divided by `every`, as one does."""
    model = mlp()
    optimizer = sgd(model)
    with hocket.attach(model, optimizer, hocket.compose(*strategy)) as session:
        for number, (x, y) in enumerate(session.data(batches(rank, counts[rank])), start=1):
            if number % every == 0:
                (F.cross_entropy(model(x), y) / every).backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                with session.accumulate():
                    (F.cross_entropy(model(x), y) / every).backward()
        assert session.step == max(counts) // every
    return flat(model)


@pytest.mark.one_of_each
@pytest.mark.parametrize("strategy", GRADIENT_STRATEGIES)
@pytest.mark.parametrize(("counts", "every"), [((3, 6, 4, 0), 2), ((1, 6, 4, 5), 3), ((6, 6, 6, 6), 3)])
def test_accumulation(strategy: tuple[str, ...], counts: tuple[int, ...], every: int) -> None:
    """Every real batch of a step counts the same, wherever the ranks' data end."""
    given = on_ranks(4, lambda rank: accumulating(strategy, rank, counts, every))
    columns = real_batches(counts)
    steps = [list(chain(*columns[start : start + every])) for start in range(0, len(columns), every)]
    assert_all_close(given, reference(steps))


def test_accumulation_within_one_batch() -> None:
    """Two backwards of one batch, of which only the second is sent; then ranks run out of data."""

    def halves(rank: int) -> Tensor:
        model = mlp()
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, "agd") as session:
            for x, y in session.data(batches(rank, COUNTS[rank])):
                optimizer.zero_grad()
                with session.accumulate():
                    (F.cross_entropy(model(x[:2]), y[:2]) / 2).backward()
                (F.cross_entropy(model(x[2:]), y[2:]) / 2).backward()
                optimizer.step()
            assert session.step == LONGEST
        return flat(model)

    assert_all_close(on_ranks(4, halves), reference(real_batches()))


@pytest.mark.parametrize("every", [None, 1, 3])
def test_rank_out_of_data_does_not_move_its_parameters(every: int | None) -> None:
    """Where gradients stay local: no step of its own, no momentum, no decay; but it is there for averages."""
    strategy = ("local",) if every is None else ("periodic_average", f"parameters.0.every={every}")
    given = on_ranks(4, lambda rank: train(strategy, batches(rank, COUNTS[rank])))
    data = [batches(rank, count) + [None] * (LONGEST - count) for rank, count in enumerate(COUNTS)]
    for of_rank, expected in zip(given, replicas(data, every), strict=True):
        assert_all_close([of_rank], expected)
    if every is None:
        assert torch.equal(given[3], flat(mlp()))


def test_accumulation_with_local_gradients() -> None:
    """The rank whose data end in the middle steps with what it had got by then."""
    given = on_ranks(2, lambda rank: accumulating(("local",), rank, (3, 4), 2))
    first, second = batches(0, 3), batches(1, 4)
    model = mlp()
    optimizer = sgd(model)
    for pair, share in ((first[:2], 0.5), (first[2:], 0.5)):
        optimizer.zero_grad()
        for x, y in pair:
            (F.cross_entropy(model(x), y) * share).backward()
        optimizer.step()
    assert_all_close(given[:1], flat(model))
    steps = [[(batch, 1.0) for batch in second[start : start + 2]] for start in (0, 2)]
    assert_all_close(given[1:], reference(steps))


def test_clipping_where_local_data_end_in_an_accumulation() -> None:
    """What is done to gradients after backward must be done to those that the optimizer gets."""

    def clipped(rank: int) -> Tensor:
        model = mlp()
        optimizer = sgd(model, momentum=0)
        with hocket.attach(model, optimizer, "local") as session:
            for number, (x, y) in enumerate(session.data(batches(rank, 2 - rank)), start=1):
                if number == 1:
                    with session.accumulate():
                        (F.cross_entropy(model(x), y) / 2).backward()
                else:
                    (F.cross_entropy(model(x), y) / 2).backward()
                    session.clip_grad_norm_(1e-3)
                    optimizer.step()
        return flat(model)

    _, short = on_ranks(2, clipped)
    model = mlp()
    optimizer = sgd(model, momentum=0)
    x, y = batches(1, 1)[0]
    (F.cross_entropy(model(x), y) / 2).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    assert_all_close([short], flat(model))


@pytest.mark.parametrize("strategy", GRADIENT_STRATEGIES)
def test_clipping_where_all_backwards_were_accumulated(strategy: tuple[str, ...]) -> None:
    """What is clipped is the ranks' mean, also where no backward was outside of an accumulation."""

    def clipped(rank: int) -> Tensor:
        model = mlp()
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, hocket.compose(*strategy)) as session:
            for x, y in session.data(batches(rank, 3)):
                optimizer.zero_grad()
                with session.accumulate():
                    F.cross_entropy(model(x), y).backward()
                session.clip_grad_norm_(1e-2)
                optimizer.step()
            assert session.step == 3
        return flat(model)

    model = mlp()
    optimizer = sgd(model)
    for step in zip(*(batches(rank, 3) for rank in range(4)), strict=True):
        optimizer.zero_grad()
        for x, y in step:
            (F.cross_entropy(model(x), y) / 4).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
        optimizer.step()
    assert_all_close(on_ranks(4, clipped), flat(model))


@pytest.mark.parametrize(
    ("recipe", "told"),
    [("local", "the batch counts as a step"), ("sgd", "this rank steps with the other ranks' gradients")],
)
def test_a_batch_without_a_step_is_told_of_once(
    recipe: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    def skip(rank: int) -> None:
        model = mlp()
        with hocket.attach(model, sgd(model), recipe) as session:
            for _ in session.data(batches(rank, 3)):
                pass

    on_ranks(2, skip)
    messages = [text for text in caplog.messages if "session.accumulate()" in text]
    expected = [f"rank {rank} made no optimizer.step() with the batch of step 0: {told}. " for rank in (0, 1)]
    assert [text.partition("To add")[0] for text in sorted(messages)] == expected


@pytest.mark.one_of_each
@pytest.mark.parametrize("strategy", GRADIENT_STRATEGIES)
@pytest.mark.parametrize("skipping", [(1,), (0, 2), (0, 1, 2, 3)])
def test_skipped_batch(strategy: tuple[str, ...], skipping: tuple[int, ...]) -> None:
    """A rank that skips a batch steps with the others' mean; if all skip it, nobody steps."""

    def skip(rank: int) -> Tensor:
        model = mlp()
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, hocket.compose(*strategy)) as session:
            for number, (x, y) in enumerate(session.data(batches(rank, 5))):
                if number == 2 and rank in skipping:
                    continue
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            assert session.step == 5
        return flat(model)

    steps = real_batches((5, 5, 5, 5))
    steps[2] = [weighted for rank, weighted in enumerate(steps[2]) if rank not in skipping]
    given = on_ranks(4, skip)
    assert_all_close(given, reference(steps))


@pytest.mark.parametrize("every", [1, 2])
def test_skipped_batch_with_periodic_average(every: int) -> None:
    """It makes no step of its own, and is there when the replicas are averaged."""

    def skip(rank: int) -> Tensor:
        model = mlp()
        optimizer = sgd(model)
        strategy = hocket.compose("periodic_average", f"parameters.0.every={every}")
        with hocket.attach(model, optimizer, strategy) as session:
            for number, (x, y) in enumerate(session.data(batches(rank, 4))):
                if number == 1 and rank == 1:
                    continue
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        return flat(model)

    data: list[list[Batch | None]] = [[*batches(rank, 4)] for rank in range(3)]
    data[1][1] = None
    for of_rank, expected in zip(on_ranks(3, skip), replicas(data, every), strict=True):
        assert_all_close([of_rank], expected)
