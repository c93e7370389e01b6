"""Sequences of different lengths: kept end to end, padded when a batch is read.

Shapes: N samples, B batch, T the longest sequence of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hocket.api import BatchedSamples


@dataclass(frozen=True)
class Sequences:
    """N sequences in one tensor.

    Attributes:
        values: their elements, one sequence after the other, [sum of lengths, ...], any dtype; none is zero, which is
            what padding is.
        starts: the place at which each begins, and the end of the last, int64 [N + 1].
    """

    values: Tensor
    starts: Tensor

    @classmethod
    def of_lengths(cls, values: Tensor, lengths: NDArray[np.int64]) -> Sequences:
        """Return sequences of the given lengths, int64 [N], each 1 or more, that fill `values`."""
        return cls(values, torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)])))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The length of each, int64 [N]."""
        lengths: NDArray[np.int64] = self.starts.diff().numpy()
        return lengths

    def padded(self, rows: Tensor) -> Tensor:
        """Return some of them, [B, T, ...], zero behind their ends.

        Args:
            rows: the sequences' numbers, int64 [B].

        Raises:
            IndexError: a row out of range.
        """
        starts, ends = self.starts[:-1].index_select(0, rows), self.starts[1:].index_select(0, rows)
        longest = int((ends - starts).max()) if len(rows) else 0
        places = starts.unsqueeze(1) + torch.arange(longest)
        behind = places >= ends.unsqueeze(1)
        found = self.values[places.masked_fill_(behind, 0)]
        return found.masked_fill_(behind.reshape(*behind.shape, *(1,) * (found.dim() - 2)), 0)


class ClassifiedSequences(BatchedSamples):
    """Sequences with a target each: inputs [B, T, ...], targets [B, ...]."""

    lengths: NDArray[np.int64]

    def __init__(self, sequences: Sequences, targets: Tensor) -> None:
        """Hold both without copying them.

        Raises:
            ValueError: they differ in their number of samples.
        """
        self.lengths = sequences.lengths
        if len(self.lengths) != len(targets):
            raise ValueError(f"{len(self.lengths)} sequences do not match {len(targets)} targets")
        self._sequences, self._targets = sequences, targets

    def __len__(self) -> int:
        return len(self._targets)

    def __getitem__(self, index: int | Sequence[int]) -> tuple[Tensor, Tensor]:
        if isinstance(index, int):
            inputs, targets = self[[index]]
            return inputs[0], targets[0]
        rows = torch.tensor(index, dtype=torch.int64)
        return self._sequences.padded(rows), self._targets.index_select(0, rows)


class NextElements(BatchedSamples):
    """Sequences of at least two elements, whose targets are themselves, one element later: int64 [B, T - 1] both."""

    lengths: NDArray[np.int64]

    def __init__(self, sequences: Sequences) -> None:
        """Hold sequences of integers without copying them."""
        self.lengths = sequences.lengths - 1
        self._sequences = sequences

    def __len__(self) -> int:
        return len(self._sequences.starts) - 1

    def __getitem__(self, index: int | Sequence[int]) -> tuple[Tensor, Tensor]:
        if isinstance(index, int):
            inputs, targets = self[[index]]
            return inputs[0], targets[0]
        padded = self._sequences.padded(torch.tensor(index, dtype=torch.int64)).long()
        return padded[:, :-1], padded[:, 1:]
