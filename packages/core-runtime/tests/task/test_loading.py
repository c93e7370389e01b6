"""`hocket.loader`: the oracle of n ranks with batches of b is one rank with batches of n b."""

from __future__ import annotations

import itertools
import logging
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    StackDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

import hocket
from hocket.errors import DisagreementError, UserError
from hocket.task import BatchedSamples, ShardSampler, TensorSamples
from hocket.task.indices import sample_mark

Seen = list[list[int]]


class Numbers(Dataset[int]):
    """Sample i is i."""

    def __init__(self, num: int) -> None:
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> int:
        return index


class Noisy(Numbers):
    """Sample i is i with a draw of each kind, as augmentations are."""

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(()), np.random.rand(), random.random()


class Stream(IterableDataset[int]):
    def __init__(self, num: int) -> None:
        self.num = num

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num))


class Lengthy(BatchedSamples):
    """Samples of differing lengths."""

    def __init__(self, num: int) -> None:
        self.lengths = np.arange(num) * 7 % 13 + 1
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: Any) -> Any:
        return torch.tensor(index), torch.tensor(index)


def every_other(samples: Stream, part: int, parts: int) -> Iterator[int]:
    return itertools.islice(iter(samples), part, None, parts)


def attached() -> Any:
    model = nn.Linear(1, 1)
    return hocket.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "local")


def numbers_of(batch: Any) -> list[int]:
    return (batch if isinstance(batch, Tensor) else batch[0]).tolist()


def read(make: Callable[[], Any], size: int, epochs: int = 1) -> list[list[tuple[Any, float]]]:
    """Return for each rank its real batches with their weights, through a session."""

    def body() -> list[tuple[Any, float]]:
        loader = make()
        with attached() as session:
            data = session.data(loader, same_batches=True)
            return [
                (numbers_of(batch), session.weight) for _ in range(epochs) for batch in data if session.weight
            ]

    return hocket.virtual(size).run(body)


def samples_of(ranks: list[list[tuple[Any, float]]]) -> list[int]:
    return sorted(number for of_rank in ranks for numbers, _ in of_rank for number in numbers)


def global_batches(ranks: list[list[tuple[Any, float]]]) -> Seen:
    rows = itertools.zip_longest(*ranks, fillvalue=([], 0.0))
    return [[number for numbers, _ in row for number in numbers] for row in rows]


@given(st.integers(1, 60), st.integers(1, 7), st.integers(1, 4), st.booleans())
def test_ranks_together_read_what_one_rank_reads(num: int, batch: int, size: int, shuffle: bool) -> None:
    ranks = read(lambda: hocket.loader(Numbers(num), batch, shuffle=shuffle, seed=5), size)

    alone = read(lambda: hocket.loader(Numbers(num), batch * size, shuffle=shuffle, seed=5), 1)
    assert global_batches(ranks) == global_batches(alone)
    assert samples_of(ranks) == list(range(num))
    assert all(weight == len(numbers) / batch for of_rank in ranks for numbers, weight in of_rank)


@pytest.mark.one_of_each
@pytest.mark.parametrize(("size", "workers"), [(1, 0), (3, 0), (2, 2)])
@pytest.mark.parametrize(
    "make",
    [
        lambda **o: hocket.loader(Numbers(23), 4, **o),
        lambda **o: hocket.loader(TensorSamples(torch.arange(23), torch.arange(23)), 4, **o),
        lambda **o: hocket.loader(TensorDataset(torch.arange(23)), 4, **o),
        lambda **o: hocket.loader(StackDataset(Numbers(23), Numbers(23)), 4, **o),
        lambda **o: hocket.loader(Lengthy(23), 4, **o),
        lambda **o: hocket.loader(Numbers(23), 4, sampler=RandomSampler(range(23)), **o),
        lambda **o: hocket.loader(
            Numbers(23), batch_sampler=BatchSampler(RandomSampler(range(23)), 4, False), **o
        ),
        lambda **o: hocket.loader(Stream(23), 4, split=every_other, **o),
    ],
    ids=["numbers", "tensors", "dataset", "stacked", "buckets", "sampler", "batch sampler", "stream"],
)
def test_each_sample_once_an_epoch(make: Callable[..., Any], size: int, workers: int) -> None:
    """Whatever a rank has drawn before: what samplers draw is the same on all."""

    def unlike() -> Any:
        torch.manual_seed(hocket.join().rank)
        return make(num_workers=workers)

    epochs = read(unlike, size, epochs=2)
    assert Counter(samples_of(epochs)) == dict.fromkeys(range(23), 2)


