"""The training samples as Trainer reads them: shares of `hocket.loader`, and the session's passes over them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, repeat
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    get_worker_info,
)
from transformers.trainer_pt_utils import find_batch_size

import hocket

_OPTIONS = (
    "collate_fn",
    "in_order",
    "multiprocessing_context",
    "num_workers",
    "persistent_workers",
    "pin_memory",
    "prefetch_factor",
    "timeout",
    "worker_init_fn",
)


def shared_out(given: Any, seed: int) -> Any:
    """Return a DataLoader that gives each rank its share of what a plain one gives; others as they are.

    Args:
        given: a DataLoader of torch's over all samples, or one of `hocket.loader`.
        seed: the seed of the order.
    """
    # A batch sampler with `dp_size` (of train_sampling_strategy="batch_rebalance") yields one rank's batches.
    if type(given) is not DataLoader or hasattr(given.batch_sampler, "dp_size"):
        return given
    options = {name: getattr(given, name) for name in _OPTIONS if hasattr(given, name)}
    if isinstance(given.dataset, IterableDataset):
        return hocket.loader(
            given.dataset, given.batch_size, seed=seed, drop_last=given.drop_last, split=_part, **options
        )
    if type(given.batch_sampler) is not BatchSampler:
        return hocket.loader(given.dataset, batch_sampler=given.batch_sampler, seed=seed, **options)
    order = given.sampler
    if isinstance(order, SequentialSampler):
        options["shuffle"] = False
    elif type(order) is not RandomSampler or order.replacement or order.num_samples != len(given.dataset):  # type: ignore[arg-type]
        options["sampler"] = order
    return hocket.loader(
        given.dataset, given.batch_size, seed=seed, drop_last=bool(given.drop_last), **options
    )


def _part(dataset: Any, part: int, parts: int) -> Iterable[Any]:
    """Return a part's samples of an IterableDataset; one of the library datasets shares its files out by itself."""
    if not type(dataset).__module__.startswith("datasets."):
        return islice(dataset, part, None, parts)
    from datasets.distributed import split_dataset_by_node

    info = get_worker_info()
    workers = 1 if info is None else info.num_workers  # to which it gives their files itself
    split: Iterable[Any] = split_dataset_by_node(dataset, part // workers, parts // workers)
    return split


class TrainingSamples(IterableDataset[Any]):
    """The samples of a Trainer's passes; each iteration is a pass of its session, or the rest of one.

    The batches that one optimizer step adds up are read before the first of them is handed out, so that their tokens
    can be counted; the session begins each when it is handed out.

    Args:
        trainer: a HocketTrainer, whose session reads if it has one.
        loader: the batches of this rank.
        batch_size: the number of samples of a batch of weight 1; None to weigh all batches alike.

    Attributes:
        group: this rank's batches of the step whose first batch was handed out last.
        resumed: whether the next pass continues one of a checkpoint.
    """

    def __init__(self, trainer: Any, loader: Any, batch_size: int | None) -> None:
        self._trainer, self.loader, self._batch_size = trainer, loader, batch_size
        self.group: Sequence[Any] = ()
        self.resumed = False
        self._epoch = self._num_read = 0
        self._under_way: Iterator[Any] | None = None

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        if self._trainer.session is None:
            return iter(self.loader)
        self.end_pass()
        self._under_way = self._pass()
        return self._under_way

    def end_pass(self) -> None:
        """End the pass under way, if there is one; collective."""
        ended, self._under_way = self._under_way, None
        if ended is not None:
            if self._num_read == self._length():
                next(ended, None)  # Trainer asks for no batch after the last
            ended.close()  # type: ignore[attr-defined]

    def may_end_with(self, num_batches: int) -> bool:
        """Return whether a step of this many batches may be the pass's last, in which ranks may have fewer."""
        length = self._length()
        return length is None or self._num_read - 1 + num_batches >= length

    def _length(self) -> int | None:
        try:
            return len(self.loader)
        except TypeError:
            return None

    def _pass(self) -> Iterator[Any]:
        session, skipped = self._trainer.session, self._resume()
        assert session is not None
        self._num_read = skipped
        yield from repeat(None, skipped)  # by Trainer, which counts on from there
        # A pass that a checkpoint continues may have been at its end.
        for _ in range(2):
            for ordered in (self.loader.dataset, getattr(self.loader, "batch_sampler", None)):
                begin = getattr(ordered, "set_epoch", None)
                if begin is not None:
                    begin(self._epoch)
            self._epoch += 1
            read = self._num_read
            for batch, group in session.data(self._groups(), self._weight):
                self.group = group
                self._num_read += 1
                yield batch
            if self._num_read > read:
                return

    def _resume(self) -> int:
        """Return the number of batches that Trainer is about to skip, as the session goes on after them by itself."""
        resumed, self.resumed = self.resumed, False
        if not resumed:
            return 0
        args, length = self._trainer.args, self._length()
        batches = args.gradient_accumulation_steps
        steps = args.max_steps if length is None else max(1, -(-length // batches))
        self._epoch, steps_of_pass = divmod(self._trainer.state.global_step, steps)
        return int(steps_of_pass * batches)

    def _groups(self) -> Iterable[tuple[Any, list[Any]]]:
        return _BatchesOfSteps(self.loader, self._trainer.args.gradient_accumulation_steps)

    def _weight(self, item: tuple[Any, list[Any]]) -> float:
        batch, _ = item
        if self._batch_size is None or self._trainer.counts_tokens_of_all(batch):
            return 1.0
        return float(find_batch_size(batch) or self._batch_size) / self._batch_size


class _BatchesOfSteps:
    """The batches of a loader, each with the group of batches that an optimizer step adds up.

    Args:
        loader: gives the batches.
        size: the number of batches of a group.
    """

    def __init__(self, loader: Any, size: int) -> None:
        self._loader, self._size = loader, size

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[tuple[Any, list[Any]]]:
        batches = iter(self._loader)
        while group := list(islice(batches, self._size)):
            for batch in group:
                yield batch, group


class Accumulated:
    """The batches of one optimizer step, each taken from the pass when it is trained on.

    Args:
        first: the first batch.
        following: gives the others.
        length: the number of batches.
    """

    def __init__(self, first: Any, following: Iterator[Any], length: int) -> None:
        self._first, self._following, self._length = first, following, length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        yield self._first
        yield from islice(self._following, self._length - 1)


def without_labels(batch: Any) -> Any:
    """Return a batch that counts no token."""
    if not isinstance(batch, Mapping) or not isinstance(batch.get("labels"), Tensor):
        return batch
    return {**batch, "labels": torch.full_like(batch["labels"], -100)}
