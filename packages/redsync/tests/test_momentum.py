"""Momentum fused into the pass: core's wrapper around the same selection, bit for bit where nothing is rounded."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hocket.compressor import Compressor, Message, MomentumCorrection, OptimizerTerms, State
from hocket.errors import HocketError
from hocket.segment.segment import Segment, view_of
from hocket.testing.compressor import make_segment
from hocket_redsync.asq import Asq
from hocket_redsync.hybrid import Sampled, Threshold, Trimmed

SIZES = (300, 41, 700)
VARIANTS = list(product([True, False], [True, False], [0.0, 0.25], [0.0, 0.5]))


def step(
    compressor: Compressor,
    segment: Segment,
    state: State,
    round: int,
    values: torch.Tensor,
    terms: list[OptimizerTerms | None],
) -> bytes:
    segment.outgoing.copy_(values)
    state.take(terms, 0.5)
    return compressor.compress(segment, state, round).payload.tobytes()


@pytest.mark.one_of_each
@pytest.mark.parametrize(("masking", "nesterov", "decay", "momentum"), VARIANTS)
@pytest.mark.parametrize("kind", [Trimmed, Threshold, Sampled, Asq])
def test_fused_is_the_wrapper(
    kind: type, masking: bool, nesterov: bool, decay: float, momentum: float
) -> None:
    """Small multiples of powers of two: nothing is rounded, so the order of operations cannot show."""
    fused = kind(0.05, dense_below_kb=0.0, masking=masking)
    wrapped = MomentumCorrection(kind(0.05, dense_below_kb=0.0, correct_momentum=False), masking=masking)
    segments = [make_segment(SIZES, torch.float64, 2, index=1) for _ in range(2)]
    states = [
        compressor.init(segment) for compressor, segment in zip((fused, wrapped), segments, strict=True)
    ]
    generator = torch.Generator().manual_seed(1)
    for round in range(8):
        values = torch.randint(-8, 9, segments[0].outgoing.shape, generator=generator).double()
        parameters = [torch.randint(-8, 9, (n,), generator=generator).double() for n in SIZES]
        terms: list[OptimizerTerms | None] = [
            OptimizerTerms(parameter, momentum, decay, nesterov) for parameter in parameters
        ]
        for span in segments[0].spans:  # padding is zero, and stays so
            values[span.stop : span.start + span.padded_numel] = 0
        if round % 3 == 2:  # a parameter without gradient
            terms[1] = None
            view_of(values, segments[0].spans[1]).zero_()
        payloads = [
            step(compressor, segment, state, round, values, terms)
            for compressor, segment, state in zip((fused, wrapped), segments, states, strict=True)
        ]
        assert payloads[0] == payloads[1]
        if fused.traits.selects:  # of what was sent, half does not come through
            for compressor, segment, state in zip((fused, wrapped), segments, states, strict=True):
                payload = np.frombuffer(payloads[0], np.uint8).copy()
                sent = compressor.read(Message(payload, segment, round))
                state.take_back(sent.indices[::2], sent.values[::2])
        assert torch.equal(states[0].residual, states[1].residual)
        assert torch.equal(states[0].momentum, states[1].momentum)


@given(st.integers(1, 300), st.integers(1, 8), st.sampled_from(VARIANTS), st.integers(0, 2**16))
def test_fused_is_that_of_numpy(
    n: int, num_rounds: int, variant: tuple[bool, bool, float, float], seed: int
) -> None:
    """u <- m u + g; v <- v + u, or v + g + m u; send the largest of v, clear v and, with masking, u there."""
    masking, nesterov, decay, momentum = variant
    rng = np.random.default_rng(seed)
    k = max(1, n // 10)
    compressor = Trimmed(k / n, dense_below_kb=0.0, masking=masking)
    segment = make_segment([n], torch.float64)
    state = compressor.init(segment)
    u, v = np.zeros((2, n))
    x = torch.from_numpy(rng.normal(size=n))
    for round in range(num_rounds):
        values = torch.zeros_like(segment.outgoing)
        values[:n] = torch.from_numpy(rng.normal(size=n))
        step(compressor, segment, state, round, values, [OptimizerTerms(x, momentum, decay, nesterov)])
        g = values[:n].numpy() + decay * 0.5 * x.numpy()
        u = momentum * u + g if momentum else u
        v += g if not momentum else (g + momentum * u if nesterov else u)
        sent = np.argsort(-np.abs(v), kind="stable")[:k]
        v[sent] = 0
        if masking:
            u[sent] = 0
        np.testing.assert_allclose(state.residual[:n], v, rtol=0, atol=1e-12)
        assert state.momentum is not None
        np.testing.assert_allclose(state.momentum[:n], u, rtol=0, atol=1e-12)


@pytest.mark.parametrize("masking", [True, False])
def test_what_comes_back_is_as_if_it_had_not_been_sent(masking: bool) -> None:
    """To the bit: the state after a message of which nothing comes through is that before, with G in it."""
    compressor = Trimmed(0.2, dense_below_kb=0.0, masking=masking)
    segment = make_segment([50, 30], torch.float64)
    state = compressor.init(segment)
    assert state.residual is not None
    assert state.momentum is not None
    terms: list[OptimizerTerms | None] = [OptimizerTerms(torch.zeros(n), 0.5, 0.0) for n in (50, 30)]
    generator = torch.Generator().manual_seed(0)
    for round in range(4):
        before, velocity = state.residual.clone(), state.momentum.clone()
        values = torch.zeros_like(segment.outgoing)
        for span in segment.spans:
            view_of(values, span).copy_(torch.randn(span.numel, generator=generator))
        payload = np.frombuffer(bytearray(step(compressor, segment, state, round, values, terms)), np.uint8)
        sent = compressor.read(Message(payload, segment, round))
        state.take_back(sent.indices, sent.values)
        velocity = 0.5 * velocity + values[: segment.numel]
        assert torch.equal(state.momentum, velocity)
        assert torch.equal(state.residual, before + velocity)


def test_parameters_with_strides_of_their_own_decay_in_the_segments_order() -> None:
    parameter = torch.arange(24.0).view(2, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    segment = make_segment([24])
    compressor = Trimmed(1.0, dense_below_kb=0.0)
    state = compressor.init(segment)
    terms: list[OptimizerTerms | None] = [OptimizerTerms(parameter, 0.5, 1.0)]
    state.take(terms, 1.0)
    message = compressor.compress(segment, state, 0)
    out = torch.zeros_like(segment.outgoing)
    compressor.accumulate(message, 1.0, out)
    assert torch.equal(out[:24], parameter.permute(0, 2, 3, 1).reshape(-1))


def test_without_terms_momentum_is_not_corrected_silently() -> None:
    segment = make_segment([10])
    compressor = Trimmed(0.5)
    with pytest.raises(HocketError, match=r"gradients\.0\[0\]: compress was called before State\.take"):
        compressor.compress(segment, compressor.init(segment), 0)
