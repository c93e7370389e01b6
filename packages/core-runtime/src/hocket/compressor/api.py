"""The interface of compressors: the form in which a segment's values travel, and what is remembered between rounds.

Behind a segment's data travels its trailer, a few numbers that must arrive as they were sent: compressors
carry them uncompressed, and remember nothing of them.

The modules of compressors import no torch before one is used, so that composing a strategy needs none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hocket.configured import Configured
from hocket.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from hocket.arrays import Array
    from hocket.compressor.optimizer_terms import OptimizerTerms
    from hocket.segment.partition import Span
    from hocket.segment.segment import Segment

__all__ = [
    "Compressor",
    "CompressorTraits",
    "Footprint",
    "Message",
    "SegmentShape",
    "SparseValues",
    "State",
    "trailer_bytes",
    "count_of",
    "dtype_of",
    "footprint_of",
    "message_of",
    "numel_of",
    "payload_fault",
    "unpadded_numel_of",
    "whole_bytes",
]


class SegmentShape(Protocol):
    """What the size of a message depends on; a `Segment`, or a layout before there is one."""

    @property
    def spans(self) -> tuple[Span, ...]:
        """The parameters and their places."""

    @property
    def trailer_numel(self) -> int:
        """How many numbers travel behind the data."""


@dataclass(frozen=True, eq=False)
class Message:
    """A segment's values as they travel. The receiver makes one of the bytes that came and of what it knows.

    Attributes:
        payload: all that travels: C-contiguous, one axis, in host memory; its dtype and length are the
            compressor's. Valid until the segment changes or is compressed again, of which it may be a view.
        segment: the receiver's own segment of that number; does not travel.
        round: the exchange's counter; does not travel.
        known: what all ranks know of it from the round's earlier messages, as the compressor needs it; does not travel.
    """

    payload: Array
    segment: Segment
    round: int
    known: Any = None


@dataclass(frozen=True, eq=False)
class SparseValues:
    """What a message carries that selects, read; may be views of its payload.

    Attributes:
        trailer: [trailer_numel], of the segment's dtype, in host memory.
        values: [k], of the segment's dtype.
        indices: [k], int32, places in the segment, each at most once.
    """

    trailer: Array
    values: Array
    indices: Array


class State:
    """What one exchange remembers about one segment between rounds; of this class where that is nothing."""

    _looked_at = False  # whether `message_of` has seen a message of it

    @property
    def residual(self) -> Tensor | None:
        """What was not sent yet, [numel] like the segment's data, or None where nothing is kept back.

        Whoever has sent it in another way, as at a change of phase, zeroes it.
        """
        return None

    @property
    def momentum(self) -> Tensor | None:
        """This rank's share of the momentum, [numel] like the segment's data, or None where there is none.

        The sum over ranks of shares of contributions that were scaled to sum to a mean is the buffer that the
        optimizer would hold. To be filled from it before the first round, and handed back after the last.
        """
        return None

    # Empty on purpose: most compressors leave the optimizer alone.
    def take(self, terms: Sequence[OptimizerTerms | None], scale: float) -> None:
        """Learn what the optimizer's step would do with the gradients of this round.

        Args:
            terms: for each of the segment's parameters; None for one that has no gradient on any rank, which is left
                out of this round. One that has none on this rank only goes on with a gradient of 0.
            scale: this rank's share of the mean, by which weight decay is multiplied; over all ranks it sums to 1.
        """

    # Empty on purpose: what is not sent is gone, where nothing is kept.
    def take_back(self, indices: Array, values: Array) -> None:
        """Go on as if some elements of the last message had not been sent: the collective has left them out.

        Args:
            indices: [n], int32, of the message's.
            values: [n], theirs, finite.
        """

    def tensors(self) -> dict[str, Tensor]:
        """Return by name, as they are, the tensors without which a resumed run would differ."""
        return {}

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of `tensors()`; no exchange of the segment may be under way."""
        return {name: tensor.detach().clone() for name, tensor in self.tensors().items()}

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """Continue from what `state_dict` returned.

        Raises:
            ValueError: other names or shapes, as of another compressor or another segment.
        """
        own = self.tensors()
        shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
        given = {name: tuple(tensor.shape) for name, tensor in saved.items()}
        if given != shapes:
            raise ValueError(f"the saved state holds {given}, and this compressor needs {shapes}")
        for name, tensor in own.items():
            tensor.copy_(saved[name])


