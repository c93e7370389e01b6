"""The order of samples, by their indices, and each rank's share of them, for `hocket.loader`.

Symbols: n ranks (`size`), b samples per rank and batch (`batch_size`). A global batch is the samples that all ranks
read in a step.
"""

from __future__ import annotations

import math
import random
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, ConcatDataset, DistributedSampler, Subset, TensorDataset

from hocket import draws, randomness
from hocket.errors import UserError
from hocket.session.data.loader import fingerprint, length_of
from hocket.task.samples import BatchedSamples
from hocket.task.shard import ShardSampler, share

T = TypeVar("T")


class Indices(ABC):
    """The indices of the samples that each rank reads in an epoch, and the weight of each batch."""

    @abstractmethod
    def batches(
        self, rank: int, size: int, epoch: int, start: int, facts: dict[str, object]
    ) -> Iterator[tuple[list[int], float]]:
        """Yield a rank's batches of indices, and the weight of each relative to 1.

        Args:
            rank, size: the rank that reads, and the number of ranks.
            epoch: counted from 0.
            start: the number of batches to skip.
            facts: takes, when the first batch is yielded, values in which all ranks have to agree.
        """

    @abstractmethod
    def num_steps(self, size: int) -> int:
        """Return the number of batches of the rank that has most.

        Raises:
            TypeError: a sampler has no length.
        """


class Shuffled(Indices):
    """All samples, in an order of Hocket's own.

    Args:
        num_samples: the number of samples.
        lengths: the samples' lengths, int64 [num_samples], to make batches of samples of like length; else None.
        batch_size, seed, shuffle, drop_last: as `hocket.loader`'s.
    """

    def __init__(
        self,
        num_samples: int,
        lengths: NDArray[np.int64] | None,
        batch_size: int,
        seed: int,
        *,
        shuffle: bool,
        drop_last: bool,
    ) -> None:
        self._num_samples, self._batch_size, self._seed, self._lengths = (
            num_samples,
            batch_size,
            seed,
            lengths,
        )
        self._options = {"shuffle": shuffle, "drop_last": drop_last}

    def batches(
        self, rank: int, size: int, epoch: int, start: int, facts: dict[str, object]
    ) -> Iterator[tuple[list[int], float]]:
        facts |= {
            "the number of samples": self._num_samples,
            "batch_size": self._batch_size,
            "seed": self._seed,
        }
        facts |= self._options
        sampler = self._sampler(rank, size)
        sampler.load_state_dict({"epoch": epoch, "position": start})
        for indices in sampler:
            yield indices, len(indices) / self._batch_size

    def num_steps(self, size: int) -> int:
        return len(self._sampler(0, size))

    def _sampler(self, rank: int, size: int) -> ShardSampler:
        return ShardSampler(
            self._num_samples,
            self._batch_size,
            rank,
            size,
            self._seed,
            **self._options,
            lengths=self._lengths,
        )


class DealtSamples(Indices):
    """The indices of a sampler, of which each rank reads a share of every n x b.

    Args:
        sampler: yields indices, the same ones on all ranks.
        batch_size, seed, drop_last: as `hocket.loader`'s.
    """

    def __init__(self, sampler: Iterable[int], batch_size: int, seed: int, *, drop_last: bool) -> None:
        self._sampler, self._batch_size, self._seed, self._drop_last = sampler, batch_size, seed, drop_last

    def batches(
        self, rank: int, size: int, epoch: int, start: int, facts: dict[str, object]
    ) -> Iterator[tuple[list[int], float]]:
        facts |= {"batch_size": self._batch_size, "drop_last": self._drop_last, "seed": self._seed}
        whole = size * self._batch_size
        for number, group in enumerate(_drawn(self._sampler, whole, self._seed, epoch)):
            facts.setdefault("what the sampler yields first", _checksum(group))
            if self._drop_last and len(group) < whole:
                return
            first, stop = share(len(group), rank, size)
            if number >= start and stop > first:
                yield group[first:stop], (stop - first) / self._batch_size

    def num_steps(self, size: int) -> int:
        steps = length_of(self._sampler) / (size * self._batch_size)
        return math.floor(steps) if self._drop_last else math.ceil(steps)


