"""Training with corrected sparse gradients, against the same mathematics in one process and plain NumPy."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hocket.compressor import (
    Compressor,
    ErrorFeedback,
    Identity,
    LocalClipping,
    MomentumCorrection,
    OptimizerTerms,
    SharedRandom,
    State,
    TopK,
    optimizer_terms,
)
from hocket.errors import AttachError, HocketError
from hocket.segment.segment import Segment, view_of
from hocket.testing.compressor import make_segment, run_round
from hocket.topology import RandomMatching

LR, MOMENTUM, WEIGHT_DECAY = 0.1, 0.9, 0.01
SHAPES = (48, 16)  # no padding, so that NumPy's vectors have the segment's indices


@dataclass
class Ranks:
    """Ranks that train one quadratic model with a compressor, in one process, exchanged by adding messages.

    Rank r's loss is |A_r x - b_r|^2 / 2; all ranks hold the same x.
    """

    compressor: Compressor
    size: int
    dtype: torch.dtype = torch.float32
    nesterov: bool = False
    segments: list[Segment] = field(init=False)
    states: list[State] = field(init=False)

    def __post_init__(self) -> None:
        self.x = torch.linspace(-1, 1, sum(SHAPES), dtype=self.dtype)
        self.segments = [make_segment(SHAPES, self.dtype) for _ in range(self.size)]
        self.states = [self.compressor.init(segment) for segment in self.segments]

    def step(self, round: int) -> None:
        total = torch.zeros_like(self.x)
        for rank, (segment, state) in enumerate(zip(self.segments, self.states, strict=True)):
            segment.outgoing.copy_(gradient(rank, self.x) / self.size)
            if self.compressor.traits.applies_optimizer_terms:
                terms = [
                    OptimizerTerms(view_of(self.x, span), MOMENTUM, WEIGHT_DECAY, self.nesterov)
                    for span in segment.spans
                ]
                state.take(terms, 1 / self.size)
            message = self.compressor.compress(segment, state, round)
            self.compressor.accumulate(message, 1.0, total)
        self.x.add_(total, alpha=-LR)


def problem(rank: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.Generator(np.random.Philox(key=rank))
    return generator.normal(size=(10, sum(SHAPES))) / 8, generator.normal(size=10)


def gradient(rank: int, x: Tensor) -> Tensor:
    matrix, target = (torch.from_numpy(part).to(x.dtype) for part in problem(rank))
    return matrix.T @ (matrix @ x - target)


def sent_of(residual: np.ndarray, count: int) -> np.ndarray:
    """Return the mask of the `count` largest, by a stable sort."""
    mask = np.zeros(len(residual), dtype=bool)
    mask[np.argsort(-np.abs(residual), kind="stable")[:count]] = True
    return mask


def trained_by_hand(
    size: int, steps: int, count: int, *, momentum: float, weight_decay: float, masking: bool, nesterov: bool
) -> np.ndarray:
    """DGC in NumPy, float64: u <- m u + g, v <- v + u (or m u + g), send the largest of v, clear v and u there."""
    x = np.linspace(-1, 1, sum(SHAPES))
    velocities, residuals = np.zeros((2, size, len(x)))
    for _ in range(steps):
        total = np.zeros_like(x)
        for rank in range(size):
            matrix, target = problem(rank)
            g = (matrix.T @ (matrix @ x - target) + weight_decay * x) / size
            velocities[rank] = momentum * velocities[rank] + g
            residuals[rank] += momentum * velocities[rank] + g if nesterov else velocities[rank]
            mask = sent_of(residuals[rank], count)
            total[mask] += residuals[rank][mask]
            residuals[rank][mask] = 0
            if masking:
                velocities[rank][mask] = 0
        x -= LR * total
    return x


@given(st.integers(1, 4), st.integers(1, 64), st.integers(1, 12))
def test_error_feedback_is_that_of_numpy(size: int, count: int, steps: int) -> None:
    ranks = Ranks(ErrorFeedback(TopK(count / 64)), size, torch.float64)
    for round in range(steps):
        ranks.step(round)
    expected = trained_by_hand(size, steps, count, momentum=0, weight_decay=0, masking=False, nesterov=False)
    np.testing.assert_allclose(ranks.x, expected, rtol=0, atol=1e-12)


@given(st.integers(1, 4), st.integers(1, 64), st.integers(1, 12), st.booleans(), st.booleans())
def test_momentum_correction_is_that_of_numpy(
    size: int, count: int, steps: int, masking: bool, nesterov: bool
) -> None:
    compressor = MomentumCorrection(ErrorFeedback(TopK(count / 64)), masking=masking)
    ranks = Ranks(compressor, size, torch.float64, nesterov)
    for round in range(steps):
        ranks.step(round)
    expected = trained_by_hand(
        size, steps, count, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY, masking=masking, nesterov=nesterov
    )
    np.testing.assert_allclose(ranks.x, expected, rtol=0, atol=1e-12)


def mean_gradient(x: Tensor, size: int) -> Tensor:
    return reduce(torch.add, [gradient(rank, x.detach()) for rank in range(size)]) / size


def trained_by_torch(x: Tensor, steps: int, size: int, momentum: float, nesterov: bool = False) -> Tensor:
    parameter = torch.nn.Parameter(x.clone())
    optimizer = torch.optim.SGD(
        [parameter], lr=LR, momentum=momentum, weight_decay=WEIGHT_DECAY, nesterov=nesterov, foreach=False
    )
    for _ in range(steps):
        parameter.grad = mean_gradient(parameter, size)
        optimizer.step()
    return parameter.detach()


@pytest.mark.one_of_each
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("inner", [ErrorFeedback(TopK(1.0)), ErrorFeedback(Identity()), Identity()])
def test_at_density_1_without_masking_it_is_sgd_with_momentum(inner: Compressor, nesterov: bool) -> None:
    ranks = Ranks(MomentumCorrection(inner, masking=False), 4, nesterov=nesterov)
    start = ranks.x.clone()
    for round in range(30):
        ranks.step(round)
    expected = trained_by_torch(start, 30, 4, momentum=MOMENTUM, nesterov=nesterov)
    assert (ranks.x - expected).abs().max() < 1e-6


def test_at_density_1_with_masking_it_is_plain_sgd() -> None:
    ranks = Ranks(MomentumCorrection(ErrorFeedback(TopK(1.0))), 4)
    start = ranks.x.clone()
    for round in range(30):
        ranks.step(round)
    expected = trained_by_torch(start, 30, 4, momentum=0.0)
    assert (ranks.x - expected).abs().max() < 1e-6


def test_one_rank_at_density_1_is_sgd_to_the_bit() -> None:
    ranks = Ranks(MomentumCorrection(Identity(), masking=False), 1)
    start = ranks.x.clone()
    for round in range(30):
        ranks.step(round)
    expected = trained_by_torch(start, 30, 1, momentum=MOMENTUM)
    assert torch.equal(ranks.x, expected)


def test_the_buffer_is_handed_over_and_back() -> None:
    """Ten steps of torch, ten compressed at density 1, ten of torch: as thirty of torch."""
    size = 3
    ranks = Ranks(MomentumCorrection(ErrorFeedback(TopK(1.0)), masking=False), size)
    parameter = torch.nn.Parameter(ranks.x.clone())
    expected = trained_by_torch(ranks.x, 30, size, momentum=MOMENTUM)
    optimizer = torch.optim.SGD([parameter], lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)

    def steps_of_torch() -> None:
        for _ in range(10):
            parameter.grad = mean_gradient(parameter, size)
            optimizer.step()

    steps_of_torch()
    shares = [state.momentum for state in ranks.states if state.momentum is not None]
    assert len(shares) == size
    for share in shares:
        share.copy_(optimizer.state[parameter]["momentum_buffer"] / size)
    ranks.x.copy_(parameter.detach())
    for round in range(10):
        ranks.step(round)
    optimizer.state[parameter]["momentum_buffer"].copy_(sum(shares))
    parameter.data.copy_(ranks.x)
    steps_of_torch()
    assert (parameter.detach() - expected).abs().max() < 1e-6


def test_parameters_without_gradient_are_left_out() -> None:
    compressor: Compressor = MomentumCorrection(Identity(), masking=False)
    segment = make_segment(SHAPES)
    state = compressor.init(segment)
    assert state.momentum is not None
    state.momentum.fill_(1.0)
    ones = [OptimizerTerms(torch.ones(span.shape), 0.5, 0.25) for span in segment.spans]
    state.take([ones[0], None], 1.0)
    message = compressor.compress(segment, state, 0)
    assert message.payload.tolist() == [0.75] * SHAPES[0] + [0.0] * SHAPES[1]
    assert state.momentum.tolist() == [0.75] * SHAPES[0] + [1.0] * SHAPES[1]


def test_terms_have_to_be_taken_first() -> None:
    compressor: Compressor = MomentumCorrection(Identity())
    segment = make_segment(SHAPES)
    with pytest.raises(HocketError, match=r"compress was called before State\.take"):
        compressor.compress(segment, compressor.init(segment), 0)


def test_terms_are_read_from_the_groups() -> None:
    first, second = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    groups: list[dict[str, Any]] = [
        {"params": [first]},
        {"params": [second], "momentum": 0.5, "nesterov": True},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01)
    optimizer.param_groups[0]["momentum"] = 0.8
    terms = optimizer_terms(optimizer)
    read = [(t.momentum, t.weight_decay, t.nesterov) for t in (terms[first], terms[second])]
    assert read == [(0.8, 0.01, False), (0.5, 0.01, True)]
    assert terms[first].parameter is first


@pytest.mark.parametrize(
    ("optimizer", "settings", "message"),
    [
        (torch.optim.AdamW, {}, "not that of AdamW: use SGD"),
        (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1}, "dampening of torch.optim.SGD, which is 0.1"),
        (torch.optim.SGD, {"maximize": True}, "does not work with maximize"),
    ],
)
def test_optimizers_that_are_refused(optimizer: type, settings: dict[str, float], message: str) -> None:
    with pytest.raises(AttachError, match=message):
        optimizer_terms(optimizer([torch.nn.Parameter(torch.ones(3))], lr=0.1, **settings))


def test_orders_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="compressor already keeps unsent values"):
        ErrorFeedback(LocalClipping(ErrorFeedback(TopK(0.1)), max_norm=1.0))
    with pytest.raises(ValueError, match="put error_feedback inside momentum_correction"):
        ErrorFeedback(MomentumCorrection(TopK(0.1)))
    with pytest.raises(ValueError, match="compressor already applies momentum"):
        MomentumCorrection(MomentumCorrection(TopK(0.1)))


@given(st.floats(0.01, 20), st.integers(1, 9), st.sampled_from([1.0, None]), st.integers(0, 99))
def test_clipping_against_torch(max_norm: float, size: int, scale: float | None, seed: int) -> None:
    """A rank's own gradients, before they were scaled, are clipped to max_norm * sqrt(size)."""
    scale = scale or 1 / size
    segments = [make_segment(SHAPES, torch.float64), make_segment((32,), torch.float64)]
    gradients = [torch.nn.Parameter(torch.zeros(segment.numel)) for segment in segments]
    generator = torch.Generator().manual_seed(seed)
    for segment, own in zip(segments, gradients, strict=True):
        own.grad = torch.randn(segment.numel, generator=generator)
        segment.outgoing.copy_(own.grad * scale)
    LocalClipping(Identity(), max_norm).prepare(segments, 0, size, scale)
    torch.nn.utils.clip_grad_norm_(gradients, max_norm * math.sqrt(size))
    for segment, own in zip(segments, gradients, strict=True):
        assert own.grad is not None
        torch.testing.assert_close(segment.outgoing.float(), own.grad * scale)