@dataclass(frozen=True)
class CompressorTraits:
    """What rules, sessions and collectives know of a compressor.

    Attributes:
        reducible: whether messages of several ranks for one segment and round may be summed as they are, in flight.
            If so, payloads are float32 or float64, equally long on every rank, and accumulating their sum is
            accumulating each. If not, each must arrive: it is sparse, or of a type that would be rounded at every
            addition.
        equal_sizes: whether every message of one segment is equally long, in every round and on every rank.
        applies_optimizer_terms: what it applies in the optimizer's place: of "momentum" and "weight_decay".
        same_coordinates: whether in one round all ranks send the same elements, so that mixing them mixes the models.
        keeps_residual: whether what a round does not send stays in the state, to be sent later.
        prepares: whether `prepare` must see all segments before the first is compressed, as local clipping does.
        leaves_out: whether a message leaves elements out.
        selects: whether messages are some of the values, as they are: `read` tells which, `num_selected` how many.
        coarse: whether so little is left of values, a few levels or directions, that differences may travel so, and
            parameters may not.
        transforms: whether messages, and the residual, are of another basis than values are, see `to_values`.
        answers: whether `answer` is called, as what a round sends depends on what came of its first messages.
    """

    reducible: bool
    equal_sizes: bool = True
    applies_optimizer_terms: frozenset[str] = frozenset()
    same_coordinates: bool = True
    keeps_residual: bool = False
    prepares: bool = False
    leaves_out: bool = False
    selects: bool = False
    coarse: bool = False
    transforms: bool = False
    answers: bool = False


@dataclass(frozen=True)
class Footprint:
    """What a segment takes in bytes.

    Attributes:
        message_bytes: its message, trailer included; the mean where sizes differ, and the sum of a round's.
        longest_bytes: the longest message that it can have. One that need not be so long says itself how long it is:
            it may arrive in a buffer of this length, followed by other bytes.
        state_bytes: the memory of its state.
    """

    message_bytes: float
    longest_bytes: int
    state_bytes: int = 0

    @classmethod
    def of(cls, nbytes: int, state_bytes: int = 0) -> Footprint:
        """Return that of messages which all have `nbytes` bytes."""
        return cls(float(nbytes), nbytes, state_bytes)


class Compressor(Configured, ABC):
    """In what form values travel; a frozen dataclass whose fields are its configuration.

    What one exchange remembers about one segment (residuals, momentum, cached thresholds) is the `State` that
    `init` makes and the caller keeps. A compressor that corrects another's error holds that other one in a
    field (see `hocket.compressor.wrappers`).

    In each round the caller calls, in this order: `State.take` for each segment if `applies_optimizer_terms` says so;
    `prepare` once if `prepares` does; `compress` for each segment; `answer` if `answers` does; `accumulate` for each
    message, this rank's own included where it counts, the last of each segment where there are several; `to_values`
    once all are in.
    """

    @property
    @abstractmethod
    def traits(self) -> CompressorTraits:
        """What others know of it."""

    @abstractmethod
    def footprint(self, shape: SegmentShape) -> Footprint:
        """Return what a segment's messages and its state take."""

    def without_optimizer_terms(self) -> Compressor:
        """Return this one without optimizer terms, for other optimizers; itself where it is of no use so."""
        return self

    def init(self, segment: Segment) -> State:
        """Return the state to keep for `segment`.

        Raises:
            ValueError: the segment is of a dtype or size that cannot be carried.
        """
        return State()

    # Empty on purpose: most compressors look at one segment at a time.
    def prepare(self, segments: Sequence[Segment], round: int, size: int, scale: float) -> None:
        """Look at all segments, once per round and before any is compressed; may change their `outgoing`.

        Args:
            segments: all of the exchange.
            round: the exchange's counter.
            size: how many ranks contribute.
            scale: what the gradients in `outgoing` have been multiplied by to become contributions.
        """

    @abstractmethod
    def compress(self, segment: Segment, state: Any, round: int) -> Message:
        """Return what to send of `segment.outgoing` in this round, and update `state` in place.

        Leaves `outgoing` as it is, but for gradients where `applies_optimizer_terms` is not empty. Values that are NaN
        or Inf are sent where they would be, and never enter the state: the step that they spoil can be skipped.

        Args:
            segment: its data is read from `outgoing`, on its device, its trailer from
                `outgoing_trailer`, in host memory; `outgoing_array` has been staged.
            state: the segment's.
            round: the exchange's counter, from 0.

        Raises:
            NonFiniteError: a finite value does not fit the form in which it would travel.
        """

    def answer(self, total: Message, segment: Segment, state: Any) -> Message | None:
        """Return what to send of the segment next, now that the sum of all ranks' messages is in.

        Called for each sum of a round where `answers` says so; collective, as all ranks decide alike.

        Args:
            total: the sum.
            segment, state: as for `compress`.

        Returns:
            None once all has been said: then the last sum is what is accumulated.
        """
        return None

    @abstractmethod
    def accumulate(self, message: Message, weight: float, out: Tensor) -> None:
        """Add a message to `out`: out += weight * message.

        Args:
            message: this rank's or another's, as `compress` made it.
            weight: the message's share in the result.
            out: dense, [numel + trailer_numel], of the segment's wire dtype, on any device; changed in place.
        """

    def read(self, message: Message) -> SparseValues:
        """Return what a message carries, this rank's or another's; only where `selects` says so.

        Raises:
            TypeError: it does not.
        """
        raise TypeError(f"{type(self).__name__}: its messages are not some of the values")

    def num_selected(self, shape: SegmentShape) -> float:
        """Return how many elements a segment's message carries, on average; only where `selects` says so.

        Raises:
            TypeError: it does not.
        """
        raise TypeError(f"{type(self).__name__}: its messages are not some of the values")

    # Empty on purpose: most messages say values.
    def to_values(self, segment: Segment, sums: Tensor) -> None:
        """Turn what a round's messages have added up to into values, in place.

        Args:
            segment: the receiver's, for its parameters' places and shapes.
            sums: [numel] like the segment's data, on any device.
        """

    @abstractmethod
    def clear_sent(self, message: Message, out: Tensor) -> None:
        """Set the elements of `out` to 0 that the message carries, and leave the others.

        Args:
            message: as for `accumulate`.
            out: [numel] like the segment's data, on any device; changed in place.
        """