def test_samples_of_different_lengths_get_buckets() -> None:
    ranks = read(lambda: hocket.loader(Lengthy(41), 3, seed=5), 2)
    for rank, of_rank in enumerate(ranks):
        lengths = Lengthy(41).lengths
        assert lengths is not None
        expected = list(ShardSampler(41, 3, rank, 2, seed=5, lengths=lengths))
        assert [numbers for numbers, _ in of_rank] == expected


def test_each_epoch_has_an_order_of_its_own_and_each_seed() -> None:
    def orders(seed: int) -> Seen:
        return [numbers for numbers, _ in read(lambda: hocket.loader(Numbers(50), 50, seed=seed), 1, 3)[0]]

    assert len({tuple(order) for seed in (0, 1) for order in orders(seed)}) == 6
    assert orders(0) == orders(0)


def test_without_a_session_it_is_the_launchers_share() -> None:
    def body() -> Seen:
        loader = hocket.loader(Numbers(10), 2)
        return [numbers_of(batch) for _ in range(2) for batch in loader]

    first, second = hocket.virtual(2).run(body)
    assert Counter(itertools.chain(*first, *second)) == dict.fromkeys(range(10), 2)


def test_through_other_iterables() -> None:
    """A session's loader is found behind generators and zips, in its share, epoch and weight."""

    def body() -> list[Any]:
        one, other = hocket.loader(Numbers(10), 2, seed=1), hocket.loader(Numbers(10), 2, seed=2)
        seen = []
        with attached() as session:
            for _ in range(2):
                for batch in session.data(batch for batch in one):
                    seen.append((numbers_of(batch), session.weight))
            for a, b in session.data(zip(one, other, strict=True)):
                seen.append((numbers_of(a) + numbers_of(b), session.weight))
        return seen

    ranks = hocket.virtual(2).run(body)
    expected = read(lambda: hocket.loader(Numbers(10), 2, seed=1), 2, 2)
    for of_rank, plain in zip(ranks, expected, strict=True):
        assert [seen for seen in of_rank if seen[1]][: len(plain)] == plain
    paired = [seen for of_rank in ranks for seen in of_rank[6:] if seen[1]]
    assert Counter(number for numbers, _ in paired for number in numbers) == dict.fromkeys(range(10), 2)


def test_batches_of_unlike_sizes_count_by_their_samples() -> None:
    lists = [[0, 1, 2, 3], [4, 5], [6], [7, 8, 9], [10, 11]]
    ranks = read(lambda: hocket.loader(Numbers(12), batch_sampler=lists), 2)
    assert ranks[0] == [([0, 1, 2, 3], 4 / 3), ([6], 0.5), ([10, 11], 1.0)]
    assert ranks[1] == [([4, 5], 2 / 3), ([7, 8, 9], 1.5)]


def test_length_is_the_number_of_steps_on_all_ranks_before_attach_and_after() -> None:
    def body() -> list[int]:
        loader = hocket.loader(Numbers(9), 2)
        before = len(loader)
        with attached() as session:
            return [before, len(session.data(loader)), len(loader)]

    assert hocket.virtual(4).run(body) == [[2, 2, 2]] * 4


def test_drop_last() -> None:
    ranks = read(lambda: hocket.loader(Numbers(11), 2, drop_last=True), 2)
    assert [[len(numbers) for numbers, _ in of_rank] for of_rank in ranks] == [[2, 2]] * 2


def test_options_are_the_dataloaders() -> None:
    ranks = read(
        lambda: hocket.loader(Numbers(7), 3, collate_fn=lambda batch: (torch.tensor(batch) * 10,)), 1
    )
    assert samples_of(ranks) == [10 * number for number in range(7)]


def test_a_distributed_sampler_is_left_alone() -> None:
    def make() -> Any:
        rank = hocket.join().rank
        return hocket.loader(Numbers(8), 2, sampler=DistributedSampler(Numbers(8), 2, rank, shuffle=False))

    assert [[n for n, _ in of_rank] for of_rank in read(make, 2)] == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]
    with pytest.raises(
        UserError, match=r"has rank=0, num_replicas=1, but here they are . and 2: leave the sampler out"
    ):
        read(lambda: hocket.loader(Numbers(8), 2, sampler=DistributedSampler(Numbers(8), 1, 0)), 2)


