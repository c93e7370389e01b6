"""PowerSGD against the paper's algorithm in NumPy, and against the sum itself where the rank is all of a matrix's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from hocket.compressor import ErrorFeedback, Message
from hocket.segment.segment import Segment
from hocket.testing.compressor import CompressorConformance, fill, make_segment
from hocket_powersgd import PowerSGD

Floats = NDArray[np.float64]

SHAPES = ((12, 10), (7,), (6, 3, 4), (2, 2))
SEGMENT_SHAPES: Sequence[int] = SHAPES  # type: ignore[assignment]


class TestPowerSGD(CompressorConformance):
    compressors = (PowerSGD(2), ErrorFeedback(PowerSGD(2)))


def segment() -> Segment:
    return make_segment(SEGMENT_SHAPES, torch.float64, trailer_numel=2)


def values(of: Segment, which: torch.Tensor) -> list[Floats]:
    return [which[span.start : span.stop].view(span.shape).numpy().copy() for span in of.spans]


def round_of(
    compressor: PowerSGD | ErrorFeedback, segments: list[Segment], states: list[Any], round: int
) -> torch.Tensor:
    """Carry a round out as an allreduce does; return what all ranks get."""
    messages = [compressor.compress(s, state, round) for s, state in zip(segments, states, strict=True)]
    while True:
        total = Message(
            np.sum([m.payload for m in messages], axis=0), segments[0], round, known=messages[0].known
        )
        answers = [compressor.answer(total, s, state) for s, state in zip(segments, states, strict=True)]
        if answers[0] is None:
            assert answers == [None] * len(answers)
            out = torch.zeros_like(segments[0].outgoing)
            compressor.accumulate(total, 1.0, out)
            return out
        messages = answers  # type: ignore[assignment]


def algorithm_1(
    matrices: list[list[Floats]], right: list[Floats], errors: list[list[Floats]], rank: int
) -> list[Floats]:
    """Return each matrix's mean approximation by the paper's algorithm 1 and 2, whose state is changed in place.

    Args:
        matrices: of each rank, its matrices.
        right: Q of each.
        errors: of each rank and matrix.
    """
    means = []
    for number in range(len(right)):
        given = [own[number] + error[number] for own, error in zip(matrices, errors, strict=True)]
        left = np.mean([m @ right[number] for m in given], axis=0)
        for column in range(rank):  # Gram-Schmidt
            for before in range(column):
                left[:, column] -= (left[:, before] @ left[:, column]) * left[:, before]
            left[:, column] /= np.linalg.norm(left[:, column])
        right[number] = np.mean([m.T @ left for m in given], axis=0)
        mean = left @ right[number].T
        for error, m in zip(errors, given, strict=True):
            error[number] = m - mean
        means.append(mean)
    return means


@pytest.mark.one_of_each
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("rank", [1, 2])
def test_it_is_the_papers_algorithm(ranks: int, rank: int) -> None:
    compressor = ErrorFeedback(PowerSGD(rank, min_saving=1.5))
    segments = [segment() for _ in range(ranks)]
    states: list[Any] = [compressor.init(each) for each in segments]
    matrices = [0, 2]  # the others are shorter whole
    right = [state.numpy().copy() for state in states[0].inner.right]
    errors = [[np.zeros((12, 10)), np.zeros((6, 12))] for _ in range(ranks)]
    for round in range(6):
        for number, each in enumerate(segments):
            fill(each, 10 * round + number)
        given = [values(each, each.outgoing) for each in segments]
        got = round_of(compressor, segments, states, round)
        expected = algorithm_1(
            [[own[i].reshape(len(own[i]), -1) * ranks for i in matrices] for own in given],
            right,
            errors,
            rank,
        )
        arrived = values(segments[0], got)
        for i, mean in zip(matrices, expected, strict=True):
            np.testing.assert_allclose(arrived[i].reshape(mean.shape), mean, rtol=1e-9, atol=1e-12)
        for i in (1, 3):
            np.testing.assert_allclose(arrived[i], sum(own[i] for own in given), rtol=1e-12)
        np.testing.assert_allclose(
            got[-2:], np.sum([each.outgoing_trailer for each in segments], axis=0), rtol=1e-12
        )
        # What has not arrived is in the residuals; the paper's, which differ rank by rank, have the same sum.
        kept = torch.stack([state.residual[: segments[0].numel] for state in states]).sum(0)
        for j, i in enumerate(matrices):
            sums = values(segments[0], kept)[i].reshape(expected[j].shape)
            np.testing.assert_allclose(sums, sum(own[j] for own in errors) / ranks, rtol=1e-9, atol=1e-12)


def test_at_full_rank_it_is_the_sum() -> None:
    compressor = PowerSGD(12, min_saving=0)
    segments = [segment() for _ in range(3)]
    states = [compressor.init(each) for each in segments]
    for round in range(3):
        for number, each in enumerate(segments):
            fill(each, 10 * round + number)
        got = round_of(compressor, segments, states, round)
        torch.testing.assert_close(got, sum(each.outgoing for each in segments), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_of_one_rank_enters_no_state(bad: float) -> None:
    compressor = ErrorFeedback(PowerSGD(2, min_saving=0))
    segments = [segment() for _ in range(2)]
    states = [compressor.init(each) for each in segments]
    for round in range(2):
        for number, each in enumerate(segments):
            fill(each, 10 * round + number)
        round_of(compressor, segments, states, round)
    before = [state.state_dict() for state in states]
    segments[1].outgoing[3] = bad
    with np.errstate(invalid="ignore"):  # Inf - Inf
        got = round_of(compressor, segments, states, 2)
    assert not torch.isfinite(got).all()
    for state, kept in zip(states, before, strict=True):
        for name, tensor in state.tensors().items():
            torch.testing.assert_close(tensor, kept[name], rtol=1e-12, atol=1e-12)
