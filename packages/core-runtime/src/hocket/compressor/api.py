"""The interface of compressors: the form in which a segment's values travel, and the state between rounds.

Behind a segment's data travels its trailer, a few numbers that must arrive as they were sent: compressors
carry them uncompressed, and remember nothing of them.

The modules of compressors import no torch before one is used, so that composing a strategy needs none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hocket.configured import Configured

if TYPE_CHECKING:
    from torch import Tensor

    from hocket.arrays import Array
    from hocket.compressor.optimizer_terms import OptimizerTerms
    from hocket.segment.segment import Segment
    from hocket.segment.shape import SegmentShape


@dataclass(frozen=True, eq=False)
class Message:
    """A segment's values as they travel. The receiver makes one from the received bytes and from its own segment and
    round.

    Attributes:
        payload: all that travels: C-contiguous, one axis, in host memory; its dtype and length are the
            compressor's. Valid until the segment changes or is compressed again, of which it may be a view.
        segment: the receiver's own segment of that number; does not travel.
        round: the exchange's counter; does not travel.
        known: what all ranks know of it from the round's earlier messages, for the compressor; does not travel.
    """

    payload: Array
    segment: Segment
    round: int
    known: Any = None


@dataclass(frozen=True, eq=False)
class SparseValues:
    """The decoded content of a sparse message, as views of its payload where possible.

    Attributes:
        trailer: [trailer_numel], of the segment's dtype, in host memory.
        values: [k], of the segment's dtype.
        indices: [k], int32, places in the segment, each at most once.
    """

    trailer: Array
    values: Array
    indices: Array


class State:
    """The compressor state of one segment in one exchange. This base class is empty, for stateless compressors."""

    _looked_at = False  # whether `message_of` has seen a message of it
    _cleared: tuple[Array, Tensor] | None = None  # places, and what momentum held there

    @property
    def residual(self) -> Tensor | None:
        """Return the values not sent yet, [numel] like the segment's data, or None where none are kept.

        A caller that sends them in another way, as at a change of phase, zeroes them.
        """
        return None

    @property
    def momentum(self) -> Tensor | None:
        """Return this rank's share of the momentum, [numel] like the segment's data, or None where there is none.

        The sum over ranks of shares of contributions that were scaled to sum to a mean is the buffer that the
        optimizer would hold. The caller fills it from there before the first round, and hands it back after the last.
        """
        return None

    # Empty on purpose: most compressors leave the optimizer alone.
    def take(self, terms: Sequence[OptimizerTerms | None], scale: float) -> None:
        """Take over what the optimizer's step would do with the gradients of this round.

        Args:
            terms: for each of the segment's parameters; None for one that has no gradient on any rank, which is left
                out of this round. One that has none on this rank only goes on with a gradient of 0.
            scale: this rank's share of the mean, by which weight decay is multiplied; over all ranks it sums to 1.
        """

    def note_cleared(self, indices: Array) -> None:
        """Remember what `momentum` holds before it is cleared, as `take_back` may want it again.

        Args:
            indices: [n], int32, of the message's elements.
        """
        import torch

        assert self.momentum is not None
        places = torch.from_numpy(indices).to(self.momentum.device)
        self._cleared = indices, self.momentum.index_select(0, places)

    def take_back(self, indices: Array, values: Array) -> None:
        """Treat some elements of the last message as unsent, as the collective has left them out.

        Of itself a state only gives `momentum` back what was noted there; one with a residual adds the values to it.

        Args:
            indices: [n], int32, of the message's indices.
            values: [n], their values, finite.
        """
        import torch

        if self._cleared is None or self.momentum is None:
            return
        cleared, held = self._cleared
        places = torch.from_numpy(np.flatnonzero(np.isin(cleared, indices)))
        back = torch.from_numpy(cleared)[places].to(self.momentum.device)
        self.momentum.index_copy_(0, back.long(), held[places.to(held.device)])

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that a resumed run needs, by name, without a copy."""
        return {}

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of `tensors()`; no exchange of the segment may be under way."""
        return {name: tensor.detach().clone() for name, tensor in self.tensors().items()}

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """Continue from a result of `state_dict`.

        Raises:
            ValueError: names or shapes differ, as of another compressor or segment.
        """
        own = self.tensors()
        shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
        given = {name: tuple(tensor.shape) for name, tensor in saved.items()}
        if given != shapes:
            raise ValueError(f"the saved state holds {given}, but this compressor needs {shapes}")
        for name, tensor in own.items():
            tensor.copy_(saved[name])


@dataclass(frozen=True)
class CompressorTraits:
    """The properties of a compressor that rules, sessions and collectives read.

    Attributes:
        reducible: whether messages of several ranks for one segment and round may be summed as they are, in flight.
            If so, payloads are float32 or float64, equally long on every rank, and accumulating their sum is
            accumulating each. If not, each must arrive: it is sparse, or of a type that would be rounded at every
            addition.
        equal_sizes: whether every message of one segment is equally long, in every round and on every rank.
        applies_optimizer_terms: the terms that it applies in the optimizer's place: of "momentum" and "weight_decay".
        same_coordinates: whether in one round all ranks send the same elements, so that mixing them mixes the models.
        keeps_residual: whether values that a round does not send stay in the state, to be sent later.
        prepares: whether `prepare` must see all segments before the first is compressed, as local clipping does.
        leaves_out: whether a message leaves elements out.
        selects: whether messages are some of the values, as they are: see `read` and `num_selected`.
        coarse: whether messages keep too little of the values, a few levels or directions, to carry parameters;
            differences may travel so.
        transforms: whether messages and the residual are in another basis than the values, see `to_values`.
        answers: whether a round sends more messages, which depend on the sum of its first ones, see `answer`.
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
    """The sizes of a segment's messages and state, in bytes.

    Attributes:
        message_bytes: its message, trailer included; the mean where sizes differ, the sum where a round has several.
        longest_bytes: the longest message that it can have. A message that may be shorter contains its own length, as
            it may arrive in a buffer of this length, followed by other bytes.
        state_bytes: the memory of its state.
    """

    message_bytes: float
    longest_bytes: int
    state_bytes: int = 0

    @classmethod
    def of(cls, nbytes: int, state_bytes: int = 0) -> Footprint:
        """Return the footprint of messages which all have `nbytes` bytes."""
        return cls(float(nbytes), nbytes, state_bytes)