@pytest.mark.one_of_each
@pytest.mark.parametrize(("stop", "workers"), [(0, 0), (1, 0), (3, 2), (5, 0)])
@pytest.mark.parametrize(
    "make",
    [
        lambda **o: hocket.loader(Noisy(20), 2, **o),
        lambda **o: hocket.loader(Noisy(20), 2, sampler=WeightedRandomSampler([1.0] * 20, 20), **o),
        lambda **o: (batch for batch in hocket.loader(Noisy(20), 2, **o)),
        lambda **o: zip(hocket.loader(Noisy(20), 2, **o), hocket.loader(Numbers(20), 2), strict=True),
    ],
    ids=["plain", "sampler", "behind a generator", "zip"],
)
def test_resumed_within_an_epoch_bit_for_bit(
    make: Callable[..., Any], stop: int, workers: int, tmp_path: Path
) -> None:
    def epochs(session: Any, first: int, seen: list[str]) -> Iterator[None]:
        for _ in range(first, 3):
            for batch in session.data(make(num_workers=workers)):
                seen.append(f"{batch} {torch.rand(())}")
                yield

    def whole() -> list[str]:
        torch.manual_seed(hocket.join().rank)
        seen: list[str] = []
        with attached() as session:
            for number, _ in enumerate(epochs(session, 0, seen)):
                if number == 5 + stop:
                    session.save(tmp_path)
        return seen

    def resumed() -> list[str]:
        seen: list[str] = []
        with attached() as session:
            for _ in epochs(session, session.load(tmp_path).epoch, seen):
                pass
        return seen

    expected = hocket.virtual(2).run(whole)
    assert hocket.virtual(2).run(resumed) == [of_rank[6 + stop :] for of_rank in expected]


def test_other_ranks_go_on_with_the_epochs_order(tmp_path: Path) -> None:
    def body(saves: bool) -> list[list[int]]:
        seen = []
        with attached() as session:
            first = 0 if saves else session.load(tmp_path).epoch
            loader = hocket.loader(Numbers(12), 6 // session.size)
            for epoch in range(first, 2):
                for batch in session.data(loader):
                    seen.append(numbers_of(batch))
                if epoch == 0:
                    session.save(tmp_path)
        return seen

    whole = hocket.virtual(2).run(body, True)
    [single] = hocket.virtual(1).run(body, False)
    assert single == [a + b for a, b in zip(*(of_rank[2:] for of_rank in whole), strict=True)]


def test_global_generators_neither_matter_nor_move() -> None:
    loader = hocket.loader(Numbers(10), 2, sampler=RandomSampler(range(10)))
    first = [numbers_of(batch) for batch in loader]
    state = torch.get_rng_state()
    other = hocket.loader(Numbers(10), 2, sampler=RandomSampler(range(10)))
    torch.manual_seed(1)
    moved = torch.get_rng_state()
    assert [numbers_of(batch) for batch in other] == first
    assert torch.equal(torch.get_rng_state(), moved)
    assert not torch.equal(state, moved)


def test_workers_of_unlike_ranks_draw_unlike() -> None:
    def body() -> Tensor:
        return torch.stack([draw for _, draw, *_ in hocket.loader(Noisy(8), 1, num_workers=1)])

    first, second = hocket.virtual(2).run(body)
    assert not (first == second).any()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: hocket.loader(Stream(5), 2),
            "cannot divide Stream, .* split=lambda samples, part, parts",
        ),
        (lambda: hocket.loader(Stream(5), 2, shuffle=True, split=every_other), "shuffle is for map-style"),
        (lambda: hocket.loader(Numbers(5), 2, split=every_other), "split is for an IterableDataset"),
        (lambda: hocket.loader(Numbers(5)), "batch_size, the samples in each rank's batch, is None; allowed"),
        (lambda: hocket.loader(Numbers(5), 0), "batch_size, the samples in each rank's batch, is 0; allowed"),
        (
            lambda: hocket.loader(Numbers(5), 2, batch_sampler=[[1]]),
            "batch_sampler and batch_size exclude each other",
        ),
        (
            lambda: hocket.loader(Numbers(5), 2, sampler=[1], shuffle=True),
            "sampler and shuffle exclude each other",
        ),
        (lambda: hocket.loader(Numbers(5), 2, generator=torch.Generator()), "takes no generator"),
        (lambda: hocket.loader(Numbers(5), 2, in_order=False), "in_order=False"),
        (
            lambda: hocket.loader(torch.utils.data.DataLoader(Numbers(5)), 2),  # type: ignore[arg-type]
            "give it the dataset",
        ),
        (lambda: next(iter(hocket.loader(Numbers(0), 2))), "the dataset has no batch for .*: it is empty"),
        (lambda: len(hocket.loader(Numbers(5), 6, drop_last=True)), "drop_last drops everything"),
    ],
)
def test_refusals(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda rank: hocket.loader(Numbers(9), 2, seed=rank), "seed is 1 on rank 1 and 0 on rank 0"),
        (lambda rank: hocket.loader(Numbers(9), 2 + rank), "batch_size is 3 on rank 1 and 2 on rank 0"),
        (lambda rank: hocket.loader(Numbers(9 + rank), 2), "the number of samples is 10 on rank 1"),
        (
            lambda rank: hocket.loader(Numbers(9), 2, sampler=[(n + rank) % 9 for n in range(9)]),
            "what the sampler yields first is",
        ),
        (lambda rank: hocket.loader(split(rank, 9), 2), "Subset's indices .random_split needs"),
        (
            lambda rank: hocket.loader(ConcatDataset([Numbers(3), Subset(split(rank, 9), [0, 1])]), 2),
            "Subset's indices .random_split needs",
        ),
    ],
)
def test_loaders_that_differ_between_ranks_are_refused(make: Callable[[int], Any], message: str) -> None:
    with pytest.raises(DisagreementError, match=message):
        read(lambda: make(hocket.join().rank), 2)


