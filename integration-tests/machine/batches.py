"""The batches and weights of each rank in each step, and who leaves one out or has NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from machine.moves import Epoch, Step, Way
from machine.toy import Batch, batch_of


@dataclass(frozen=True)
class Given:
    """The batches of the ranks at one time.

    Attributes:
        batches: by rank.
        weights: by rank; 0 for a repetition.
        is_nan: the rank whose loss is NaN.
        left_out: the rank that leaves its batch out.
        micro: which batch of its step it is.
        ends: whether it is the last one.
    """

    way: Way
    batches: Sequence[Batch]
    weights: Sequence[float]
    is_nan: int | None
    left_out: int | None
    micro: int
    ends: bool


def batches_of(move: Step | Epoch, ranks: int) -> list[Given]:
    """Return what the ranks are given in a move, in order."""
    micros = move.way.micros
    if isinstance(move, Step):
        lengths, length = [micros] * ranks, micros
    else:
        lengths, length = list(move.lengths[:ranks]), max(move.lengths[:ranks])
    given = []
    for number in range(length):
        real = [number < of_rank for of_rank in lengths]
        weights = [weight_of(move, rank, number) if real[rank] else 0.0 for rank in range(ranks)]
        batches = [_last_batch(move, lengths, rank, number) for rank in range(ranks)]
        micro = number % micros
        ends = micro == micros - 1
        is_nan = (
            move.nan if ends and number < 2 * micros and move.nan is not None and real[move.nan] else None
        )
        left_out = getattr(move, "skips", None) if number == 0 else None
        given.append(Given(move.way, batches, weights, is_nan, left_out, micro, ends))
    return given


def own_batches(move: Step | Epoch, rank: int) -> list[Batch]:
    """Return what a rank's loader holds."""
    length = move.way.micros if isinstance(move, Step) else move.lengths[rank]
    return [batch_of(move.seed, rank, number, move.way.users) for number in range(length)]


def weight_of(move: Step | Epoch, rank: int, number: int) -> float:
    """Return how much a batch counts."""
    return 0.5 + (rank + number) % 3 if isinstance(move, Epoch) and move.weighs else 1.0


def _last_batch(move: Step | Epoch, lengths: Sequence[int], rank: int, number: int) -> Batch:
    """Return a rank's batch, its last one where it has no more, and that of the first rank that has any else."""
    if lengths[rank]:
        return batch_of(move.seed, rank, min(number, lengths[rank] - 1), move.way.users)
    lender = next(other for other, length in enumerate(lengths) if length)
    return batch_of(move.seed, lender, 0, move.way.users)
