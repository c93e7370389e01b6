"""Cursors over loaders, read one batch ahead, which another process can continue.

A loader's batches depend on random draws: torch's DataLoader takes the seeds of its sampler and of its workers
from torch's global generator when a pass begins, and a dataset that is read in the training process draws for each
batch. So a cursor remembers the random states at its start, and those before the newest batch was read. A resumed one
begins the pass again from the former, skips batches that were handed out already, and reads the newest batch from the
latter. A loader with `state_dict` and `load_state_dict`, such as torchdata's StatefulDataLoader, loads its state
instead.

Without a `state_dict`, two cases stay out of reach: samplers that draw from the global generators batch by batch while
workers read ahead of training, and what persistent workers carry from one pass to the next. With one, two others do: a
rank without any data, which is lent another rank's next batch in place of its first, and workers' draws, of which a
warning is logged.
"""

from __future__ import annotations

import logging
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import TypeGuard, cast

import numpy as np
import torch
from torch import Tensor

from hocket import randomness
from hocket.errors import CheckpointError, DisagreementError
from hocket.plain import Batch, Stateful, TreeView
from hocket.randomness import RandomState
from hocket.session.data.reading import SAMPLE, LoaderReading, leaves

_log = logging.getLogger("hocket")

#: What comes after the last batch.
END: Batch = object()


class Cursor(ABC):
    """A position in one pass over batches.

    Args:
        reading: in force whenever the loader is read.

    Attributes:
        last: the newest batch that was handed out; END before the first.
        first: the first batch that this process has read, until it is set to END.
        num_steps: number of batches handed out, repetitions of the last one included.
        num_read: number of batches that the loader has given.
        weight: of the last batch; None where its loader gives none.
        superseded: whether another pass of the session has begun since.
        evaluates: whether the model seemed to be evaluated when it began.
        trained: whether something was trained with one of its batches.
    """

    def __init__(self, reading: LoaderReading) -> None:
        self.reading = reading
        self.last: Batch = END
        self.first: Batch = END
        self.num_steps = self.num_read = 0
        self.weight: float | None = None
        self.superseded = self.evaluates = self.trained = False

    @property
    @abstractmethod
    def following(self) -> Batch:
        """Return the next batch; END where there is none."""

    def advance(self) -> bool:
        """Hand out the next batch, in `last`; return False, and leave that as it is, where there is none."""
        self.num_steps += 1
        if self.following is END:
            return False
        self._hand_out()
        return True

    @abstractmethod
    def _hand_out(self) -> None:
        """Move the next batch, which there is, to `last`."""

    @abstractmethod
    def state_dict(self) -> dict[str, object]:
        """Return the state to continue after the batch that was handed out last."""


class LoaderCursor(Cursor):
    """A position in one pass over a loader.

    Args:
        loader: any iterable of batches.
        reading: in force whenever the loader is read.
        saved: a result of `state_dict`, to continue.
        now: the random states that training goes on from, with `saved`.

    Raises:
        CheckpointError: the loader is not the one that was saved.
    """

    def __init__(
        self,
        loader: Iterable[Batch],
        reading: LoaderReading,
        saved: TreeView | None = None,
        now: RandomState | None = None,
    ) -> None:
        super().__init__(reading)
        self._loader = loader
        self._stateful = loader if _has_state(loader) else None
        self._weight_following: float | None = None
        self._loader_state: object = None
        if saved is None:
            self._generators = [generator.get_state() for generator in own_generators(loader)]
            self._start = self._before_newest = randomness.read(cuda=True)
            with reading:
                self._batches = iter(loader)
            self.first = self._following = self._read()
        else:
            assert now is not None
            self._continue(saved)
            randomness.write(now)

    @property
    def following(self) -> Batch:
        return self._following

    def _hand_out(self) -> None:
        self.weight = self._weight_following
        self.last, self._following = self._following, self._read()

    def _read(self) -> Batch:
        before = randomness.read(self._before_newest, cuda=True)
        state = None if self._stateful is None else self._stateful.state_dict()
        with self.reading:
            batch = next(self._batches, END)
        self._weight_following = self.reading.take_weight(batch)
        if batch is not END:
            self.num_read += 1
            self._before_newest, self._loader_state = before, state
        return batch

    def state_dict(self) -> dict[str, object]:
        return {
            "num_steps": self.num_steps,
            "num_read": self.num_read,
            "start": randomness.to_plain(self._start),
            "before_newest": randomness.to_plain(self._before_newest),
            "generators": self._generators,
            "loader": self._loader_state,
        }

    def _continue(self, saved: TreeView) -> None:
        self._start, self._generators = randomness.from_plain(saved["start"]), saved["generators"]
        self._before_newest = randomness.from_plain(saved["before_newest"])
        num_read, self.num_steps = saved["num_read"], saved["num_steps"]
        jumps = num_read > 0 and self._stateful is not None
        generators = own_generators(self._loader)
        if len(generators) != len(self._generators) or jumps != (saved["loader"] is not None):
            raise CheckpointError(
                "the loader is of another kind than when the checkpoint was saved (with or without state_dict, or "
                "with another number of random generators): continue with the same kind of loader"
            )
        randomness.write(self._start)
        for generator, state in zip(generators, self._generators, strict=True):
            generator.set_state(state)
        if jumps and self._stateful is not None:
            self._stateful.load_state_dict(saved["loader"])
            if getattr(self._loader, "num_workers", 0) and self.reading.rank == 0:
                _log.warning(
                    "the loader (%s) continues from its own state_dict, which lacks its workers' random state: "
                    "random augmentation differs from that of an uninterrupted run. With torch's DataLoader, or "
                    "without workers, it is the same",
                    type(self._loader).__name__,
                )
        with self.reading:
            self._batches = iter(self._loader)
        self.first = END
        if not jumps:
            self._read_again(num_read)
        randomness.write(self._before_newest)
        self._following = self._read()
        self.first = self._following if self.first is END else self.first
        self.num_read = num_read
        if self.num_steps >= num_read > 0:
            self._hand_out()

    def _read_again(self, num_read: int) -> None:
        """Read the batches that were read before the checkpoint was saved, but for the newest."""
        for number in range(num_read - 1):
            with self.reading:
                batch = next(self._batches, END)
            self.reading.take_weight(batch)
            self.first = batch if number == 0 else self.first
            if batch is END:
                raise CheckpointError(
                    f"the loader had given {num_read} batches when the checkpoint was saved, but it has only "
                    f"{number} now: continue with the same data and batch size"
                )


