"""`hocket.loader`: a DataLoader that shares its samples out to the ranks.

The session that reads it says which share that is (`hocket.session.data.loader`), so that a loader can be made before
`attach` or after it; without a session the launcher does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    default_collate,
    get_worker_info,
)

from hocket import draws
from hocket.errors import UserError
from hocket.launch.joining import join
from hocket.plain import Batch, Tree
from hocket.session.data.reading import SAMPLE, LoaderReading, reading_in_force
from hocket.task.indices import (
    Alone,
    DealtBatches,
    DealtSamples,
    Indices,
    Shuffled,
    distributed_sampler_of,
    sample_mark,
    subset_facts,
)
from hocket.task.samples import BatchedSamples

#: Returns one part's samples of an IterableDataset: called with the dataset, the part, from 0, and the number of parts.
Split = Callable[[Any, int, int], Iterable[Batch]]

#: A batch and its weight; None if the weight is not known.
_Weighted = tuple[Batch, float | None]


def loader(
    dataset: Dataset[Batch],
    batch_size: int | None = None,
    *,
    shuffle: bool | None = None,
    seed: int = 0,
    drop_last: bool = False,
    sampler: Iterable[int] | None = None,
    batch_sampler: Iterable[Sequence[int]] | None = None,
    split: Split | None = None,
    **options: Any,
) -> Loader:
    """Return a DataLoader for `session.data` that gives each sample to one rank, once in an epoch.

    The order is drawn from `seed` and the epoch, the number of passes that have ended: n ranks with batches of b
    samples read in each step what one rank would with batches of n * b, and a resumed run goes on in the middle of an
    epoch. Batches count by their samples unless `session.data` gets a `weight`. All ranks give the same arguments.

    Args:
        dataset: map-style; or an IterableDataset, with `split`.
        batch_size: samples per rank and batch, 1 or more; None with `batch_sampler`, or if an IterableDataset yields
            batches.
        shuffle: draw a new order in each epoch, the default; False keeps the samples' own order.
        seed: the seed of the order and of workers' draws, 0 to 2**64 - 1.
        drop_last: leave out the last batches if they are smaller.
        sampler: yields the indices of all ranks, which are shared out; its draws from global generators are made the
            same on all ranks. A DistributedSampler is left as it is.
        batch_sampler: yields lists of indices likewise, which are dealt out whole.
        split: `split(dataset, part, parts)` returns the samples of a part; there are as many parts as ranks, times
            workers: `lambda samples, part, parts: itertools.islice(samples, part, None, parts)`.
        options: as torch.utils.data.DataLoader's: `num_workers`, `collate_fn`, `pin_memory`, ...

    Raises:
        UserError: arguments that exclude each other; names them.
    """
    _refuse_what_shards_otherwise(dataset, options)
    if isinstance(dataset, IterableDataset):
        given = {"shuffle": shuffle, "sampler": sampler, "batch_sampler": batch_sampler}
        return _StreamLoader(
            dataset, batch_size, seed, drop_last, _checked_split(dataset, split, given), options
        )
    if split is not None:
        raise UserError(
            "hocket.loader: split is for an IterableDataset; a map-style dataset does not need it"
        )
    indices = _indices(dataset, batch_size, shuffle, seed, drop_last, sampler, batch_sampler)
    if options.get("num_workers", 0) == 0:
        return _PlacedLoader(dataset, indices, seed, options)
    return _IndexedLoader(dataset, indices, seed, options)


class Loader(DataLoader[Batch]):
    """The DataLoader that `hocket.loader` returns.

    Its length is the number of steps of an epoch, the same on all ranks.
    """

    _share: tuple[int, int] | None

    def __init__(self, dataset: Dataset[Batch], seed: int, **options: Any) -> None:
        self._share = None
        self._seed = seed
        self._next_epoch = 0
        super().__init__(dataset, generator=torch.Generator(), **options)

    def __iter__(self) -> Any:
        reading = reading_in_force()
        # Without a reading it may be `zip(one, other)`, which a session is about to read: so nothing begins yet.
        return self._batches(None if reading is None else self._begin(reading))

    def _batches(self, begun: Iterator[_Weighted] | None) -> Iterator[Batch]:
        reading = reading_in_force()
        for batch, weight in begun or self._begin(reading):
            if reading is not None and weight is not None:
                reading.note(self, weight, batch)
            yield batch

    def _begin(self, reading: LoaderReading | None) -> Iterator[_Weighted]:
        """Begin an epoch."""
        rank, size = self._bound(reading)
        epoch = self._next_epoch if reading is None else reading.epoch
        self._next_epoch = epoch + 1
        # The seed of the workers' draws, which DataLoader takes from its generator.
        self.generator.manual_seed(int(draws.words(1, "workers", self._seed, epoch, rank)[0]))
        facts: dict[str, object] = {}
        if reading is not None:
            reading.facts.append(facts)
        return self._read(rank, size, epoch, facts)

    def _bound(self, reading: LoaderReading | None) -> tuple[int, int]:
        """Return the number of the share that this rank reads, and the number of shares."""
        if reading is not None:
            share = (reading.rank, reading.size)
        elif self._share is None:
            peer = join()
            share = (peer.rank, peer.size)
        else:
            share = self._share
        if self._share is not None and share != self._share:
            raise UserError(
                f"this loader was already read or counted for share {self._share[0]} of {self._share[1]} of the "
                f"samples, but the session reads share {share[0]} of {share[1]}: make a loader for each rank and "
                "session, and use len(session.data(loader)) instead of len(loader)"
            )
        self._share = share
        return share

    def _read(self, rank: int, size: int, epoch: int, facts: dict[str, object]) -> Iterator[_Weighted]:
        """Yield an epoch's batches and their weights."""
        raise NotImplementedError

    def _iterate(self) -> Iterator[Batch]:
        return super().__iter__()


