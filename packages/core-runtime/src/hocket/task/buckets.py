"""Batches of sequences of like length, so that little of a batch is padding: bucketing.

Some ranks then compute longer in a step than others: the imbalance of training with sequences, which batches of random
lengths would hide behind padding.

Source: eager-SGD (Li et al., PPoPP 2020), section 2.1: "videos with similar lengths are grouped into buckets".
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hocket import draws
from hocket.task.shard import ShardSampler

__all__ = ["BucketSampler"]

_POOL_BATCHES = 64


class BucketSampler(ShardSampler):
    """One rank's batches of indices, each of samples of like length.

    In each epoch samples are shuffled and cut into pools of 64 batches; a pool is sorted by length and cut into
    batches, and the epoch's batches are shuffled: n ranks get n of them in a step, of independent lengths.
    ShardSampler's guarantees hold, except that the order depends on the batch size and the lengths, too: another number
    of ranks with another batch size sees other batches. The shares of a ragged last global batch may mix lengths.
    """

    def __init__(
        self,
        lengths: NDArray[np.int64],
        batch_size: int,
        rank: int,
        size: int,
        seed: int,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        """Begin at epoch 0.

        Args:
            lengths: the samples' lengths, int64 [N].
            batch_size, rank, size, seed, shuffle, drop_last: as ShardSampler's.

        Raises:
            ValueError: an argument out of its range.
        """
        super().__init__(len(lengths), batch_size, rank, size, seed, shuffle=shuffle, drop_last=drop_last)
        self._lengths = lengths

    def _order(self) -> NDArray[np.intp]:
        order = super()._order()
        if not self.shuffle:
            return order
        pool = np.arange(self.num_samples) // (_POOL_BATCHES * self.batch_size)
        order = order[np.lexsort((self._lengths[order], pool))]
        num_batches = self.num_samples // self.batch_size
        whole = order[: num_batches * self.batch_size].reshape(num_batches, self.batch_size)
        shuffled = whole[draws.permutation(num_batches, "buckets", self.seed, self._epoch)]
        return np.concatenate([shuffled.ravel(), order[whole.size :]])
