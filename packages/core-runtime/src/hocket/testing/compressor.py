"""The contract of `hocket.compressor.api` as tests, and segments to try a compressor on.

A compressor's tests are a subclass of `CompressorConformance` with one line:

    class TestTopK(CompressorConformance):
        compressors = (TopK(0.1), TopK(1.0))
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor

from hocket.compressor.api import Compressor, Message, State
from hocket.compressor.checked import payload_fault
from hocket.compressor.optimizer_terms import OptimizerTerms
from hocket.errors import NonFiniteError, some
from hocket.segment.partition import Model, named_spans, partition
from hocket.segment.segment import Segment, view_of

if TYPE_CHECKING:
    import pytest

__all__ = ["CompressorConformance", "dense", "fill", "make_segment", "run_round"]


def make_segment(
    sizes: Sequence[int],
    dtype: torch.dtype = torch.float32,
    trailer_numel: int = 0,
    index: int = 0,
    device: str = "cpu",
) -> Segment:
    """Return a segment of flat parameters, all zero.

    Args:
        sizes: elements of each parameter.
        dtype: float32 or float64.
        trailer_numel: the trailer's length.
        index: the segment's number.
        device: the buffers' device.
    """
    parameters = [(f"p{i}", torch.zeros(size, dtype=dtype, device=device)) for i, size in enumerate(sizes)]
    spans = partition(named_spans(parameters), Model())[0]
    numel = spans[-1].start + spans[-1].padded_numel + trailer_numel
    outgoing, incoming = (torch.zeros(numel, dtype=dtype, device=device) for _ in range(2))
    return Segment(f"gradients.0[{index}]", index, spans, outgoing, incoming)


def fill(segment: Segment, seed: int) -> None:
    """Fill a segment's contribution and trailer, but not its padding, with normally distributed values.

    Args:
        segment: its `outgoing` and outgoing trailer are written.
        seed: the same seed gives the same values.
    """
    generator = torch.Generator().manual_seed(seed)
    for span in segment.spans:
        view_of(segment.outgoing, span).copy_(torch.randn(span.shape, generator=generator))
    segment.outgoing_trailer[:] = torch.randn(segment.trailer_numel, generator=generator).numpy()


def run_round(compressor: Compressor, segment: Segment, state: State, round: int, size: int = 1) -> Message:
    """Compress `outgoing` as a session does, with momentum 0.9 and weight decay 0.1 if they are taken over.

    Args:
        compressor: the compressor to test.
        segment: the segment, whose `outgoing` is the contribution.
        state: the compressor's state of the segment.
        round: the exchange's counter.
        size: the number of ranks that contribute; contributions are already divided by it.

    Returns:
        The last message; of a compressor that answers to sums, as if this rank were alone.

    Raises:
        AssertionError: a message has a form that cannot travel.
    """
    if compressor.traits.applies_optimizer_terms:
        terms = [
            OptimizerTerms(torch.ones(span.shape, device=span.device), 0.9, 0.1) for span in segment.spans
        ]
        state.take(terms, 1 / size)
    if compressor.traits.prepares:
        compressor.prepare([segment], round, size, 1 / size)
    segment.stage_out()
    message = compressor.compress(segment, state, round)
    _check_form(compressor, message, segment)
    if compressor.traits.answers:
        while (following := compressor.answer(message, segment, state)) is not None:
            message = following
            _check_form(compressor, message, segment)
    return message


def _check_form(compressor: Compressor, message: Message, segment: Segment) -> None:
    fault = payload_fault(compressor, message, segment)
    assert fault is None, f"compress returned {fault}"


def dense(compressor: Compressor, message: Message) -> Tensor:
    """Return a message's content as values.

    Args:
        compressor: the compressor of the message.
        message: the message, as `run_round` returns it.

    Returns:
        [numel + trailer_numel] like the segment's buffers, the trailer last.
    """
    out = accumulated(compressor, message)
    compressor.to_values(message.segment, out[: message.segment.numel])
    return out


def accumulated(compressor: Compressor, message: Message) -> Tensor:
    """Return a message in its own basis, [numel + trailer_numel]."""
    out = torch.zeros_like(message.segment.outgoing)
    compressor.accumulate(message, 1.0, out)
    return out


def carried(compressor: Compressor, message: Message) -> Tensor:
    """Return the elements to which `accumulate` adds something, be it 0, as bool [numel]."""
    marks = torch.zeros_like(message.segment.outgoing)
    compressor.accumulate(message, math.nan, marks)  # NaN times anything is NaN
    return marks[: message.segment.numel].isnan()


def padding_of(segment: Segment) -> Tensor:
    """Return the elements of a segment that belong to no parameter, as bool [numel]."""
    padding = torch.ones(segment.numel, dtype=torch.bool, device=segment.outgoing.device)
    for span in segment.spans:
        padding[span.start : span.stop] = False
    return padding


def _because(what: str) -> Callable[[str], str]:
    """Return a function that puts `what` before the numbers of a comparison."""
    return lambda numbers: f"{what}: {numbers}"


def _places(mask: Tensor) -> str:
    """Return the places where a mask, bool [numel], is set, in words."""
    found = mask.nonzero().flatten().tolist()
    return f"{len(found)} of {len(mask)} elements ({some([str(place) for place in found])})"


class CompressorConformance:
    """The conformance tests of compressors, for subclasses named `Test...` that list them.

    The segments have 0, 1, 7 and 1000 elements in two parameters: of float32 with a trailer, of float64 without. Every
    test runs for every compressor with the largest segment of float32, and for every segment with one of the
    compressors, in turn; with HOCKET_CELLS=all in the environment for every compressor with every segment.

    Attributes:
        compressors: the compressors to test, with different fields.
        relative_error: the largest relative error of a received value, if all values are sent and none is corrected;
            None for other compressors.
        rounding: the largest difference of V before + G from V after + what was sent, if something is kept; 0 for none.
        device: the segments' device.
    """

    compressors: ClassVar[tuple[Compressor, ...]]
    relative_error: ClassVar[float | None] = None
    rounding: ClassVar[float] = 0.0
    device: ClassVar[str] = "cpu"

    sizes: ClassVar[tuple[int, ...]] = (0, 1, 7, 1000)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "segment" not in metafunc.fixturenames:
            if "compressor" in metafunc.fixturenames:
                metafunc.parametrize("compressor", self.compressors, ids=repr)
            return
        pairs = self._pairs(metafunc.function.__name__)
        names = [f"{compressor!r}-{_name(segment)}" for compressor, segment in pairs]
        metafunc.parametrize(("compressor", "segment"), pairs, ids=names)

    def _pairs(self, test: str) -> list[tuple[Compressor, Segment]]:
        """Return the compressors and segments with which a test runs: see the class."""
        segments = [
            make_segment([size - size // 3, size // 3], dtype, trailer_numel, size % 5, self.device)
            for size in self.sizes
            for dtype, trailer_numel in ((torch.float32, 3), (torch.float64, 0))
        ]
        turn = sorted(name for name in dir(self) if name.startswith("test_")).index(test)
        count, largest = len(self.compressors), len(segments) - 2
        return [
            (compressor, segment)
            for i, compressor in enumerate(self.compressors)
            for j, segment in enumerate(segments)
            if j == largest or (turn + j) % count == i or os.environ.get("HOCKET_CELLS") == "all"
        ]

    def test_payload_is_a_flat_array_of_the_size_that_was_said(
        self, compressor: Compressor, segment: Segment
    ) -> None:
        state = compressor.init(segment)
        for round in range(3):
            fill(segment, round)
            run_round(compressor, segment, state, round)  # looks at it

    def test_what_travels_is_all_that_is_needed(self, compressor: Compressor, segment: Segment) -> None:
        """Another rank, with a segment of its own, reads the same from the bytes."""
        fill(segment, 0)
        message = run_round(compressor, segment, compressor.init(segment), 5)
        own = make_segment(
            [span.numel for span in segment.spans],
            segment.outgoing.dtype,
            segment.trailer_numel,
            segment.index,
            self.device,
        )
        received = Message(message.payload.copy(), own, 5, message.known)
        expected, read = dense(compressor, message), dense(compressor, received)
        assert torch.equal(read, expected), (
            f"another rank reads {_places(read != expected)} differently from the same bytes: what accumulate needs "
            "beside them must follow from segment and round"
        )

    def test_values_arrive(self, compressor: Compressor, segment: Segment) -> None:
        if self.relative_error is None:
            return
        fill(segment, 0)
        sent = segment.outgoing[: segment.numel].clone()
        arrived = dense(compressor, run_round(compressor, segment, compressor.init(segment), 0))
        torch.testing.assert_close(arrived[: segment.numel], sent, rtol=self.relative_error, atol=1e-7)

    def test_trailer_arrives_as_it_is(self, compressor: Compressor, segment: Segment) -> None:
        state = compressor.init(segment)
        for round in range(3):
            fill(segment, round)
            arrived = dense(compressor, run_round(compressor, segment, state, round))
            np.testing.assert_array_equal(
                arrived[segment.numel :].cpu(),
                segment.outgoing_trailer,
                err_msg=f"round {round}: the trailer is not added as it was sent, times the weight",
            )

    def test_accumulate_adds_a_multiple(self, compressor: Compressor, segment: Segment) -> None:
        fill(segment, 0)
        message = run_round(compressor, segment, compressor.init(segment), 0)
        once = accumulated(compressor, message)
        for weight in (1.0, -1.0, 0.25, 1 / 3, 0.0):
            before = torch.linspace(-1, 1, len(once), dtype=once.dtype, device=once.device)
            out = before.clone()
            compressor.accumulate(message, weight, out)
            torch.testing.assert_close(
                out,
                before + weight * once,
                rtol=1e-6,
                atol=1e-6,
                msg=_because(f"accumulate with weight {weight:g} is not out += weight * message"),
            )

    def test_outgoing_stays_as_it_is(self, compressor: Compressor, segment: Segment) -> None:
        if compressor.traits.applies_optimizer_terms or compressor.traits.prepares:
            return
        state = compressor.init(segment)
        for round in range(2):
            fill(segment, round)
            before = segment.outgoing.clone()
            message = run_round(compressor, segment, state, round)
            dense(compressor, message)
            assert torch.equal(segment.outgoing, before), (
                f"round {round}: {_places(segment.outgoing != before)} of outgoing have changed; only a compressor "
                "with applies_optimizer_terms or prepares may write there"
            )

    def test_what_prepares_says_so(self, compressor: Compressor, segment: Segment) -> None:
        if not compressor.traits.prepares:
            fill(segment, 0)
            before = segment.outgoing.clone()
            compressor.prepare([segment], 0, 2, 0.5)
            assert torch.equal(segment.outgoing, before), (
                f"prepare has changed {_places(segment.outgoing != before)} of outgoing: declare prepares=True"
            )

    def test_messages_of_two_segments_are_apart(self, compressor: Compressor) -> None:
        first, second = (make_segment([50], index=index, device=self.device) for index in range(2))
        states = [compressor.init(first), compressor.init(second)]
        fill(first, 1)
        message = run_round(compressor, first, states[0], 0)
        before = message.payload.copy()
        fill(second, 2)
        run_round(compressor, second, states[1], 0)
        np.testing.assert_array_equal(
            message.payload,
            before,
            err_msg="segment 0's message changed when segment 1 was compressed: give each its own memory",
        )

    def test_deterministic(self, compressor: Compressor, segment: Segment) -> None:
        first, second = (self._payloads(compressor, segment, range(3)) for _ in range(2))
        for round in range(3):
            assert first[round] == second[round], (
                f"round {round}: the same contributions, from a new state, give another message: draw by "
                "hocket.api.draws, from seed, round and segment.index"
            )

    def test_state_goes_on_where_it_was_saved(self, compressor: Compressor, segment: Segment) -> None:
        state = compressor.init(segment)
        self._payloads(compressor, segment, range(3), state)
        saved = state.state_dict()
        expected = self._payloads(compressor, segment, range(3, 6), state)
        resumed = compressor.init(segment)
        resumed.load_state_dict(saved)
        for round, payload in enumerate(self._payloads(compressor, segment, range(3, 6), resumed)):
            assert payload == expected[round], (
                f"round {round + 3}: a state that was saved after round 2 and loaded gives another message: "
                f"tensors() has {sorted(saved) or 'nothing'}, and must have all that the state remembers"
            )

    def test_state_of_another_segment_is_refused(self, compressor: Compressor) -> None:
        state = compressor.init(make_segment([40], device=self.device))
        saved = state.state_dict()
        other = compressor.init(make_segment([60], device=self.device))
        refused = False
        try:
            other.load_state_dict(saved)
        except ValueError:
            refused = True
        assert refused == bool(saved), (
            f"load_state_dict {'refused' if refused else 'took'} the state of another segment, {sorted(saved)}"
        )

    def test_nothing_is_lost_where_something_is_kept(self, compressor: Compressor, segment: Segment) -> None:
        """V before + G = V after + sent; G is what `outgoing` holds once terms are applied."""
        state = compressor.init(segment)
        if state.residual is None:
            return
        numel = segment.numel
        for round in range(4):
            fill(segment, round)
            before = state.residual.clone()
            compressor.to_values(segment, before)
            message = run_round(compressor, segment, state, round)
            sent, kept = dense(compressor, message)[:numel], state.residual.clone()
            compressor.to_values(segment, kept)
            given, found = before + segment.outgoing[:numel], kept + sent
            torch.testing.assert_close(
                found,
                given,
                rtol=self.rounding,
                atol=self.rounding,
                msg=_because(f"round {round}: residual before + outgoing is not residual after + sent"),
            )

    def test_nothing_but_zeros_stays_in_padding(self, compressor: Compressor, segment: Segment) -> None:
        state = compressor.init(segment)
        padding = padding_of(segment)
        for round in range(3):
            fill(segment, round)
            arrived = dense(compressor, run_round(compressor, segment, state, round))[: segment.numel]
            assert not arrived[padding].any(), (
                f"round {round}: something arrives at {_places((arrived != 0) & padding)}, between parameters"
            )

    def test_clear_sent_clears_what_arrives(self, compressor: Compressor, segment: Segment) -> None:
        """Exactly what the message carries: allreduce of parameters keeps the rest, momentum correction masks by it."""
        fill(segment, 0)
        message = run_round(compressor, segment, compressor.init(segment), 0)
        arrived = accumulated(compressor, message)[: segment.numel]
        out = torch.ones_like(arrived)
        compressor.clear_sent(message, out)
        kept = (arrived != 0) & (out != 0)
        assert not kept.any(), f"{_places(kept)} arrive, and clear_sent does not set them to 0"
        other = (out != 0) & (out != 1)
        assert not other.any(), f"clear_sent has set {_places(other)} to other values than 0"
        if compressor.traits.leaves_out:
            travels = carried(compressor, message)
            if travels.all():  # as a dense tensor, in which what was left out is 0
                travels = arrived != 0
            lost = (out == 0) & ~travels & ~padding_of(segment)
            assert not lost.any(), (
                f"clear_sent sets {_places(lost)} to 0, which the message does not contain: with leaves_out=True "
                "elements that are not sent must stay as they are, so clear only what was sent"
            )

    def test_what_leaves_elements_out_says_so(self, compressor: Compressor, segment: Segment) -> None:
        if compressor.traits.leaves_out:
            return
        fill(segment, 0)
        message = run_round(compressor, segment, compressor.init(segment), 0)
        missing = ~carried(compressor, message) & ~padding_of(segment)
        assert not missing.any(), f"{_places(missing)} do not travel in the message: declare leaves_out=True"

    def test_nan_and_inf_do_not_enter_the_state(self, compressor: Compressor, segment: Segment) -> None:
        for bad in (math.nan, math.inf):
            state = compressor.init(segment)
            self._payloads(compressor, segment, range(2), state)
            before = state.state_dict()
            fill(segment, 2)
            segment.outgoing[: segment.numel // 2] = bad
            with contextlib.suppress(NonFiniteError):
                run_round(compressor, segment, state, 2)
            if segment.numel > 0:
                after = state.state_dict()
                for name in before:
                    assert torch.equal(after[name], before[name]), (
                        f"{bad} in outgoing has changed {name} of the state"
                    )

    def test_zeros_and_the_smallest_values_stay_what_they_are(
        self, compressor: Compressor, segment: Segment
    ) -> None:
        """No scale is divided by that is 0, or so small that its inverse is Inf."""
        for smallest in (0.0, 5e-324 if segment.outgoing.dtype == torch.float64 else 1e-45):
            state = compressor.init(segment)
            for round in range(2):
                segment.outgoing.zero_()
                for span in segment.spans:
                    view_of(segment.outgoing, span).fill_(smallest)
                arrived = dense(compressor, run_round(compressor, segment, state, round))[: segment.numel]
                # As much as momentum and weight decay of parameters that are 1 add to a contribution.
                most = 1.0 if compressor.traits.applies_optimizer_terms else 1e-30
                assert bool((arrived.abs() <= most).all()), (
                    f"round {round}: contributions of {smallest} arrive as {arrived.abs().max().item()}"
                )

    def test_sums_of_messages_are_messages(self, compressor: Compressor, segment: Segment) -> None:
        if not compressor.traits.reducible:
            return
        messages = []
        for rank in range(3):
            fill(segment, rank)
            message = run_round(compressor, segment, compressor.init(segment), 7, size=3)
            messages.append(Message(message.payload.copy(), segment, 7, message.known))
        assert compressor.traits.equal_sizes, "messages that are reducible have equal_sizes=True"
        total = Message(
            np.sum([message.payload for message in messages], axis=0), segment, 7, messages[0].known
        )
        each = torch.stack([dense(compressor, message) for message in messages]).sum(0)
        torch.testing.assert_close(
            dense(compressor, total),
            each,
            rtol=1e-6,
            atol=1e-6,
            msg=_because("reducible=True, and the sum of 3 ranks' messages is not the message of their sum"),
        )

    def _payloads(
        self, compressor: Compressor, segment: Segment, rounds: Sequence[int], state: State | None = None
    ) -> list[bytes]:
        """Compress the same contributions in each call; return the payloads."""
        state = state or compressor.init(segment)
        payloads = []
        for round in rounds:
            fill(segment, round)
            payloads.append(run_round(compressor, segment, state, round).payload.tobytes())
        return payloads


def _name(segment: Segment) -> str:
    size = sum(span.numel for span in segment.spans)
    return f"{size}-{str(segment.outgoing.dtype).removeprefix('torch.')}-{segment.trailer_numel}"