class DealtBatches(Indices):
    """The batches of a batch sampler, dealt out to the ranks in turn.

    A batch's weight is its size relative to the mean of the batches that ranks read in the same step.

    Args:
        sampler: yields lists of indices, the same ones on all ranks.
        seed: as `hocket.loader`'s.
    """

    def __init__(self, sampler: Iterable[Sequence[int]], seed: int) -> None:
        self._sampler, self._seed = sampler, seed

    def batches(
        self, rank: int, size: int, epoch: int, start: int, facts: dict[str, object]
    ) -> Iterator[tuple[list[int], float]]:
        facts["seed"] = self._seed
        for number, group in enumerate(_drawn(self._sampler, size, self._seed, epoch)):
            facts.setdefault("what the batch_sampler yields first", _checksum(group))
            if number >= start and rank < len(group):
                mean = sum(map(len, group)) / len(group)
                yield list(group[rank]), len(group[rank]) / mean

    def num_steps(self, size: int) -> int:
        return math.ceil(length_of(self._sampler) / size)


class Alone(Indices):
    """The batches of a sampler that shards by itself, a DistributedSampler.

    Args:
        batches: yields this rank's lists of indices.
        distributed: the sampler.
        batch_size: the number of samples of a batch of weight 1.
    """

    def __init__(
        self, batches: Iterable[Sequence[int]], distributed: DistributedSampler[int], batch_size: int
    ) -> None:
        self._batches, self._distributed, self._batch_size = batches, distributed, batch_size

    def batches(
        self, rank: int, size: int, epoch: int, start: int, facts: dict[str, object]
    ) -> Iterator[tuple[list[int], float]]:
        own = self._distributed
        if (own.rank, own.num_replicas) != (rank, size):
            raise UserError(
                f"the DistributedSampler has rank={own.rank}, num_replicas={own.num_replicas}, but here they are "
                f"{rank} and {size}: leave the sampler out, because hocket.loader divides the samples itself"
            )
        for indices in islice(self._batches, start, None):
            yield list(indices), len(indices) / self._batch_size

    def num_steps(self, size: int) -> int:
        return length_of(self._batches)


def distributed_sampler_of(sampler: object) -> DistributedSampler[int] | None:
    """Return a sampler, or the sampler of a batch sampler, if it is a DistributedSampler; else None."""
    inner = getattr(sampler, "sampler", None) if isinstance(sampler, BatchSampler) else sampler
    return inner if isinstance(inner, DistributedSampler) else None


def subset_facts(dataset: object) -> dict[str, object]:
    """Return what all ranks must agree on: a checksum of the indices of a dataset's Subsets, if any."""
    checksum, found, left = 0, False, [dataset]
    while left:
        part = left.pop()
        if isinstance(part, ConcatDataset):
            left += part.datasets
        elif isinstance(part, Subset):
            indices = np.asarray(part.indices)
            plain = repr(list(indices)).encode() if indices.dtype == object else indices.tobytes()
            checksum, found = zlib.crc32(plain, checksum), True
            left.append(part.dataset)
    key = "the checksum of a Subset's indices (random_split needs generator=torch.Generator().manual_seed(0))"
    return {key: checksum} if found else {}


def sample_mark(dataset: object, num_workers: int) -> int | None:
    """Return a checksum of a dataset's middle sample, read from equal seeds on all ranks; None without one.

    It is read twice, as what other draws change cannot be compared. Of workers' datasets only those in memory are read,
    as others may open files at the first read, which forked workers cannot share.
    """
    inner = dataset
    while isinstance(inner, Subset):
        inner = inner.dataset
    in_memory = isinstance(inner, TensorDataset | list | tuple)
    if isinstance(dataset, BatchedSamples) or (num_workers and not in_memory):
        return None
    marks = set()
    outside = randomness.read()
    try:
        for _ in range(2):
            _seed(0)
            marks.add(fingerprint(dataset[len(dataset) // 2]))  # type: ignore[index, arg-type]
    except Exception:  # whatever a dataset raises, where and when it is read
        return None
    finally:
        randomness.write(outside)
    return marks.pop() if len(marks) == 1 else None


def _seed(word: int) -> None:
    random.seed(word)
    np.random.seed(word % 2**32)
    torch.default_generator.manual_seed(word)


def _drawn(sampler: Iterable[T], num: int, seed: int, epoch: int) -> Iterator[list[T]]:
    """Yield a sampler's items, `num` at a time, drawn from global generators that all ranks seed alike."""
    outside = randomness.read()
    _seed(int(draws.words(1, "sampler", seed, epoch)[0]))
    own = randomness.read()
    randomness.write(outside)
    items: Iterator[T] | None = None
    while True:
        outside = randomness.read()
        randomness.write(own)
        try:
            items = iter(sampler) if items is None else items
            group = list(islice(items, num))
        finally:
            own = randomness.read()
            randomness.write(outside)
        if not group:
            return
        yield group


def _checksum(group: Sequence[object]) -> int:
    return zlib.crc32(repr(group).encode())
