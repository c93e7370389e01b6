"""The message of a segment, one buffer: each parameter's number of elements and form, then all elements.

    bytes        content
    8 * t        for each of t parameters: its number of elements, int32, and their form, int32
    c * b        the trailer, in the segment's dtype
    v * b        values: those of the sparse parameters, then a mean for each quantised one, then the dense ones'
    i * 4        places in the segment, int32: those of the sparse parameters' values, then of the quantised ones'
    0 to 7       up to a multiple of 8

c is the trailer's length, b the bytes of the segment's dtype. A dense parameter sends all its values and no places,
a quantised one places and one value. Numbers are in the machine's own byte order. The buffer holds its own length, so
it may be received into a longer one.

Source: Fang et al., "RedSync", section 2.3 (length, indices and values in one message) and 2.2 (quantised).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from hocket.api import Array, Message, SegmentShape, SparseValues

if TYPE_CHECKING:
    from torch import Tensor

    from hocket.api import ParameterSpan, Segment

_HEADER_BYTES = 8
_INDEX_BYTES = 4


class MessageForm(IntEnum):
    """The form in which a parameter's elements travel."""

    SPARSE = 0
    MEAN = 1
    DENSE = 2


#: As plain numbers, which compare faster.
_FORMS = tuple(map(int, MessageForm))
_DENSE = int(MessageForm.DENSE)


@dataclass(frozen=True, eq=False)
class Content:
    """The elements that a parameter sends.

    Attributes:
        form: their form.
        count: their number.
        values: [count] of the segment's dtype; [1] for `MEAN`, the same for all.
        indices: [count], int32, places in the segment, each once; empty for `DENSE`.
    """

    form: MessageForm
    count: int
    values: Array
    indices: Array


@dataclass(frozen=True, eq=False)
class _Parts:
    """A message, read: views of its payload.

    Attributes:
        counts, forms: the number of elements of each parameter, and their form.
        trailer: [trailer_numel].
        values, means, dense: in the order of the parameters.
        indices: those of `values`.
        mean_indices: those of elements with a mean.
    """

    counts: list[int]
    forms: list[int]
    trailer: Array
    values: Array
    means: Array
    dense: Array
    indices: Array
    mean_indices: Array

    def counts_of(self, form: MessageForm) -> Array:
        """Return the number of elements that each parameter of a form sends, int64."""
        return np.array(_counts_of(self.counts, self.forms, int(form)), np.int64)

    def dense_spans(self, segment: Segment) -> list[ParameterSpan]:
        """Return the spans of the parameters that send all their values."""
        return [span for span, form in zip(segment.spans, self.forms, strict=True) if form == _DENSE]


def _counts_of(counts: Sequence[int], forms: Sequence[int], form: int) -> list[int]:
    return [count for count, its in zip(counts, forms, strict=True) if its == form]


def content_bytes(form: MessageForm, count: float, itemsize: int) -> float:
    """Return the bytes of `count` elements of one parameter in a message."""
    match form:
        case MessageForm.DENSE:
            return count * itemsize
        case MessageForm.MEAN:
            return count * _INDEX_BYTES + itemsize
        case MessageForm.SPARSE:
            return count * (itemsize + _INDEX_BYTES)