class _Lists(Sampler[list[int]]):
    """The batches of indices of the next pass."""

    def __init__(self, loader: Loader) -> None:
        self.following: Iterator[list[int]] = iter(())
        self._loader = loader

    def __iter__(self) -> Iterator[list[int]]:
        return self.following

    @property
    def sampler(self) -> _Lists:
        """Itself, as Lightning sets the epoch of a batch sampler's sampler."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass, where no session counts passes."""
        self._loader._next_epoch = epoch


class _IndexedLoader(Loader):
    """The batches of a map-style dataset."""

    def __init__(self, dataset: Dataset[Batch], indices: Indices, seed: int, options: Tree) -> None:
        self._indices, self._lists = indices, _Lists(self)
        self._facts, self._looked = subset_facts(dataset), False
        if isinstance(dataset, BatchedSamples) and "collate_fn" not in options:
            super().__init__(dataset, seed, sampler=self._lists, batch_size=None, **options)
        else:
            super().__init__(dataset, seed, batch_sampler=self._lists, **options)

    def __len__(self) -> int:
        _, size = self._bound(reading_in_force())
        return self._num_steps(size)

    def _num_steps(self, size: int) -> int:
        num_steps = self._indices.num_steps(size)
        if num_steps == 0:
            raise UserError(
                f"hocket.loader: the dataset has no batch for {size} ranks: it is empty, or drop_last drops "
                "everything. Use a smaller batch_size, or drop_last=False"
            )
        return num_steps

    def _read(self, rank: int, size: int, epoch: int, facts: dict[str, object]) -> Iterator[_Weighted]:
        return self._read_from(0, rank, size, epoch, facts)

    def _read_from(
        self, start: int, rank: int, size: int, epoch: int, facts: dict[str, object]
    ) -> Iterator[_Weighted]:
        with suppress(TypeError):  # a sampler without a length
            self._num_steps(size)
        facts |= self._facts
        if size > 1 and not self._looked:
            facts[SAMPLE] = sample_mark(self.dataset, self.num_workers)
            self._looked = True
        weights: deque[float] = deque()

        def lists() -> Iterator[list[int]]:
            for indices, weight in self._indices.batches(rank, size, epoch, start, facts):
                weights.append(weight)  # workers are told of batches ahead
                yield indices

        self._lists.following = lists()
        return ((batch, weights.popleft()) for batch in self._iterate())


