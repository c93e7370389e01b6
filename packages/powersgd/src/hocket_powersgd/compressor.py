"""Low-rank approximations: matrices as products of two thin ones, by a step of power iteration over all ranks.

Source: T. Vogels, S. P. Karimireddy, M. Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization", NeurIPS 2019, arXiv:1905.13727, algorithm 1. M is a rank's matrix, n x m, and Q, m x r, comes from the
previous round: all ranks sum P = M Q, make its columns orthonormal, and sum Q = M^T P; P Q^T is then taken for the sum
of their matrices.

The paper's error feedback keeps M minus the mean's approximation. `error_feedback` keeps M minus this rank's own share,
P (M^T P)^T. Both have the same sum over ranks, which is all that later rounds see.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hocket.api import Array, Compressor, CompressorTraits, Footprint, Message, State, draws

if TYPE_CHECKING:
    from torch import Tensor

    from hocket.api import ParameterSpan, Segment, SegmentShape


class _Factors(State):
    """The factors that a segment's next round continues from.

    Attributes:
        right: each one's Q, [m, r].
        left: each one's P, [n, r], with orthonormal columns, between a round's two messages; None before the first.
    """

    def __init__(self, right: list[Tensor]) -> None:
        self.right = right
        self.left: list[Tensor] | None = None

    def tensors(self) -> dict[str, Tensor]:
        return {f"right.{i}": factor for i, factor in enumerate(self.right)}


@dataclass(frozen=True)
class PowerSGD(Compressor):
    """A low-rank approximation of the sum of the ranks' matrices, whose two thin factors are summed over the ranks.

    A parameter of more than two dimensions is a matrix whose rows are those of its first. Vectors, and matrices that
    would not become `min_saving` times smaller, travel whole, in the second message, which ends with the trailer. Both
    are in the segment's dtype. Memory: P and Q of each matrix. At a matrix's full rank, and where it travels whole,
    what comes is the sum itself, to rounding.

    Attributes:
        rank: r, the rank of the approximation, 1 or more; a matrix of lower rank uses its own rank.
        min_saving: a matrix is compressed if its messages are at least this many times shorter; 0 for all matrices.
        seed: the seed of the first random factor Q, 0 to 2**64 - 1; the same on every rank.

    Raises:
        ValueError: rank, min_saving or seed is not in its range.
    """

    rank: int = 4
    min_saving: float = 2.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank must be 1 or more, not {self.rank}")
        if not 0 <= self.min_saving < math.inf:
            raise ValueError(f"min_saving must be 0 or more, and finite, not {self.min_saving}")
        draws.check_seed(self.seed)

    @property
    def traits(self) -> CompressorTraits:
        return CompressorTraits(reducible=True, leaves_out=True, coarse=True, answers=True)

    def init(self, segment: Segment) -> State:
        """Return a first Q for each matrix, drawn from the normal distribution, alike on all ranks."""
        import torch

        right = []
        for number, (_, _, columns, rank) in enumerate(self._matrices(segment)):
            drawn = draws.normal(columns * rank, "powersgd", self.seed, number, segment.index)
            right.append(torch.from_numpy(drawn).view(columns, rank).to(segment.outgoing))
        return _Factors(right)

    def compress(self, segment: Segment, state: _Factors, round: int) -> Message:
        """Return P = M Q of each matrix."""
        state.left = None
        left = [
            _values(segment.outgoing, span).reshape(rows, -1) @ right
            for (span, rows, _, _), right in zip(self._matrices(segment), state.right, strict=True)
        ]
        return Message(_flat(left, segment), segment, round)

    def answer(self, total: Message, segment: Segment, state: _Factors) -> Message | None:
        """Return Q = M^T P of each matrix and the parameters that travel whole; None after their sum."""
        import torch

        summed = torch.from_numpy(total.payload).to(segment.outgoing.device)
        if state.left is not None:
            self._keep(summed, state)
            return None
        state.left = []
        right = []
        start = 0
        for span, rows, _, rank in self._matrices(segment):
            stop = start + rows * rank
            left = _orthonormal(summed[start:stop].view(rows, rank))
            state.left.append(left)
            right.append(_values(segment.outgoing, span).reshape(rows, -1).T @ left)
            start = stop
        whole = [segment.outgoing[span.start : span.stop] for span in self._whole(segment)]
        trailer = torch.from_numpy(segment.outgoing_trailer).to(segment.outgoing.device)
        payload = _flat([*right, *whole, trailer], segment)
        return Message(payload, segment, total.round, known=tuple(state.left))

    def _keep(self, summed: Tensor, state: _Factors) -> None:
        """Keep Q for the next round, unless it has NaN or Inf from a step that can be skipped."""
        if not math.isfinite(float(summed.sum())):
            return
        start = 0
        for right in state.right:
            stop = start + right.numel()
            right.copy_(summed[start:stop].view_as(right))
            start = stop

    def accumulate(self, message: Message, weight: float, out: Tensor) -> None:
        """Add weight * P Q^T to each matrix, and what travelled whole."""
        import torch

        segment = message.segment
        values = torch.from_numpy(message.payload).to(out.device)
        start = 0
        for (span, _, columns, rank), left in zip(self._matrices(segment), message.known, strict=True):
            stop = start + columns * rank
            right = values[start:stop].view(columns, rank)
            _values(out, span).add_((left @ right.T).view(span.shape), alpha=weight)
            start = stop
        for span in self._whole(segment):
            stop = start + span.numel
            out[span.start : span.stop].add_(values[start:stop], alpha=weight)
            start = stop
        out[segment.numel :].add_(values[start:], alpha=weight)

    def clear_sent(self, message: Message, out: Tensor) -> None:
        """Set all elements to 0, as each is sent in part."""
        out.zero_()

    def footprint(self, shape: SegmentShape) -> Footprint:
        matrices = list(self._matrices(shape))
        numel = sum((rows + columns) * rank for _, rows, columns, rank in matrices)
        numel += sum(span.numel for span in self._whole(shape))
        kept = sum((rows + columns) * rank for _, rows, columns, rank in matrices)
        itemsize = shape.dtype.itemsize
        return Footprint.of(numel * itemsize + shape.trailer_bytes, kept * itemsize)

    def _matrices(self, shape: SegmentShape) -> Iterator[tuple[ParameterSpan, int, int, int]]:
        """Yield the compressed parameters with their rows, columns and rank."""
        for span in shape.spans:
            if self._compresses(span):
                rows, columns = _sides(span)
                yield span, rows, columns, min(self.rank, rows, columns)

    def _whole(self, shape: SegmentShape) -> Iterator[ParameterSpan]:
        return (span for span in shape.spans if not self._compresses(span))

    def _compresses(self, span: ParameterSpan) -> bool:
        if len(span.shape) < 2 or not span.numel:
            return False
        rows, columns = _sides(span)
        sent = (rows + columns) * min(self.rank, rows, columns)
        return sent * self.min_saving <= span.numel


def _sides(span: ParameterSpan) -> tuple[int, int]:
    return span.shape[0], span.numel // span.shape[0]


def _values(flat: Tensor, span: ParameterSpan) -> Tensor:
    """Return the parameter's view of a flat buffer, with its own shape and strides."""
    return flat.as_strided(span.shape, span.stride, flat.storage_offset() + span.start)


def _orthonormal(columns: Tensor) -> Tensor:
    """Return an orthonormal basis of the columns' space; return columns with NaN or Inf unchanged."""
    import torch

    if not math.isfinite(float(columns.sum())):
        return columns.clone()
    basis: Tensor = torch.linalg.qr(columns).Q
    return basis


def _flat(parts: list[Tensor], segment: Segment) -> Array:
    import torch

    parts = [part.reshape(-1) for part in parts]
    joined = torch.cat(parts) if parts else segment.outgoing[:0]
    return joined.cpu().numpy()
