"""Buckets keep what shards promise, and put samples of like length together."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hocket.task import ShardSampler

LENGTHS = st.lists(st.integers(1, 50), max_size=200).map(lambda lengths: np.array(lengths, dtype=np.int64))


def bucketed(
    lengths: np.ndarray, batch_size: int, rank: int, size: int, seed: int, *, shuffle: bool = True
) -> ShardSampler:
    return ShardSampler(len(lengths), batch_size, rank, size, seed, shuffle=shuffle, lengths=lengths)


@given(LENGTHS, st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**64 - 1), st.integers(0, 1000))
def test_all_ranks_together_read_every_sample_once(
    lengths: np.ndarray, batch_size: int, size: int, seed: int, epoch: int
) -> None:
    samplers = [bucketed(lengths, batch_size, rank, size, seed) for rank in range(size)]
    shards = []
    for sampler in samplers:
        sampler.set_epoch(epoch)
        shards.append(list(sampler))
        assert len(sampler) == len(shards[-1])
        assert all(len(batch) == batch_size for batch in shards[-1][:-1])
    assert sorted(itertools.chain(*itertools.chain(*shards))) == list(range(len(lengths)))


@given(st.integers(1, 8), st.integers(0, 3))
def test_a_batch_of_a_full_step_is_one_batch_of_one_rank(size: int, epoch: int) -> None:
    """However many ranks share them out, the epoch's batches are the same, in the same order."""
    lengths = np.arange(100) % 17 + 1
    alone = bucketed(lengths, 4, 0, 1, seed=3)
    alone.set_epoch(epoch)
    expected = list(alone)
    for rank in range(size):
        sampler = bucketed(lengths, 4, rank, size, seed=3)
        sampler.set_epoch(epoch)
        full_steps = 100 // (4 * size)
        assert list(sampler)[:full_steps] == expected[rank::size][:full_steps]


def test_epochs_and_seeds_have_other_batches_and_no_shuffle_has_none() -> None:
    lengths = np.arange(64) % 7 + 1

    def batches(seed: int, epoch: int, shuffle: bool = True) -> list[list[int]]:
        sampler = bucketed(lengths, 4, 0, 1, seed, shuffle=shuffle)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert batches(0, 0) == batches(0, 0)
    assert len({str(batches(seed, epoch)) for seed in range(2) for epoch in range(2)}) == 4
    assert batches(0, 1, shuffle=False) == np.arange(64).reshape(16, 4).tolist()


def test_a_resumed_sampler_goes_on() -> None:
    sampler = bucketed(np.arange(50) % 9 + 1, 3, 1, 2, seed=0)
    sampler.set_epoch(2)
    read = list(itertools.islice(sampler, 3))
    resumed = bucketed(np.arange(50) % 9 + 1, 3, 1, 2, seed=0)
    resumed.load_state_dict(sampler.state_dict())
    assert read + list(resumed) == list(sampler)