class Compressor(Configured, ABC):
    """A form in which values travel; a frozen dataclass whose fields are its configuration.

    Residuals, momentum and cached thresholds of a segment in one exchange are in the `State` that `init` makes and the
    caller keeps. A compressor that corrects another's error holds that other one in a
    field (see `hocket.compressor.wrapper`).

    In each round the caller calls, in this order: `State.take` for each segment if `applies_optimizer_terms` says so;
    `prepare` once if `prepares` does; `compress` for each segment; `answer` if `answers` does; `accumulate` for each
    message, this rank's own included where it counts, the last of each segment where there are several; `to_values`
    once all are in.
    """

    @property
    @abstractmethod
    def traits(self) -> CompressorTraits:
        """Return the properties that rules, sessions and collectives read."""

    @abstractmethod
    def footprint(self, shape: SegmentShape) -> Footprint:
        """Return the sizes of a segment's messages and state."""

    def without_optimizer_terms(self) -> Compressor:
        """Return this compressor without optimizer terms, for other optimizers; itself if that is useless."""
        return self

    def init(self, segment: Segment) -> State:
        """Return a new state for `segment`.

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
            size: number of ranks that contribute.
            scale: the factor by which the gradients in `outgoing` have been multiplied to become contributions.
        """

    @abstractmethod
    def compress(self, segment: Segment, state: Any, round: int) -> Message:
        """Return the message of `segment.outgoing` in this round, and update `state` in place.

        Leaves `outgoing` as it is, but for gradients where `applies_optimizer_terms` is not empty. NaN and Inf are sent
        as other values are, and never enter the state: the step that they spoil can be skipped.

        Args:
            segment: its data is read from `outgoing`, on its device, its trailer from
                `outgoing_trailer`, in host memory; `outgoing_array` has been staged.
            state: the segment's.
            round: the exchange's counter, from 0.

        Raises:
            NonFiniteError: a finite value does not fit the message's number format.
        """

    def answer(self, total: Message, segment: Segment, state: Any) -> Message | None:
        """Return the segment's next message after the sum of all ranks' last ones.

        Called for each sum of a round where `answers` says so; collective, as all ranks decide alike.

        Args:
            total: the sum of all ranks' last messages.
            segment, state: as for `compress`.

        Returns:
            None when the round has no more messages: then the last sum is accumulated.
        """
        return None

    @abstractmethod
    def accumulate(self, message: Message, weight: float, out: Tensor) -> None:
        """Add a message to `out`: out += weight * message. With weight -1 a residual loses what was sent.

        Args:
            message: a result of `compress` on this rank or another.
            weight: the message's share in the result.
            out: dense, [numel + trailer_numel], of the segment's wire dtype, on any device; changed in place.
        """

    def read(self, message: Message) -> SparseValues:
        """Return the content of a message of this rank or another; only where `selects` says so.

        Raises:
            TypeError: the compressor's messages are not some of the values.
        """
        raise TypeError(f"{type(self).__name__}: its messages are not a selection of the values")

    def num_selected(self, shape: SegmentShape) -> float:
        """Return the mean number of elements in a segment's message; only where `selects` says so.

        Raises:
            TypeError: the compressor's messages are not some of the values.
        """
        raise TypeError(f"{type(self).__name__}: its messages are not a selection of the values")

    # Empty on purpose: most messages say values.
    def to_values(self, segment: Segment, sums: Tensor) -> None:
        """Turn the sum of a round's messages into values, in place.

        Args:
            segment: the receiver's, for its parameters' places and shapes.
            sums: [numel] like the segment's data, on any device.
        """

    @abstractmethod
    def clear_sent(self, message: Message, out: Tensor) -> None:
        """Zero the elements of `out` that the message carries, and leave the others.

        Args:
            message: as for `accumulate`.
            out: [numel] like the segment's data, on any device; changed in place.
        """


def footprint_of(compressor: Compressor | None, shape: SegmentShape) -> Footprint:
    """Return the footprint of a segment; without a compressor, of all its values."""
    return Footprint.of(shape.wire_bytes) if compressor is None else compressor.footprint(shape)


def count_of(density: float, numel: int) -> int:
    """Return k, the number of elements for a density: `density * numel`, rounded, and at least 1."""
    return min(numel, max(1, round(density * numel)))