def _has_state(loader: object) -> TypeGuard[Stateful]:
    """Return whether a loader's `state_dict` works (Accelerate's does not without torchdata)."""
    if not all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict")):
        return False
    try:
        return cast(Stateful, loader).state_dict() is not None
    except (AttributeError, NotImplementedError):
        return False


def own_generators(loader: object) -> list[torch.Generator]:
    """Return the generators of a DataLoader's own, each once."""
    owners = (loader, getattr(loader, "sampler", None))
    found = [getattr(owner, "generator", None) for owner in owners]
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def length_of(loader: Iterable[object]) -> int:
    """Return a loader's length.

    Raises:
        TypeError: it has none.
    """
    return len(cast(Sized, loader))


def fingerprint(batch: object) -> int | None:
    """Return a checksum of a batch's numbers and text; None where it has neither."""
    checksum, found = 0, False
    for piece in _pieces(batch):
        checksum, found = zlib.crc32(piece, checksum), True
    return checksum if found else None


def warn_of_shares(gathered: Sequence[tuple[int, int | None]]) -> None:
    """Warn if two shares of the samples are equal, or if ranks of one share read different samples.

    Args:
        gathered: by rank, the share that it reads and its first batch's fingerprint.
    """
    known = [(rank, share, mark) for rank, (share, mark) in enumerate(gathered) if mark is not None]
    first: dict[int, tuple[int, int]] = {}
    for rank, share, mark in known:
        other, expected = first.setdefault(share, (rank, mark))
        if mark != expected:
            _log.warning(
                "ranks %d and %d hold parts of one replica but get different batches: use hocket.loader, or a "
                "sampler with rank=session.data_rank and num_replicas=session.data_size",
                other,
                rank,
            )
            return
    for mark in dict.fromkeys(mark for _, mark in first.values()):
        same = [rank for rank, own in first.values() if own == mark]
        if len(same) > 1:
            everyone = len(same) == len({share for share, _ in gathered})
            who = f"all {len(gathered)} ranks" if everyone else f"ranks {', '.join(map(str, same))}"
            _log.warning(
                "%s get the same batches: use hocket.loader, or session.data(loader, same_batches=True) if you mean "
                "that",
                who,
            )


def check_facts(gathered: Sequence[list[dict[str, object]]]) -> None:
    """Refuse loaders that differ between ranks, as samples would not be shared out.

    Args:
        gathered: by rank, the facts of the loaders of `hocket.loader` that it reads.

    Raises:
        DisagreementError: names the first that differs.
    """
    for rank, own in enumerate(gathered):
        if len(own) != len(gathered[0]):
            raise DisagreementError(
                f"rank {rank} reads {len(own)} loaders of hocket.loader in this pass, but rank 0 reads "
                f"{len(gathered[0])}: all ranks must read the same loaders"
            )
        for mine, expected in zip(own, gathered[0], strict=True):
            for key in {**expected, **mine}:
                if key != SAMPLE and mine.get(key) != expected.get(key):
                    raise DisagreementError(
                        f"hocket.loader: {key} is {mine.get(key)} on rank {rank} and {expected.get(key)} on rank 0, "
                        "so the ranks' samples would overlap: give all ranks the same dataset, arguments and sampler"
                    )


def warn_of_samples(gathered: Sequence[list[dict[str, object]]]) -> None:
    """Warn if a loader's samples seem to differ between ranks; `gathered` as of `check_facts`."""
    for rank, own in enumerate(gathered):
        for mine, expected in zip(own, gathered[0], strict=True):
            if None not in (marks := (mine.get(SAMPLE), expected.get(SAMPLE))) and marks[0] != marks[1]:
                _log.warning(
                    "hocket.loader: the same sample is another one on rank %d than on rank 0, so ranks may train on "
                    "samples twice, or on each other's samples for validation: split and shuffle data with the same "
                    "seed on all ranks, and sort lists of files",
                    rank,
                )
                return


def _pieces(value: object) -> Iterator[memoryview | bytes]:
    """Yield the bytes of all numbers and text in a batch."""
    for leaf in leaves(value):
        if isinstance(leaf, Tensor):
            if leaf.layout == torch.strided and not (leaf.is_meta or leaf.is_nested or leaf.is_quantized):
                plain = leaf.detach().resolve_conj().resolve_neg().cpu().contiguous()
                yield plain.reshape(-1).view(torch.uint8).numpy().data
        elif isinstance(leaf, np.ndarray):
            if leaf.dtype != object:
                yield np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data
        elif isinstance(leaf, str | bytes | bool | int | float | np.generic):
            yield repr(leaf).encode()
