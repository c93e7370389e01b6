"""The largest values travel, the others do not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hocket.compressor.api import Compressor, Message, SegmentShape, State
from hocket.compressor.shape import count_of, unpadded_numel_of
from hocket.compressor.sparse import add_sparse, check_indexable, clear_sparse, pack_sparse, sparse_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from hocket.arrays import Array
    from hocket.segment.segment import Segment

__all__ = ["TopK", "largest"]


class _Padding(State):
    """Where a segment's padding is, which is never chosen: int64 [n], on the segment's device."""

    def __init__(self, segment: Segment) -> None:
        import torch

        padding = [torch.arange(span.stop, span.start + span.padded_numel) for span in segment.spans]
        self.indices = torch.cat(padding).to(segment.outgoing.device)


@dataclass(frozen=True)
class TopK(Compressor):
    """Exact top-k by magnitude, over the segment as a whole: k = density * numel, padding not counted; one at least.

    What is not sent is gone; with `error_feedback` around it, it is sent later. Each rank chooses coordinates
    of its own, so messages are gathered. For k per layer, cut the model by layers.

    Attributes:
        density: the share of elements that travel, above 0 and at most 1; at 1 all do.

    Raises:
        ValueError: the density is not in its range.

    Source: D. Alistarh et al., "The Convergence of Sparsified Gradient Methods", NeurIPS 2018, algorithm 1.
    """

    density: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ValueError(f"density must be above 0 and at most 1, not {self.density}")

    @property
    def reducible(self) -> bool:
        return False

    @property
    def equal_sizes(self) -> bool:
        return True

    @property
    def same_coordinates(self) -> bool:
        return False

    def init(self, segment: Segment) -> State:
        check_indexable(segment)
        return _Padding(segment)

    def compress(self, segment: Segment, state: _Padding, round: int) -> Message:
        """Return the k largest; of equal ones those with the lowest indices."""
        data = segment.outgoing[: segment.numel]
        count = count_of(self.density, unpadded_numel_of(segment))
        indices, values = largest(data, count, state.indices)
        return Message(pack_sparse(segment, values, indices), segment, round)

    def accumulate(self, message: Message, weight: float, out: Tensor) -> None:
        add_sparse(message, weight, out)

    def clear_sent(self, message: Message, out: Tensor) -> None:
        clear_sparse(message, out)

    def payload_bytes(self, shape: SegmentShape) -> float:
        return float(sparse_bytes(shape, count_of(self.density, unpadded_numel_of(shape))))


def largest(data: Tensor, count: int, left_out: Tensor | None = None) -> tuple[Array, Array]:
    """Return indices, ascending, and values of the `count` elements of largest magnitude, in host memory.

    Of equal magnitudes the lowest indices are taken, so the choice is the same on every machine. NaN counts as
    larger than everything.

    Args:
        data: [n], on any device.
        count: 0 to n, those left out not counted.
        left_out: indices, int64, of elements that are not taken, on data's device.

    Returns:
        indices [count], int64, and values [count], of data's dtype.
    """
    import torch

    if data.device.type == "cpu":
        array = data.numpy()
        sizes = np.abs(array)
        if left_out is not None:
            sizes[left_out.numpy()] = -1.0
        indices = _largest(sizes, count)
        return indices, array[indices]
    magnitudes = data.abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    if left_out is not None:
        magnitudes.index_fill_(0, left_out, -1.0)
    threshold = torch.topk(magnitudes, count).values[-1:] if count else magnitudes[:0]
    # The same rule as on the CPU, on the few that are left.
    few = torch.nonzero(magnitudes >= threshold)[:, 0] if count else threshold.long()
    chosen = few[torch.from_numpy(_largest(magnitudes[few].cpu().numpy(), count)).to(few.device)]
    return chosen.cpu().numpy(), data[chosen].cpu().numpy()


def _largest(magnitudes: Array, count: int) -> Array:
    if count == 0:
        return np.empty(0, dtype=np.int64)
    # Selecting the threshold alone, in place and vectorised, is some 40 times faster than torch.topk.
    place = len(magnitudes) - count
    threshold = np.partition(magnitudes, place)[place]
    # Not "at least": NaN, which partition puts last, passes too.
    passing = np.flatnonzero(~(magnitudes < threshold))
    if len(passing) > count:
        above = magnitudes[passing] != threshold
        passing = np.sort(np.concatenate([passing[above], passing[~above]])[:count])
    return passing
