"""The oracle of a shard is one rank that reads the global batches."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.task import ShardSampler

sizes = st.fixed_dictionaries(
    {
        "num_samples": st.integers(0, 200),
        "batch_size": st.integers(1, 9),
        "size": st.integers(1, 9),
        "seed": st.integers(0, 2**64 - 1),
        "shuffle": st.booleans(),
    }
)
epochs = st.integers(0, 1000)


def read(sampler: ShardSampler, epoch: int = 0) -> list[list[int]]:
    sampler.set_epoch(epoch)
    return list(sampler)


@given(sizes, epochs)
def test_ranks_together_read_what_one_rank_reads(arguments: dict[str, Any], epoch: int) -> None:
    single = {**arguments, "size": 1, "batch_size": arguments["batch_size"] * arguments["size"]}
    expected = read(ShardSampler(**single, rank=0), epoch)

    shards = [read(ShardSampler(**arguments, rank=rank), epoch) for rank in range(arguments["size"])]

    global_batches = [
        list(itertools.chain.from_iterable(shares)) for shares in itertools.zip_longest(*shards, fillvalue=[])
    ]
    assert global_batches == expected


@given(sizes, epochs)
def test_one_rank_reads_every_sample_once_in_batches_as_large_as_asked(
    arguments: dict[str, Any], epoch: int
) -> None:
    batches = read(ShardSampler(**{**arguments, "size": 1}, rank=0), epoch)

    samples = list(itertools.chain.from_iterable(batches))
    assert sorted(samples) == list(range(arguments["num_samples"]))
    assert all(len(batch) == arguments["batch_size"] for batch in batches[:-1])
    assert all(batches)
    if not arguments["shuffle"]:
        assert samples == sorted(samples)


@given(sizes, epochs)
def test_ragged_batch_is_divided_evenly_and_no_batch_is_empty(arguments: dict[str, Any], epoch: int) -> None:
    samplers = [ShardSampler(**arguments, rank=rank) for rank in range(arguments["size"])]
    shards = [read(sampler, epoch) for sampler in samplers]

    assert [len(shard) for shard in shards] == [len(sampler) for sampler in samplers]
    assert all(batch for shard in shards for batch in shard)
    for shares in itertools.zip_longest(*shards, fillvalue=[]):
        num_samples = [len(share) for share in shares]
        assert max(num_samples) - min(num_samples) <= 1
        assert num_samples == sorted(num_samples, reverse=True)


@given(sizes, epochs, st.data())
def test_resume_yields_the_rest_of_the_epoch(
    arguments: dict[str, Any], epoch: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, arguments["size"] - 1))
    whole = read(ShardSampler(**arguments, rank=rank), epoch)
    num_read = data.draw(st.integers(0, len(whole)))
    interrupted = ShardSampler(**arguments, rank=rank)
    interrupted.set_epoch(epoch)
    for _ in itertools.islice(interrupted, num_read):
        pass
    state = interrupted.state_dict()

    resumed = ShardSampler(**arguments, rank=rank)
    resumed.load_state_dict(state)

    assert resumed.state_dict() == state == {"epoch": epoch, "position": num_read}
    assert read(resumed, epoch) == whole[num_read:]
    assert list(resumed) == whole, "a position holds once"


@given(sizes)
def test_drop_last_leaves_out_the_ragged_global_batch(arguments: dict[str, Any]) -> None:
    whole = arguments["num_samples"] // (arguments["batch_size"] * arguments["size"])
    for rank in range(arguments["size"]):
        sampler = ShardSampler(**arguments, rank=rank, drop_last=True)
        batches = list(sampler)
        assert batches == list(ShardSampler(**arguments, rank=rank))[:whole]
        assert len(batches) == len(sampler) == whole


def test_position_of_another_epoch_is_forgotten() -> None:
    sampler = ShardSampler(num_samples=20, batch_size=3, rank=0, size=2, seed=1)
    expected = read(ShardSampler(num_samples=20, batch_size=3, rank=0, size=2, seed=1), epoch=5)
    sampler.load_state_dict({"epoch": 4, "position": 2})

    assert read(sampler, epoch=5) == expected


def test_state_of_one_rank_fits_a_rank_without_a_share_of_the_last_batch() -> None:
    last = ShardSampler(num_samples=7, batch_size=3, rank=1, size=2, seed=0)
    last.load_state_dict({"epoch": 0, "position": 2})

    assert len(last) == 1
    assert list(last) == []


def test_order_is_drawn_from_seed_and_epoch_and_the_same_in_every_version() -> None:
    """These numbers may never change: a run that is resumed, on another machine too, needs them."""
    first = ShardSampler(num_samples=10, batch_size=10, rank=0, size=1, seed=0)
    second = ShardSampler(num_samples=10, batch_size=10, rank=0, size=1, seed=1)

    assert read(first) == [[0, 2, 3, 5, 4, 9, 7, 1, 6, 8]]
    assert read(second, epoch=2) == [[3, 9, 0, 8, 4, 6, 2, 1, 5, 7]]


def test_order_is_a_fair_permutation() -> None:
    """Each of the 6 orders of 3 samples in a sixth of 3000 epochs, within 5 standard deviations."""
    sampler = ShardSampler(num_samples=3, batch_size=3, rank=0, size=1, seed=7)
    orders, counts = np.unique([read(sampler, epoch)[0] for epoch in range(3000)], axis=0, return_counts=True)

    assert len(orders) == 6
    assert np.all(np.abs(counts - 500) < 5 * np.sqrt(3000 * (1 / 6) * (5 / 6)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_samples": -1}, "num_samples is -1; allowed: 0 or more"),
        ({"batch_size": 0}, "batch_size is 0; allowed: 1 or more"),
        ({"size": 0}, "size is 0; allowed: 1 or more"),
        ({"rank": 2}, "rank is 2; allowed: 0 to 1"),
        ({"rank": -1}, "rank is -1; allowed: 0 to 1"),
        ({"seed": -1}, "seed is -1; allowed"),
        ({"seed": 2**64}, "allowed: 0 to 2"),
    ],
)
def test_arguments_out_of_range_are_refused(changes: dict[str, int], message: str) -> None:
    arguments: dict[str, Any] = {"num_samples": 10, "batch_size": 2, "rank": 0, "size": 2, "seed": 0}
    with pytest.raises(ValueError, match=message):
        ShardSampler(**(arguments | changes))


@pytest.mark.parametrize("position", [-1, 4])
def test_position_beyond_the_epoch_is_refused(position: int) -> None:
    sampler = ShardSampler(num_samples=10, batch_size=2, rank=0, size=2, seed=0)
    with pytest.raises(ValueError, match=f"position is {position}; allowed: 0 to 3"):
        sampler.load_state_dict({"epoch": 0, "position": position})


def test_negative_epoch_is_refused() -> None:
    with pytest.raises(ValueError, match="epoch is -1"):
        ShardSampler(num_samples=10, batch_size=2, rank=0, size=2, seed=0).set_epoch(-1)
