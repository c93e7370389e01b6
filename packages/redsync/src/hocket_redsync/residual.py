"""Residual gradient compression: the common part of all compressors of RedSync.

For each parameter: V <- V + G, with momentum correction V <- V + u; send some elements of V, and set V (and u, with
factor masking) to 0 where they were sent. One pass over memory does the sum, the update of u and the search for large
elements; see `hocket_redsync.selection` for the search, and `hocket_redsync.kernels` for the pass.

Source: Fang et al., "RedSync", algorithm 1 and sections 2.1 and 2.4; momentum correction and factor masking are those
of Y. Lin et al., "Deep Gradient Compression", ICLR 2018, sections 3.1 and 3.2.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from hocket.api import (
    Compressor,
    CompressorTraits,
    Footprint,
    Message,
    SegmentShape,
    SparseValues,
    count_of,
)
from hocket.errors import HocketError
from hocket_redsync.message import (
    Content,
    MessageForm,
    add_packed,
    clear_packed,
    content_bytes,
    message_bytes,
    pack,
    read_packed,
)
from hocket_redsync.part import NO_INDICES, Part, accelerate, nonfinite_of, values_of
from hocket_redsync.selection import Method, Selected
from hocket_redsync.sending import Sending
from hocket_redsync.state import ResidualState

if TYPE_CHECKING:
    from torch import Tensor

    from hocket.api import Array, ParameterSpan, Segment

_BYTES_PER_KB = 1 << 10


@dataclass(frozen=True)
class ResidualCompressor(Compressor):
    """Base of the compressors that keep unsent values; a subclass chooses each parameter's way of sending.

    Nothing is lost: V before + G = V after + the sent values, bit for bit unless values are quantised. A round with
    NaN or Inf in G sends these alone, and leaves the state as it was. Memory: a copy of the segment's data, another
    one with momentum correction.

    Attributes:
        density: the share of a parameter's elements to send, above 0 and at most 1: about k = density * numel, at
            least one. If k elements with their indices take more bytes than all elements, all are sent.
        dense_below_kb: the size in KiB below which a parameter is sent whole.
        correct_momentum: true: apply the momentum and weight decay of torch's SGD before sending, so that values sent
            late carry their momentum. The compressor `momentum_correction` around `error_feedback` does the same, but
            reads and writes memory three times as often. false: the optimizer applies both. Hooks of
            DistributedDataParallel, and optimizers other than torch's SGD, need false.
        masking: whether the velocity of the elements that were selected and sent is set to zero.

    Raises:
        ValueError: a field is not in its range.
    """

    density: float = 0.001
    dense_below_kb: float = 128.0
    correct_momentum: bool = True
    masking: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ValueError(f"density must be above 0 and at most 1, not {self.density}")
        if not self.dense_below_kb >= 0:
            raise ValueError(f"dense_below_kb must be at least 0, not {self.dense_below_kb}")

    @abstractmethod
    def method_of(self, span: ParameterSpan, nbytes: int) -> Method:
        """Return the method for the communication-set of a parameter of `nbytes`, at least `dense_below_kb`."""

    def quantises(self, shape: SegmentShape, span: ParameterSpan) -> bool:
        """Return whether a parameter's values travel as their mean."""
        return False

    @property
    def traits(self) -> CompressorTraits:
        terms = {"momentum", "weight_decay"} if self.correct_momentum else ()
        return CompressorTraits(
            reducible=False,
            equal_sizes=False,
            applies_optimizer_terms=frozenset(terms),
            same_coordinates=False,
            keeps_residual=True,
            selects=True,
            leaves_out=True,
        )

    def without_optimizer_terms(self) -> ResidualCompressor:
        return replace(self, correct_momentum=False)

    def sendings(self, shape: SegmentShape) -> list[Sending]:
        """Return the way of sending of each parameter of a segment."""
        return [self._sending(shape, span) for span in shape.spans]

    def _sending(self, shape: SegmentShape, span: ParameterSpan) -> Sending:
        itemsize = shape.dtype.itemsize
        nbytes = span.numel * itemsize
        k = count_of(self.density, span.numel)
        if nbytes < self.dense_below_kb * _BYTES_PER_KB or k == 0:
            return Sending(Method.DENSE, k, MessageForm.DENSE)
        method = self.method_of(span, nbytes)
        if method is Method.DENSE:
            return Sending(method, k, MessageForm.DENSE)
        form = MessageForm.MEAN if self.quantises(shape, span) else MessageForm.SPARSE
        if form is MessageForm.SPARSE and content_bytes(form, k, itemsize) >= nbytes:
            form = MessageForm.DENSE
        return Sending(method, k, form)

    def init(self, segment: Segment) -> ResidualState:
        return ResidualState(segment, self.sendings(segment), corrects_momentum=self.correct_momentum)

    def compress(self, segment: Segment, state: ResidualState, round: int) -> Message:
        """Return each parameter's communication-set.

        Raises:
            HocketError: momentum is to be corrected, and `State.take` was not called before.
        """
        if self.correct_momentum and len(state.terms) != len(segment.spans):
            raise HocketError(
                f"{segment.name}: compress was called before State.take, so the optimizer's momentum is not known: the "
                "collective must call State.take first"
            )
        finite = segment.finite
        if finite is None:
            finite = state.kernels.is_finite(segment.outgoing[: segment.numel])
        if finite:
            contents = self._contents(segment, state, round)
        else:
            contents = nonfinite_of(segment, state.sendings, state.elsewhere)
        return Message(pack(segment, contents), segment, round)

    def _contents(self, segment: Segment, state: ResidualState, round: int) -> dict[int, Content]:
        """Accumulate, select and clear; return what parameters send, by their positions."""
        kernels = state.kernels
        contents: dict[int, Content] = {}
        accelerate(state, segment)
        parts = [
            Part(position, sending, state.memories[position], round)
            for position, sending in enumerate(state.sendings)
            if position not in state.elsewhere
        ]
        founds = kernels.collect([part.advance(state) for part in parts])
        dense = iter(values_of([part.memory.residual for part in parts if part.is_whole]))
        for part, found in zip(parts, founds, strict=True):
            if part.is_whole:
                contents[part.position] = part.send_all(next(dense), masking=self.masking)
            else:
                selected = part.select(state, found)
                contents[part.position] = self._content(state, part.sending, selected)
        sent = np.concatenate([NO_INDICES, *(content.indices for content in contents.values())])
        self._clear(state, contents.values(), sent)
        if self.masking and state.momentum is not None:
            state.note_cleared(sent)
            kernels.clear(state.momentum, sent)
        return contents

    def _content(self, state: ResidualState, sending: Sending, selected: Selected) -> Content:
        count, values = len(selected.indices), selected.values
        if sending.form is MessageForm.MEAN:
            values = np.array([values.mean(dtype=np.float64) if count else 0.0], dtype=values.dtype)
        return Content(sending.form, count, values, selected.indices)

    def _clear(self, state: ResidualState, contents: Iterable[Content], sent: Array) -> None:
        """Take the sent values out of the residual: as in algorithm 1, all that were selected."""
        state.kernels.clear(state.residual, sent)

    def accumulate(self, message: Message, weight: float, out: Tensor) -> None:
        add_packed(message, weight, out)

    def clear_sent(self, message: Message, out: Tensor) -> None:
        clear_packed(message, out)

    def read(self, message: Message) -> SparseValues:
        return read_packed(message)

    def num_selected(self, shape: SegmentShape) -> float:
        return sum(
            sending.expected_count(span.numel)
            for sending, span in zip(self.sendings(shape), shape.spans, strict=True)
        )

    def footprint(self, shape: SegmentShape) -> Footprint:
        pairs = list(zip(self.sendings(shape), shape.spans, strict=True))
        copies = 2 if self.correct_momentum else 1
        return Footprint(
            float(_message_bytes(shape, [(s, s.expected_count(span.numel)) for s, span in pairs])),
            _message_bytes(shape, [(s, s.most(span.numel)) for s, span in pairs]),
            copies * shape.numel * shape.dtype.itemsize + 3 * 8 * len(shape.spans),
        )


def _message_bytes(shape: SegmentShape, counts: Sequence[tuple[Sending, float]]) -> int:
    """Return the bytes of a message with the given count of elements for each parameter."""
    itemsize = shape.dtype.itemsize
    return message_bytes(shape, sum(content_bytes(s.form, count, itemsize) for s, count in counts))