def test_clipping_leaves_nan_and_empty_contributions_alone() -> None:
    segment = make_segment(SHAPES)
    clipping = LocalClipping(Identity(), 1.0)
    clipping.prepare([segment], 0, 2, 0.0)
    assert not segment.outgoing.any()
    segment.outgoing.fill_(100.0)[3] = math.nan
    clipping.prepare([segment], 0, 2, 0.5)
    assert segment.outgoing[4] == 100.0


@pytest.mark.parametrize("max_norm", [0.0, -1.0, math.inf, math.nan])
def test_max_norm_out_of_range(max_norm: float) -> None:
    with pytest.raises(ValueError, match="max_norm must be finite and more than 0"):
        LocalClipping(Identity(), max_norm)


def test_mixing_shared_coordinates_keeps_the_mean_and_reaches_consensus() -> None:
    """Gossip of x <- x - (1 - W_ii) C(x) + sum of W_ij C(x_j): each coordinate is mixed by W, or not at all."""
    size, compressor, topology = 6, SharedRandom(0.25), RandomMatching()
    segments = [make_segment((64,), torch.float64) for _ in range(size)]
    states = [compressor.init(segment) for segment in segments]
    values = torch.randn(size, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mean = values.mean(0)
    for round in range(200):
        matrix = topology.mixing_matrix(size, round, 0)
        before, messages = values.clone(), []
        for rank, segment in enumerate(segments):
            segment.outgoing.copy_(values[rank])
            messages.append(run_round(compressor, segment, states[rank], round))
        for rank in range(size):
            compressor.accumulate(messages[rank], matrix[rank, rank] - 1, values[rank])
            for source in set(range(size)) - {rank}:
                compressor.accumulate(messages[source], matrix[rank, source], values[rank])
        compressor.clear_sent(messages[0], stays := torch.ones(64))
        expected = torch.where(stays == 0, torch.from_numpy(matrix) @ before, before)
        torch.testing.assert_close(values, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(values.mean(0), mean)
    assert (values - mean).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.float32, 1e20), (torch.float32, 3e38), (torch.float64, 1e200), (torch.float64, 1e300)],
)
def test_gradients_whose_squares_overflow_are_clipped(dtype: torch.dtype, size: float) -> None:
    segments = [make_segment(SHAPES, dtype), make_segment((32,), dtype)]
    generator = torch.Generator().manual_seed(0)
    directions = [
        torch.randn(segment.numel, generator=generator, dtype=torch.float64) for segment in segments
    ]
    largest = max(float(direction.abs().max()) for direction in directions)
    directions = [direction / largest for direction in directions]
    for segment, direction in zip(segments, directions, strict=True):
        segment.outgoing.copy_(direction * size)
    LocalClipping(Identity(), 0.5).prepare(segments, 0, 1, 1.0)
    norm = math.hypot(*(float(direction.norm()) for direction in directions))
    for segment, direction in zip(segments, directions, strict=True):
        expected = (0.5 / norm * direction).to(dtype)
        torch.testing.assert_close(segment.outgoing, expected, rtol=1e-6, atol=1e-9)