def message_bytes(shape: SegmentShape, contents_bytes: float) -> int:
    """Return the bytes of a segment's message whose parameters' elements take `contents_bytes`."""
    nbytes = _HEADER_BYTES * len(shape.spans) + shape.trailer_bytes + contents_bytes
    return int(-(-nbytes // 8) * 8)


def pack(segment: Segment, contents: Mapping[int, Content]) -> Array:
    """Return a payload, uint8, with the segment's outgoing trailer.

    Args:
        contents: what parameters send, by their positions, in order; others send nothing.
    """
    dtype = segment.outgoing_array.dtype
    of_form = {form: [each for each in contents.values() if each.form is form] for form in MessageForm}
    with_indices = of_form[MessageForm.SPARSE] + of_form[MessageForm.MEAN]
    header = np.zeros((len(segment.spans), 2), np.int32)  # sparse, and nothing
    if contents:
        header[list(contents)] = [(content.count, content.form) for content in contents.values()]
    pieces = [
        header,
        segment.outgoing_trailer,
        *(content.values for form in MessageForm for content in of_form[form]),
        *(content.indices for content in with_indices),
    ]
    payload = np.zeros(
        message_bytes(
            segment, sum(content_bytes(c.form, c.count, dtype.itemsize) for c in contents.values())
        ),
        np.uint8,
    )
    start = 0
    for piece in pieces:
        payload[start : start + piece.nbytes] = np.ascontiguousarray(piece).reshape(-1).view(np.uint8)
        start += piece.nbytes
    return payload


def unpack(message: Message) -> _Parts:
    """Return the parts of a message; its payload may be followed by other bytes.

    Raises:
        ValueError: the payload is shorter than it says, or not of this segment.
    """
    segment, payload = message.segment, message.payload.view(np.uint8)
    dtype = segment.outgoing_array.dtype
    start = _HEADER_BYTES * len(segment.spans)
    _check(message, start)
    # Plain numbers: they are few, and a message comes from every other rank.
    header = payload[:start].view(np.int32).tolist()
    counts, forms = header[::2], header[1::2]
    for span, count, form in zip(segment.spans, counts, forms, strict=True):
        least = span.numel if form == _DENSE else 0
        if form not in _FORMS or not least <= count <= span.numel:
            raise ValueError(
                f"a message for {segment.name} is damaged or from another version: it announces {counts} elements "
                f"for parameters of {[span.numel for span in segment.spans]}. Check that all ranks run the same "
                "hocket-redsync"
            )
    sparse, means, dense = (_counts_of(counts, forms, form) for form in _FORMS)
    num_sparse, num_mean = sum(sparse), sum(means)
    lengths = [
        (segment.trailer_numel, dtype),
        (num_sparse, dtype),
        (len(means), dtype),
        (sum(dense), dtype),
        (num_sparse, np.dtype(np.int32)),
        (num_mean, np.dtype(np.int32)),
    ]
    _check(message, start + sum(length * its.itemsize for length, its in lengths))
    parts = []
    for length, its in lengths:
        stop = start + length * its.itemsize
        parts.append(payload[start:stop].view(its))
        start = stop
    return _Parts(counts, forms, *parts)


def _check(message: Message, needed: int) -> None:
    given = message.payload.nbytes
    if given < needed:
        raise ValueError(
            f"a message for {message.segment.name} has {given} bytes instead of {needed}, so it is damaged or from "
            "another version: check that all ranks run the same hocket-redsync"
        )


def add_packed(message: Message, weight: float, out: Tensor) -> None:
    """Add weight * message to `out`, [numel + trailer_numel], for `Compressor.accumulate`.

    Raises:
        ValueError: the message is not of this segment.
        IndexError: an index beyond the segment.
    """
    parts, segment = unpack(message), message.segment
    spans = parts.dense_spans(segment)
    if out.device.type == "cpu":
        _add_on_cpu(parts, [span.start for span in spans], weight, out.detach().numpy(), segment.numel)
        return
    import torch

    device, numel = out.device, segment.numel
    values, means, dense, indices, mean_indices = (
        torch.from_numpy(part).to(device)
        for part in (parts.values, parts.means, parts.dense, parts.indices, parts.mean_indices)
    )
    out[:numel].index_add_(0, indices, values, alpha=weight)
    repeats = torch.from_numpy(parts.counts_of(MessageForm.MEAN)).to(device)
    out[:numel].index_add_(
        0, mean_indices, means.repeat_interleave(repeats, output_size=len(mean_indices)), alpha=weight
    )
    first = 0
    for span in spans:
        out[span.start : span.stop].add_(dense[first : first + span.numel], alpha=weight)
        first += span.numel
    out[numel:].add_(torch.from_numpy(parts.trailer).to(device), alpha=weight)


def _add_on_cpu(parts: _Parts, starts: list[int], weight: float, out: Array, numel: int) -> None:
    from hocket_redsync.kernels.cpu import add_message

    add_message(
        out[:numel],
        weight,
        (np.array(starts, np.int64), parts.counts_of(MessageForm.DENSE), parts.counts_of(MessageForm.MEAN)),
        (parts.values, parts.means, parts.dense),
        (parts.indices, parts.mean_indices),
    )
    out[numel:] += out.dtype.type(weight) * parts.trailer


def read_packed(message: Message) -> SparseValues:
    """Return all elements of a message without means, for `Compressor.read`.

    Raises:
        ValueError: the message is not of this segment.
    """
    parts = unpack(message)
    dense = [np.arange(span.start, span.stop, dtype=np.int32) for span in parts.dense_spans(message.segment)]
    if not dense:
        return SparseValues(parts.trailer, parts.values, parts.indices)
    return SparseValues(
        parts.trailer,
        np.concatenate([parts.values, parts.dense]),
        np.concatenate([parts.indices, *dense]),
    )


def clear_packed(message: Message, out: Tensor) -> None:
    """Set the elements to 0 that a message carries, for `Compressor.clear_sent`."""
    import torch

    parts = unpack(message)
    for indices in (parts.indices, parts.mean_indices):
        out.index_fill_(0, torch.from_numpy(indices).to(out.device).long(), 0)
    for span in parts.dense_spans(message.segment):
        out[span.start : span.stop] = 0
