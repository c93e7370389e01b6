"""What ranks do in the tests of the scalable sparse allreduce, on virtual ranks and in jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hocket.arrays import Array
from hocket.collective.api import Channel, Choices
from hocket.collective.sparse import SparseAlgorithm, SparseAllreduce
from hocket.compressor import Compressor, ErrorFeedback, OptimizerTerms, TopK
from hocket.launch.joining import join
from hocket.progress import InlineProgress
from hocket.segment.segment import Segment
from hocket.testing.compressor import make_segment
from hocket.transport.peer import Peer
from hocket.transport.virtual import VirtualWorld

SCALABLE = SparseAllreduce(algorithm=SparseAlgorithm.SCALABLE)
#: Two parameters with padding behind them.
SIZES = (37, 90)
TRAILER = 5


@dataclass(frozen=True, eq=False)
class Ended:
    """What a rank has after the rounds.

    Attributes:
        results: [rounds, numel + trailer].
        residual, momentum: [numel].
    """

    results: Array
    residual: Array
    momentum: Array


def segment_of(sizes: Sequence[int] = SIZES) -> Segment:
    return make_segment(sizes, torch.float64, TRAILER)


def carried_out(
    contributions: Array,
    compressor: Compressor,
    collective: SparseAllreduce = SCALABLE,
    sizes: Sequence[int] = SIZES,
    resumed_at: int | None = None,
) -> list[Ended]:
    """Exchange contributions, [rounds, ranks, numel + trailer], on virtual ranks."""
    return VirtualWorld(contributions.shape[1]).run(
        lambda: _exchanged(join(), contributions, compressor, collective, sizes, resumed_at)
    )


def in_a_job(peer: Peer, rounds: int, seed: int, density: float) -> list[Any]:
    """Exchange what is drawn on the rank of a job; return its results and its residual as JSON values."""
    contributions = drawn(peer.size, rounds, seed)
    ended = _exchanged(peer, contributions, ErrorFeedback(TopK(density)), SCALABLE, SIZES, None)
    return [ended.results.tolist(), ended.residual.tolist()]


def _exchanged(
    peer: Peer,
    contributions: Array,
    compressor: Compressor,
    collective: SparseAllreduce,
    sizes: Sequence[int],
    resumed_at: int | None,
) -> Ended:
    progress = InlineProgress()
    segment = segment_of(sizes)
    choices = Choices("gradients.0", "gradients", compressor=compressor)

    def opened() -> Channel:
        return collective.open(peer, [segment], progress, choices)

    channel, results = opened(), []
    for round, of_ranks in enumerate(contributions):
        if round == resumed_at:
            saved = channel.state_dict()
            channel.close()
            channel = opened()
            channel.resume({0: round}, saved)
        segment.outgoing.copy_(torch.from_numpy(of_ranks[peer.rank]))
        assert channel.packing is not None
        terms = [OptimizerTerms(torch.zeros(span.shape), 0.5, 0.0) for span in segment.spans]
        channel.packing.states[0].take(terms, 1.0)
        channel.start([segment], round).wait()
        results.append(segment.incoming.numpy().copy())
    assert channel.packing is not None
    state = channel.packing.states[0]
    kept = [state.residual, state.momentum]
    channel.close()
    progress.close()
    zeros = np.zeros(segment.numel)
    return Ended(np.array(results), *(zeros if each is None else each.numpy().copy() for each in kept))


def drawn(ranks: int, rounds: int, seed: int, sizes: Sequence[int] = SIZES) -> Array:
    """Whole numbers, so that no sum is rounded; large ones lie at the segment's end. Padding is 0."""
    segment = segment_of(sizes)
    generator = np.random.default_rng(seed)
    values = generator.integers(-1000, 1001, (rounds, ranks, segment.numel)).astype(float)
    values *= 1 + np.arange(segment.numel) // 8
    for span in segment.spans:
        values[..., span.stop : span.start + span.padded_numel] = 0
    return np.concatenate([values, generator.integers(0, 9, (rounds, ranks, TRAILER))], axis=-1)
