"""Rotation of samples: a batch that a rank has used goes on to the next one.

Source: Daily et al. 2018, sec. 4.5.2.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hocket.api import SampleShuffle, plain

if TYPE_CHECKING:
    from hocket.api import Peer, SampleStream


@dataclass(frozen=True)
class RingShuffle(SampleShuffle):
    """Rotation of batches around the ring of ranks, one rank further in each epoch.

    In epoch e, from 0, rank r trains on the batches that rank (r - e) mod p has read, in their order. Every batch goes
    from rank r to rank (r + 1) mod p when r has used it, and is needed there an epoch later: it travels while both
    compute. So in each epoch the ranks together use every sample once; a sample comes back to a rank after p epochs,
    when each of the others has used it once.

    The loader is read once, whole, when the first epoch begins: it must end, and what it draws (an order,
    augmentations) is drawn once. Its batches are tensors in host memory, or tuples, lists and dictionaries of such, of
    sizes that may differ, as may their number between ranks. A rank keeps what it has read, packed, in memory.

    A loader whose first epoch is a later one, as others' batches travelled before, is read when that begins, and each
    batch sent at once to the rank that trains on it: what rank r reads in epoch e is used by rank (r + e) mod p.
    """

    def wrap(self, loader: Iterable[plain.Batch], peer: Peer, epoch: int = 0) -> SampleStream:
        from hocket_gossipgrad.ring_stream import RingStream

        return RingStream(loader, peer, epoch)
