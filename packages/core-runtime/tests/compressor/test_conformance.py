"""Core's compressors, alone and inside each other, against the contract; and the contract against bad ones."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest
import torch

import hocket
from hocket.compressor import (
    BFloat16,
    Compressor,
    CompressorTraits,
    ErrorFeedback,
    Float16,
    Identity,
    LocalClipping,
    Message,
    MomentumCorrection,
    SharedRandom,
    State,
    TopK,
    Wrapper,
)
from hocket.compressor.error_feedback import _ErrorFeedbackState
from hocket.errors import UserError
from hocket.segment.segment import Segment
from hocket.testing.compressor import CompressorConformance, dense, fill, make_segment, run_round


class TestNone(CompressorConformance):
    compressors = (Identity(),)
    relative_error = 0.0


class TestFloat16(CompressorConformance):
    compressors = (Float16(),)
    relative_error = 2**-11


class TestBFloat16(CompressorConformance):
    compressors = (BFloat16(),)
    relative_error = 2**-8


class TestTopK(CompressorConformance):
    compressors = (TopK(0.1), TopK(0.001))


class TestEverythingIsTop(CompressorConformance):
    compressors = (TopK(1.0),)
    relative_error = 0.0


class TestSharedRandom(CompressorConformance):
    compressors = (SharedRandom(0.1), SharedRandom(0.37, seed=5))


class TestEverythingIsDrawn(CompressorConformance):
    compressors = (SharedRandom(1.0),)
    relative_error = 0.0


class TestErrorFeedback(CompressorConformance):
    compressors = (
        ErrorFeedback(TopK(0.1)),
        ErrorFeedback(Float16()),
        ErrorFeedback(BFloat16()),
        ErrorFeedback(SharedRandom(0.1)),
        ErrorFeedback(Identity()),
    )


def test_a_residual_decays_and_is_what_receivers_did_not_get() -> None:
    """V <- decay V + G - D(C(decay V + G)), in float64, with values that bf16 rounds."""
    compressor, segment, kept = ErrorFeedback(BFloat16(), decay=0.75), make_segment([40]), np.zeros(40)
    state = compressor.init(segment)
    assert state.residual is not None
    for round in range(5):
        fill(segment, round)
        kept = 0.75 * kept + segment.outgoing[:40].double().numpy()
        sent = dense(compressor, run_round(compressor, segment, state, round))[:40].double().numpy()
        np.testing.assert_allclose(sent, kept, rtol=2**-8)
        kept -= sent
        np.testing.assert_allclose(state.residual[:40], kept, atol=1e-6)
    assert np.abs(kept).max() > 1e-4
    with pytest.raises(ValueError, match="decay must be above 0 and at most 1, not 0"):
        ErrorFeedback(BFloat16(), decay=0)


class TestMomentumCorrection(CompressorConformance):
    compressors = (
        MomentumCorrection(ErrorFeedback(TopK(0.1))),
        MomentumCorrection(ErrorFeedback(SharedRandom(0.1)), masking=False),
        MomentumCorrection(Identity()),
    )


class TestLocalClipping(CompressorConformance):
    compressors = (
        LocalClipping(TopK(0.1), max_norm=0.5),
        LocalClipping(MomentumCorrection(ErrorFeedback(TopK(0.1))), max_norm=0.5),
        ErrorFeedback(LocalClipping(Float16(), max_norm=0.5)),
    )


@pytest.mark.gpu
class TestOnAGpu(CompressorConformance):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    compressors = (
        Identity(),
        BFloat16(),
        ErrorFeedback(SharedRandom(0.1)),
        LocalClipping(MomentumCorrection(ErrorFeedback(TopK(0.1))), max_norm=0.5),
    )


@dataclass(frozen=True)
class Forgetful(ErrorFeedback):
    def compress(self, segment: Segment, state: _ErrorFeedbackState, round: int) -> Message:
        message = super().compress(segment, state, round)
        state.residual.zero_()
        return message


@dataclass(frozen=True)
class Poisoned(ErrorFeedback):
    def compress(self, segment: Segment, state: _ErrorFeedbackState, round: int) -> Message:
        state.residual.add_(segment.outgoing[: segment.numel])
        return self.compressor.compress(segment, state.inner, round)


@dataclass(frozen=True)
class Unsaved(Wrapper):
    def init(self, segment: Segment) -> State:
        state = super().init(segment)
        state.tensors = dict  # type: ignore[method-assign]
        return state


@dataclass(frozen=True)
class Overwriting(Wrapper):
    def accumulate(self, message: Message, weight: float, out: torch.Tensor) -> None:
        out.zero_()
        super().accumulate(message, weight, out)


@dataclass(frozen=True)
class Touching(Identity):
    def compress(self, segment: Segment, state: State, round: int) -> Message:
        segment.outgoing[: segment.numel].mul_(2)
        return super().compress(segment, state, round)


@dataclass(frozen=True)
class Longer(Identity):
    def compress(self, segment: Segment, state: State, round: int) -> Message:
        return Message(np.append(segment.outgoing_array, 0), segment, round)


@dataclass(frozen=True)
class Reducible(Wrapper):
    @property
    def traits(self) -> CompressorTraits:
        return CompressorTraits(reducible=True)


@dataclass(frozen=True)
class Unprepared(LocalClipping):
    @property
    def traits(self) -> CompressorTraits:
        return self.compressor.traits


@dataclass(frozen=True)
class Changeable(SharedRandom):
    def clear_sent(self, message: Message, out: torch.Tensor) -> None:
        super().clear_sent(Message(message.payload, message.segment, message.round + 1), out)


@dataclass(frozen=True)
class ClearingAll(SharedRandom):
    def clear_sent(self, message: Message, out: torch.Tensor) -> None:
        out.zero_()


@dataclass(frozen=True)
class ClearingAllDensely(ClearingAll):
    def accumulate(self, message: Message, weight: float, out: torch.Tensor) -> None:
        values = torch.zeros_like(out)
        super().accumulate(message, 1.0, values)
        out.add_(values, alpha=weight)


@dataclass(frozen=True)
class Undeclared(SharedRandom):
    @property
    def traits(self) -> CompressorTraits:
        return CompressorTraits(reducible=True)


@dataclass(frozen=True)
class InDoubles(SharedRandom):
    def compress(self, segment: Segment, state: State, round: int) -> Message:
        message = super().compress(segment, state, round)
        return Message(message.payload.astype(np.float64), segment, round)


@dataclass(frozen=True)
class AsTensor(SharedRandom):
    def compress(self, segment: Segment, state: State, round: int) -> Message:
        payload: Any = torch.from_numpy(super().compress(segment, state, round).payload)
        return Message(payload, segment, round)


@dataclass(frozen=True)
class Silent(SharedRandom):
    def compress(self, segment: Segment, state: State, round: int) -> Message:
        return cast(Message, None)


@pytest.mark.parametrize(
    ("bad", "test"),
    [
        (Forgetful(TopK(0.1)), "test_nothing_is_lost_where_something_is_kept"),
        (Poisoned(TopK(0.1)), "test_nan_and_inf_do_not_enter_the_state"),
        (Unsaved(ErrorFeedback(TopK(0.1))), "test_state_goes_on_where_it_was_saved"),
        (Overwriting(TopK(0.1)), "test_accumulate_adds_a_multiple"),
        (Touching(), "test_outgoing_stays_as_it_is"),
        (Longer(), "test_payload_is_a_flat_array_of_the_size_that_was_said"),
        (Reducible(TopK(0.1)), "test_sums_of_messages_are_messages"),
        (Unprepared(Identity(), 1e-3), "test_what_prepares_says_so"),
        (Changeable(0.1), "test_clear_sent_clears_what_arrives"),
        (ClearingAll(0.1), "test_clear_sent_clears_what_arrives"),
        (ClearingAllDensely(0.1), "test_clear_sent_clears_what_arrives"),
        (ErrorFeedback(ClearingAll(0.1)), "test_clear_sent_clears_what_arrives"),
        (Undeclared(0.1), "test_what_leaves_elements_out_says_so"),
        (InDoubles(0.1), "test_payload_is_a_flat_array_of_the_size_that_was_said"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_the_suite_fails_for_what_breaks_the_contract(bad: Compressor, test: str) -> None:
    with pytest.raises(AssertionError):
        getattr(CompressorConformance(), test)(bad, make_segment([900, 100], trailer_numel=3))


def test_pytest_tells_what_assertions_of_the_suites_compare() -> None:
    assert type(sys.modules[CompressorConformance.__module__].__loader__).__name__ == "AssertionRewritingHook"


def test_the_suite_says_which_elements_and_numbers() -> None:
    suite, segment = CompressorConformance(), make_segment([900, 100], trailer_numel=3)
    with pytest.raises(
        AssertionError,
        match=r"sets \d+ of 10\d\d elements \(\d+, \d+, \d+ and \d+ more\) to 0, which the message",
    ):
        suite.test_clear_sent_clears_what_arrives(ClearingAll(0.1), segment)
    told = r"\d+ float64, \d+ bytes, but footprint says message_bytes=\d+ .* float32 and 3 in the trailer"
    with pytest.raises(AssertionError, match=told):
        suite.test_deterministic(InDoubles(0.1), segment)


def test_every_two_of_a_test_a_compressor_and_a_segment_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    suite = TestErrorFeedback()
    tests = [name for name in dir(suite) if name.startswith("test_")]
    monkeypatch.setenv("HOCKET_CELLS", "all")
    product = {(test, *map(repr, pair)) for test in tests for pair in suite._pairs(test)}
    assert len(product) == len(tests) * len(suite.compressors) * 2 * len(suite.sizes)
    monkeypatch.delenv("HOCKET_CELLS")
    chosen = {(test, *map(repr, pair)) for test in tests for pair in suite._pairs(test)}
    assert len(chosen) < 0.4 * len(product)
    for left_out in range(3):
        two = [{each[:left_out] + each[left_out + 1 :] for each in cases} for cases in (chosen, product)]
        assert two[0] == two[1]


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (InDoubles(0.5), r"a payload of \d+ float64, \d+ bytes, but footprint says message_bytes="),
        (AsTensor(0.5), "a payload of torch.Tensor, not a NumPy array"),
        (Silent(0.5), "None, not a Message"),
    ],
    ids=lambda value: None if isinstance(value, str) else type(value).__name__,
)
def test_a_message_that_cannot_travel_ends_the_first_round(
    bad: Compressor, told: str, feedback: bool
) -> None:
    def train() -> None:
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        compressor = ErrorFeedback(bad) if feedback else bad
        strategy = hocket.Strategy(gradients=(hocket.Exchange("allreduce", compressor=compressor),))
        with hocket.attach(model, optimizer, strategy):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()

    where = (
        rf"gradients\.0\[0\]: compressor .*{type(bad).__name__} in round 0: compress returned {told}.*Run its"
    )
    with pytest.raises(UserError, match=where):
        hocket.virtual(2).run(train)
