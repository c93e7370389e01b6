"""Each rank's share of the samples: n ranks of batch b read those of a rank of batch nb.

Symbols: n ranks (`size`), r a rank, b samples per rank and batch (`batch_size`), N samples (`num_samples`).
Each epoch has one global order; the global batch k is its samples k * n * b to (k + 1) * n * b, and each rank
reads a contiguous share of it.

With lengths, batches are buckets: sequences of like length, so that little of a batch is padding. Some ranks then
compute longer in a step than others: the imbalance of training with sequences, which batches of random lengths would
hide behind padding. Source: eager-SGD (Li et al., PPoPP 2020), section 2.1: "videos with similar lengths are grouped
into buckets".
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from hocket import draws
from hocket.plain import TreeView

_POOL_BATCHES = 64


class ShardSampler(Sampler[list[int]]):
    """One rank's batches of indices.

    Guaranteed, for every epoch and every number of ranks:

    - the shares of global batch k, concatenated in the order of the ranks, are the batch k of one rank with
      batch size n * b, in its order;
    - all samples are read, each once, but for those that `drop_last` leaves out. The last global batch may be
      ragged: its shares differ by at most one sample, the first ranks have the larger ones, and a rank whose share
      is empty has one batch less. Where every batch counts alike, a mean over the ranks then differs from the mean
      over the samples;
    - the order depends on (seed, epoch, N) alone: on no call before, no global generator and no version of
      NumPy.

    With lengths the order depends on the batch size and the lengths, too: another number of ranks with another batch
    size sees other batches. In each epoch samples are shuffled and cut into pools of 64 batches; a pool is sorted by
    length and cut into batches, and the epoch's batches are shuffled: n ranks get n of them in a step, of independent
    lengths. The shares of a ragged last global batch may mix lengths.

    `DataLoader` workers would draw ahead of what is trained on, and the position with them: use `hocket.loader`.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        rank: int,
        size: int,
        seed: int,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        lengths: NDArray[np.int64] | None = None,
    ) -> None:
        """Begin at epoch 0.

        Args:
            num_samples: N, 0 or more.
            batch_size: b, 1 or more.
            rank: r, 0 to n - 1.
            size: n, 1 or more.
            seed: the same on every rank, 0 to 2**64 - 1.
            shuffle: a new order in each epoch; else the samples' own.
            drop_last: whether a ragged last global batch is left out.
            lengths: the samples' lengths, int64 [N], for batches of samples of like length.

        Raises:
            ValueError: an argument out of its range.
        """
        if num_samples < 0:
            raise ValueError(f"num_samples is {num_samples}; allowed: 0 or more")
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; allowed: 1 or more")
        if size < 1:
            raise ValueError(f"size is {size}; allowed: 1 or more")
        if not 0 <= rank < size:
            raise ValueError(f"rank is {rank}; allowed: 0 to {size - 1}")
        draws.check_seed(seed)
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.rank = rank
        self.size = size
        self.global_batch_size = batch_size * size
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self._lengths = lengths
        self._epoch = 0
        self._position = 0
        self._resumes = False

    def __len__(self) -> int:
        """Return this rank's number of batches in a whole epoch."""
        num_full, num_left = divmod(self.num_samples, self.global_batch_size)
        start, stop = share(0 if self.drop_last else num_left, self.rank, self.size)
        return num_full + (stop > start)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the epoch's batches: from the first; once, after `load_state_dict`, from its position."""
        self._position = self._position if self._resumes else 0
        self._resumes = False
        order = self._order()
        for k in range(self._position, len(self)):
            global_batch = order[k * self.global_batch_size : (k + 1) * self.global_batch_size]
            start, stop = share(len(global_batch), self.rank, self.size)
            self._position = k + 1
            yield global_batch[start:stop].tolist()

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration; a loaded position holds for its own epoch only.

        Raises:
            ValueError: the epoch is not in 0 to 2**64 - 1.
        """
        if not 0 <= epoch < 2**64:
            raise ValueError(f"epoch is {epoch}; allowed: 0 to 2**64 - 1")
        if epoch != self._epoch:
            self._epoch, self._position, self._resumes = epoch, 0, False

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and the position, the number of its batches yielded so far.

        The position counts global batches, so it is the same on every rank, but for ranks without a share in
        the last one. At an epoch's end it stands after the last batch: what is resumed there yields nothing
        more until `set_epoch`.
        """
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: TreeView) -> None:
        """Make the next iteration continue after the last batch that was yielded before `state_dict`.

        Args:
            state: of a sampler with the same arguments; that of any rank will do.

        Raises:
            ValueError: the position is not one of this sampler's, as with another number of ranks or samples.
        """
        epoch, position = int(state["epoch"]), int(state["position"])
        num_global_batches = math.ceil(self.num_samples / self.global_batch_size)
        if not 0 <= position <= num_global_batches:
            raise ValueError(f"position is {position}; allowed: 0 to {num_global_batches}, the epoch's end")
        self.set_epoch(epoch)
        self._position, self._resumes = position, True

    def _order(self) -> NDArray[np.intp]:
        """Return the epoch's global order, a permutation of 0 to N - 1, [N]."""
        if not self.shuffle:
            return np.arange(self.num_samples)
        order = draws.permutation(self.num_samples, "samples", self.seed, self._epoch)
        if self._lengths is None:
            return order
        pool = np.arange(self.num_samples) // (_POOL_BATCHES * self.batch_size)
        order = order[np.lexsort((self._lengths[order], pool))]
        num_batches = self.num_samples // self.batch_size
        whole = order[: num_batches * self.batch_size].reshape(num_batches, self.batch_size)
        shuffled = whole[draws.permutation(num_batches, "buckets", self.seed, self._epoch)]
        return np.concatenate([shuffled.ravel(), order[whole.size :]])


def share(num: int, rank: int, size: int) -> tuple[int, int]:
    """Return start and stop of a rank's share of a global batch of `num` samples; the first ranks' are larger."""
    quotient, remainder = divmod(num, size)
    start = rank * quotient + min(rank, remainder)
    return start, start + quotient + (rank < remainder)