def message_of(compressor: Compressor, segment: Segment, state: State, round: int) -> Message:
    """Return what `compressor.compress` does; the first message of a state is looked at, as mistakes show in it.

    Raises:
        UserError: the message is none that can travel; names segment, compressor and round.
    """
    message = compressor.compress(segment, state, round)
    if not state._looked_at:
        fault = payload_fault(compressor, message, segment)
        if fault is not None:
            from hocket.plugin import Kind, default_registry

            name = default_registry().name_of(Kind.COMPRESSOR, type(compressor))
            raise UserError(
                f"{segment.name}: compressor {name} in round {round}: compress returned {fault}. "
                "Run its conformance suite, hocket.testing.compressor.CompressorConformance"
            )
        state._looked_at = True
    return message


def payload_fault(compressor: Compressor, message: object, segment: Segment) -> str | None:
    """Return what is wrong with the form of a message of `segment` that `compress` returned; None where nothing is."""
    if not isinstance(message, Message):
        return f"{_kind(message)}, not a Message"
    payload: object = message.payload
    if not isinstance(payload, np.ndarray):
        return f"a payload of {_kind(payload)}, not a NumPy array"
    if payload.ndim != 1 or not payload.flags.c_contiguous:
        return f"a payload of shape {payload.shape} and strides {payload.strides}, not one contiguous axis"
    if compressor.traits.reducible and payload.dtype.name not in ("float32", "float64"):
        return f"a payload of {payload.dtype}, and messages that are reducible are of float32 or float64"
    return _size_fault(compressor, payload, segment)


def _size_fault(compressor: Compressor, payload: Array, segment: Segment) -> str | None:
    traits, footprint = compressor.traits, compressor.footprint(segment)
    if traits.equal_sizes and not traits.answers and payload.nbytes != footprint.message_bytes:
        said = f"message_bytes={footprint.message_bytes:g}"
    elif payload.nbytes > footprint.longest_bytes:
        said = f"longest_bytes={footprint.longest_bytes}"
    else:
        return None
    dtype = str(dtype_of(segment)).removeprefix("torch.")
    return (
        f"a payload of {len(payload)} {payload.dtype}, {payload.nbytes} bytes, and footprint says {said} of this "
        f"segment of {numel_of(segment)} {dtype} and {segment.trailer_numel} in the trailer"
    )


def _kind(value: object) -> str:
    return "None" if value is None else f"{type(value).__module__}.{type(value).__qualname__}"


def footprint_of(compressor: Compressor | None, shape: SegmentShape) -> Footprint:
    """Return what a segment takes; of one that nothing compresses, all of it."""
    return Footprint.of(whole_bytes(shape)) if compressor is None else compressor.footprint(shape)


def whole_bytes(shape: SegmentShape) -> int:
    """Return the bytes of a segment's data and trailer."""
    return numel_of(shape) * dtype_of(shape).itemsize + trailer_bytes(shape)


def numel_of(shape: SegmentShape) -> int:
    """Return how many numbers of data a segment has, padding included."""
    last = shape.spans[-1]
    return last.start + last.padded_numel


def unpadded_numel_of(shape: SegmentShape) -> int:
    """Return how many numbers a segment's parameters have together."""
    return sum(span.numel for span in shape.spans)


def dtype_of(shape: SegmentShape) -> torch.dtype:
    """Return the dtype of a segment's buffers: float32, or float64 where its parameters are."""
    from hocket.segment.segment import wire_dtype

    return wire_dtype(shape.spans[0].dtype)


def trailer_bytes(shape: SegmentShape) -> int:
    """Return how many bytes a segment's trailer take."""
    return shape.trailer_numel * dtype_of(shape).itemsize


def count_of(density: float, numel: int) -> int:
    """Return k, how many of `numel` elements a density means: the nearest whole number, but one at least."""
    return min(numel, max(1, round(density * numel)))