def split(seed: int, num: int) -> Subset[int]:
    """Split off a third for validation, as scripts do that seed each rank differently."""
    return random_split(Numbers(num), [num - num // 3, num // 3], torch.Generator().manual_seed(seed))[0]


@pytest.mark.parametrize("indices", [[4, 0, 2], range(3), np.array([2, 1]), torch.tensor([3, 0]), ["4", "0"]])
def test_subsets_that_are_equal_are_read(indices: Any) -> None:
    class Named(Numbers):
        def __getitem__(self, index: Any) -> int:
            return int(index)

    seen = read(lambda: hocket.loader(Subset(Named(5), indices), 1), 2)
    assert sorted(samples_of(seen)) == sorted(map(int, indices))


class Reseeded(Numbers):
    """Adds noise of a generator of its own, which no seed reaches."""

    def __getitem__(self, index: int) -> Any:
        return index, np.random.default_rng().random()


class Broken(Numbers):
    def __getitem__(self, index: int) -> int:
        raise OSError("no such sample")


def shuffled(rank: int) -> list[int]:
    return random.Random(rank).sample(range(9), 9)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (shuffled, True),
        (lambda rank: TensorDataset(torch.tensor(shuffled(rank))), True),
        (lambda rank: Subset(shuffled(rank), range(5)), True),  # type: ignore[arg-type]
        (lambda rank: shuffled(0), False),
        (lambda rank: Noisy(9), False),
        (lambda rank: Reseeded(9), False),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_samples_that_differ_between_ranks_are_told(
    make: Callable[[int], Any], told: bool, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    """As a split with a seed for each rank, or files in the order of each host's disk."""
    read(lambda: hocket.loader(make(hocket.join().rank), 2, num_workers=workers), 2)
    assert caplog.text.count("hocket.loader: the same sample is another one on rank 1 than on rank 0") == told


def test_a_look_at_a_sample_draws_nothing_and_raises_nothing() -> None:
    for each in (torch.manual_seed, np.random.seed, random.seed):
        each(3)
    expected = Noisy(9)[0]
    for each in (torch.manual_seed, np.random.seed, random.seed):
        each(3)
    assert sample_mark(Noisy(9), 0) is not None
    assert sample_mark(Broken(9), 0) is None
    assert sample_mark(Numbers(9), 1) is None  # it might open a file, which forked workers would share
    assert Noisy(9)[0] == expected


def test_a_loader_for_another_share_is_refused() -> None:
    shared = hocket.loader(Numbers(9), 2)
    with pytest.raises(UserError, match="make a loader for each rank and session"):
        read(lambda: shared, 2)


def test_importing_hocket_imports_no_torch() -> None:
    told = subprocess.run(
        [sys.executable, "-c", "import hocket, sys; print('loader' in dir(hocket), 'torch' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "False" in told.stdout


def test_weights_that_nobody_can_tell_apart_are_told(caplog: pytest.LogCaptureFixture) -> None:
    def ahead(loader: Any) -> Iterator[Any]:
        batches = iter(loader)
        held = next(batches)
        for batch in batches:
            yield held.clone()
            held = batch
        yield held.clone()

    with caplog.at_level(logging.WARNING, "hocket"):
        ranks = read(lambda: ahead(hocket.loader(Numbers(11), 2)), 2)
    assert all(weight == 1 for of_rank in ranks for _, weight in of_rank)
    assert "pass session.data(..., weight=...)" in caplog.text