class _PlacedLoader(_IndexedLoader):
    """One that reads in the calling thread, so that it can begin in the middle of an epoch."""

    def __init__(self, dataset: Dataset[Batch], indices: Indices, seed: int, options: Tree) -> None:
        self._epoch = self._position = 0
        self._continued: Mapping[str, int] | None = None
        super().__init__(dataset, indices, seed, options)

    def state_dict(self) -> dict[str, int]:
        """Return the epoch, and how many of its batches have been read."""
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Make the next pass continue after the last batch that was read before `state_dict`."""
        self._continued = state
        self._next_epoch = state["epoch"]

    def _read(self, rank: int, size: int, epoch: int, facts: dict[str, object]) -> Iterator[_Weighted]:
        continued, self._continued = self._continued or {}, None
        start = continued["position"] if continued.get("epoch") == epoch else 0
        self._epoch, self._position = epoch, start
        return self._counted(self._read_from(start, rank, size, epoch, facts))

    def _counted(self, batches: Iterator[_Weighted]) -> Iterator[_Weighted]:
        for batch in batches:
            self._position += 1
            yield batch


class _StreamLoader(Loader):
    """The batches of an IterableDataset."""

    def __init__(
        self,
        dataset: IterableDataset[Batch],
        batch_size: int | None,
        seed: int,
        drop_last: bool,
        split: Split,
        options: Tree,
    ) -> None:
        self._samples_per_batch = batch_size
        if batch_size is not None:
            options = {**options, "collate_fn": _Counted(options.get("collate_fn") or default_collate)}
        self._part = _IterableShard(dataset, split)
        super().__init__(self._part, seed, batch_size=batch_size, drop_last=drop_last, **options)

    def __len__(self) -> int:
        raise TypeError("hocket.loader does not know how many batches an IterableDataset has")

    def _read(self, rank: int, size: int, epoch: int, facts: dict[str, object]) -> Iterator[_Weighted]:
        facts["batch_size"] = self._samples_per_batch
        self._part.share = (rank, size)
        batches = self._iterate()
        if self._samples_per_batch is None:
            return ((batch, None) for batch in batches)
        return ((batch, count / self._samples_per_batch) for count, batch in batches)


class _IterableShard(IterableDataset[Batch]):
    """The part of an IterableDataset that one rank, or one of its workers, reads."""

    def __init__(self, dataset: IterableDataset[Batch], split: Split) -> None:
        self.share = (0, 1)
        self._dataset, self._split = dataset, split

    def __iter__(self) -> Iterator[Batch]:
        rank, size = self.share
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(self._split(self._dataset, rank * workers + worker, size * workers))


class _Counted:
    """A collate function that returns the number of samples with the batch."""

    def __init__(self, collate: Callable[[list[Batch]], Batch]) -> None:
        self._collate = collate

    def __call__(self, samples: list[Batch]) -> tuple[int, Batch]:
        return len(samples), self._collate(samples)


def _refuse_what_shards_otherwise(dataset: object, options: Mapping[str, object]) -> None:
    if isinstance(dataset, DataLoader):
        raise UserError(
            "hocket.loader creates the DataLoader: give it the dataset and the DataLoader's arguments"
        )
    if "generator" in options:
        raise UserError("hocket.loader takes no generator: its argument seed sets the order")
    if not options.get("in_order", True):
        raise UserError(
            "hocket.loader: in_order=False would give batches in another order in each run: leave it out"
        )


def _checked_split(dataset: object, split: Split | None, given: Mapping[str, object]) -> Split:
    for name, value in given.items():
        if value:
            raise UserError(
                f"hocket.loader: {name} is for map-style datasets, but {type(dataset).__name__} is iterable"
            )
    if split is None:
        raise UserError(
            f"hocket.loader cannot divide {type(dataset).__name__}, an IterableDataset, among ranks. Give "
            "split=lambda samples, part, parts: itertools.islice(samples, part, None, parts); there is a part for "
            "each worker of each rank"
        )
    return split


def _indices(
    dataset: Dataset[Batch],
    batch_size: int | None,
    shuffle: bool | None,
    seed: int,
    drop_last: bool,
    sampler: Iterable[int] | None,
    batch_sampler: Iterable[Sequence[int]] | None,
) -> Indices:
    """Return the indices of a map-style dataset's samples, as the arguments share them out."""
    draws.check_seed(seed)
    if batch_sampler is not None:
        others = {"batch_size": batch_size, "shuffle": shuffle, "drop_last": drop_last, "sampler": sampler}
        _refuse_beside("batch_sampler", others)
        own = distributed_sampler_of(batch_sampler)
        if own is not None:
            return Alone(batch_sampler, own, getattr(batch_sampler, "batch_size", 1))
        return DealtBatches(batch_sampler, seed)
    if not isinstance(batch_size, int) or batch_size < 1:
        raise UserError(
            f"hocket.loader: batch_size, the samples in each rank's batch, is {batch_size}; allowed: 1 or more"
        )
    if sampler is not None:
        _refuse_beside("sampler", {"shuffle": shuffle})
        own = distributed_sampler_of(sampler)
        if own is not None:
            return Alone(BatchSampler(own, batch_size, drop_last), own, batch_size)
        return DealtSamples(sampler, batch_size, seed, drop_last=drop_last)
    if not isinstance(dataset, Sized):
        raise UserError(f"hocket.loader: {type(dataset).__name__} has no length: give a sampler")
    lengths = dataset.lengths if isinstance(dataset, BatchedSamples) else None
    return Shuffled(
        len(dataset), lengths, batch_size, seed, shuffle=shuffle is not False, drop_last=drop_last
    )


def _refuse_beside(name: str, others: Mapping[str, object]) -> None:
    for other, value in others.items():
        if value:
            raise UserError(f"hocket.loader: {name} and {other} exclude each other: give one of them")
