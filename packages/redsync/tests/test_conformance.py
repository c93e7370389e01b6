"""RedSync's compressors against core's contract: with one method, by size and name, with momentum, and quantised."""

from __future__ import annotations

import pytest
import torch
from toys import PLAIN

from hocket.compressor import Compressor, LocalClipping
from hocket.segment.segment import Segment, view_of
from hocket.testing.compressor import CompressorConformance, dense, fill, make_segment, run_round
from hocket_redsync.asq import Asq, Feedback
from hocket_redsync.hybrid import Exact, Hybrid, Sampled, Threshold, Trimmed
from hocket_redsync.state import ResidualState


class TestPlain(CompressorConformance):
    compressors = (
        Exact(0.1, **PLAIN),
        Trimmed(0.001, **PLAIN),
        Threshold(0.03, **PLAIN),
        Sampled(0.4, **PLAIN),
        Hybrid(0.1, methods={"p1": "dense", "*": "threshold"}, **PLAIN),
    )


class TestEverythingIsSent(CompressorConformance):
    compressors = (Trimmed(1.0, **PLAIN), Hybrid(0.01, correct_momentum=False))
    relative_error = 0.0
    sizes = (7, 1000)


class TestWithMomentum(CompressorConformance):
    compressors = (
        Hybrid(0.1, dense_below_kb=2.0, sampled_from_kb=4.0),
        Trimmed(0.1, dense_below_kb=0.0, masking=False),
        Trimmed(1.0, dense_below_kb=0.0),
        LocalClipping(Sampled(0.05, dense_below_kb=0.0), max_norm=0.5),
    )
    sizes = (7, 1000)

    def test_nothing_is_lost_where_something_is_kept(self, compressor: Compressor, segment: Segment) -> None:
        """V before + what momentum makes of G = V after + sent, to the bit; what it makes is not in `outgoing`."""
        state = compressor.init(segment)
        for round in range(4):
            fill(segment, round)
            assert state.residual is not None
            assert state.momentum is not None
            before, velocity = state.residual.clone(), state.momentum.clone()
            message = run_round(compressor, segment, state, round)
            expected = before + accelerated(segment, velocity)
            assert torch.equal(expected, state.residual + dense(compressor, message)[: segment.numel])


def accelerated(segment: Segment, velocity: torch.Tensor) -> torch.Tensor:
    """Return u after a step with the terms of `run_round`: momentum 0.9, weight decay 0.1 of parameters of ones."""
    result = torch.zeros_like(velocity)
    for span in segment.spans:
        gradient = view_of(segment.outgoing, span) + torch.tensor(0.1, dtype=velocity.dtype)
        view_of(result, span).copy_(view_of(velocity, span) * 0.9 + gradient)
    return result


class TestAlternatingSigns(CompressorConformance):
    compressors = (
        Asq(0.1, **PLAIN),
        Asq(0.1, feedback=Feedback.ERROR, **PLAIN),
        Asq(0.1, dense_below_kb=0.0),
        Asq(1.0, unquantised=["p1"], **PLAIN),
    )
    sizes = (7, 999)  # the largest is not segment 0, whose output layer is not quantised

    def test_nothing_is_lost_where_something_is_kept(self, compressor: Compressor, segment: Segment) -> None:
        """Each parameter's sum is kept, to rounding; with feedback of the error each element's own, too."""
        state = compressor.init(segment)
        assert isinstance(compressor, Asq)
        assert isinstance(state, ResidualState)
        for round in range(4):
            fill(segment, round)
            before = state.residual.clone()
            velocity = None if state.momentum is None else state.momentum.clone()
            message = run_round(compressor, segment, state, round)
            given = segment.outgoing[: segment.numel] if velocity is None else accelerated(segment, velocity)
            expected, kept = before + given, state.residual + dense(compressor, message)[: segment.numel]
            for span in segment.spans:
                torch.testing.assert_close(
                    view_of(kept, span).sum(), view_of(expected, span).sum(), rtol=1e-4, atol=1e-4
                )
            if compressor.feedback is Feedback.ERROR:
                torch.testing.assert_close(kept, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
class TestOnAGpu(CompressorConformance):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    compressors = (
        Hybrid(0.1, dense_below_kb=2.0, sampled_from_kb=4.0, correct_momentum=False),
        Sampled(0.03, **PLAIN),
        Asq(0.1, **PLAIN),
    )
    sizes = (7, 1000)


def test_the_suite_fails_for_a_residual_that_forgets() -> None:
    class Forgetful(Trimmed):
        def _clear(self, state: ResidualState, contents: object, sent: object) -> None:
            state.residual.zero_()

    with pytest.raises(AssertionError):
        CompressorConformance().test_nothing_is_lost_where_something_is_kept(
            Forgetful(0.1, **PLAIN), make_segment([900, 100], trailer_numel=3)
        )
