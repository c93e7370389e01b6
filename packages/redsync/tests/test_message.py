"""Packed messages: what is read is what was written, in any mixture of forms, and damaged ones are refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hocket.compressor import Message
from hocket.segment.segment import Segment
from hocket.testing.compressor import make_segment
from hocket_redsync.message import (
    Content,
    MessageForm,
    add_packed,
    clear_packed,
    content_bytes,
    message_bytes,
    pack,
)


def contents_of(segment: Segment, forms: list[MessageForm], rng: np.random.Generator) -> list[Content]:
    dtype = segment.outgoing_array.dtype
    contents = []
    for span, form in zip(segment.spans, forms, strict=True):
        count = span.numel if form is MessageForm.DENSE else int(rng.integers(0, span.numel + 1))
        indices = (span.start + rng.permutation(span.numel)[:count]).astype(np.int32)
        values = rng.normal(size=1 if form is MessageForm.MEAN else count).astype(dtype)
        contents.append(Content(form, count, values, indices[: 0 if form is MessageForm.DENSE else count]))
    return contents


@given(
    st.lists(st.tuples(st.integers(0, 60), st.sampled_from(MessageForm)), min_size=1, max_size=6),
    st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from([0, 3]),
    st.integers(0, 64),
    st.integers(0, 2**16),
)
def test_what_is_added_is_what_was_packed(
    parameters: list[tuple[int, MessageForm]],
    dtype: torch.dtype,
    trailer_numel: int,
    trailing: int,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    segment = make_segment([size for size, _ in parameters], dtype, trailer_numel)
    segment.outgoing_trailer[:] = rng.normal(size=trailer_numel)
    contents = contents_of(segment, [form for _, form in parameters], rng)
    payload = pack(segment, dict(enumerate(contents)))
    itemsize = dtype.itemsize
    assert payload.nbytes == message_bytes(
        segment, sum(content_bytes(c.form, c.count, itemsize) for c in contents)
    )

    expected = np.zeros(segment.outgoing.numel(), dtype=segment.outgoing_array.dtype)
    for span, content in zip(segment.spans, contents, strict=True):
        places = slice(span.start, span.stop) if content.form is MessageForm.DENSE else content.indices
        expected[places] = content.values if content.count else 0
    expected[segment.numel :] = segment.outgoing_trailer

    message = Message(np.concatenate([payload, np.full(trailing, 255, np.uint8)]), segment, 0)
    out = torch.zeros_like(segment.outgoing)
    add_packed(message, 1.0, out)
    np.testing.assert_array_equal(out.numpy(), expected)
    add_packed(message, -0.5, out)
    np.testing.assert_allclose(out.numpy(), expected / 2, rtol=1e-6)

    ones = torch.ones_like(segment.outgoing)[: segment.numel]
    clear_packed(message, ones)
    cleared = np.zeros(segment.numel, dtype=bool)
    for span, content in zip(segment.spans, contents, strict=True):
        cleared[slice(span.start, span.stop) if content.form is MessageForm.DENSE else content.indices] = True
    np.testing.assert_array_equal(ones.numpy() == 0, cleared)


@pytest.fixture
def message() -> Message:
    segment = make_segment([20, 12], trailer_numel=2)
    forms = [MessageForm.SPARSE, MessageForm.DENSE]
    return Message(
        pack(segment, dict(enumerate(contents_of(segment, forms, np.random.default_rng(4))))), segment, 0
    )


@pytest.mark.parametrize("length", [0, 8, 40])
def test_a_message_that_is_too_short_is_refused(message: Message, length: int) -> None:
    short = Message(message.payload[:length], message.segment, 0)
    with pytest.raises(ValueError, match=r"for gradients\.0\[0\] has \d+ bytes instead of \d+"):
        add_packed(short, 1.0, torch.zeros_like(message.segment.outgoing))


@pytest.mark.parametrize(("place", "value"), [(0, 21), (0, -1), (1, 7), (2, 11)])
def test_a_header_of_another_segment_is_refused(message: Message, place: int, value: int) -> None:
    message.payload.view(np.int32)[place] = value
    with pytest.raises(ValueError, match="it announces"):
        add_packed(message, 1.0, torch.zeros_like(message.segment.outgoing))


def test_an_index_beyond_the_segment_is_refused(message: Message) -> None:
    count = int(message.payload.view(np.int32)[0])
    assert count > 0
    start = 16 + 2 * 4 + (count + 12) * 4
    message.payload[start : start + 4].view(np.int32)[0] = 1 << 20
    with pytest.raises(IndexError, match="beyond its segment"):
        add_packed(message, 1.0, torch.zeros_like(message.segment.outgoing))
