"""A session's reading of a loader: its share of the samples, and each batch's weight, found by the batch's tensors."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from torch import Tensor

from hocket.plain import Batch
from hocket.transport.status import READS, Status

#: The fact that is a sample's checksum: a difference is only warned of, as a dataset may draw what it adds.
SAMPLE = "sample"

_here = threading.local()


def reading_in_force() -> LoaderReading | None:
    """Return the reading that this thread's loader belongs to; None outside of a session's pass."""
    return getattr(_here, "reading", None)


class LoaderReading:
    """A session's reading of a loader: its share of the samples, and the weight of each batch.

    In force within its `with` statement. A loader of `hocket.loader` looks it up whenever it is read, also through
    other iterables: `session.data(tqdm(loader))`, `session.data(zip(one, other))`.

    Args:
        rank, size: the number of this rank's share of the samples, and the number of shares.
        epoch: the number of the pass, from 0, from which the order of its samples is drawn.
        status: shows the other ranks that this one reads, which may take long; by default nobody.

    Attributes:
        facts: the loaders' facts that all ranks must agree in: JSON values by name.
        unweighed: whether batches should count differently, but could not be gathered apart.
    """

    def __init__(self, rank: int, size: int, epoch: int, status: Status | None = None) -> None:
        self._status = status or Status()
        self.rank, self.size, self.epoch = rank, size, epoch
        self.facts: list[dict[str, object]] = []
        self.unweighed = False
        self._noted: list[_Noted] = []
        self._in_step = True
        self._outer: LoaderReading | None = None

    def __enter__(self) -> None:
        self._outer = reading_in_force()
        _here.reading = self
        self._status.note_computing(READS)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        _here.reading = self._outer
        self._status.note_computing()
        if error is not None:
            error.add_note(READS)

    def note(self, loader: object, weight: float, batch: Batch) -> None:
        """Note that a loader gives a batch, and its weight."""
        self._noted.append(_Noted(id(loader), weight, [weakref.ref(array) for array in _arrays(batch)]))

    def take_weight(self, batch: Batch) -> float | None:
        """Return the weight of a batch that has just been read; None where no loader gives one.

        A batch is found by its tensors, so that what reads several at once (a prefetcher, `islice`) may stand between.
        """
        arrays = {id(array) for array in _arrays(batch)}
        # By loader, the place of the newest batch that has to do with this one.
        places = {noted.loader: place for place, noted in enumerate(self._noted) if noted.alive & arrays}
        if places:
            weights = {self._noted[place].weight for place in places.values()}
            self._noted = [
                noted
                for place, noted in enumerate(self._noted)
                if place > places.get(noted.loader, -1) and noted.alive
            ]
            trusted = True
        else:
            noted, self._noted = self._noted, []
            weights = {each.weight for each in noted}
            # A loader that was read twice at once, or not at all, is read ahead: its weights are other batches'.
            self._in_step &= len({each.loader for each in noted}) == len(noted)
            trusted = self._in_step
        if trusted and len(weights) == 1:
            return weights.pop()
        self.unweighed |= bool(weights - {1.0})
        return None


@dataclasses.dataclass(frozen=True)
class _Noted:
    """The weight of a batch that a loader has given, and weak references to its arrays."""

    loader: int
    weight: float
    arrays: Sequence[weakref.ref[object]]

    @property
    def alive(self) -> set[int]:
        """Return the identities of the arrays that somebody holds."""
        return {id(array) for each in self.arrays if (array := each()) is not None}


def leaves(value: object) -> Iterator[object]:
    """Yield the values in a batch's containers."""
    if isinstance(value, Mapping):
        value = list(value.values())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def _arrays(batch: object) -> list[object]:
    """Return a batch's tensors and arrays."""
    return [leaf for leaf in leaves(batch) if isinstance(leaf, Tensor | np.ndarray)]
