"""An exchange's compressor at work: it packs each segment's messages, and keeps the state of the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hocket.arrays import Array
from hocket.compressor.api import Compressor, Message, SparseValues, State
from hocket.compressor.checked import message_of
from hocket.plain import Tree

if TYPE_CHECKING:
    from torch import Tensor

    from hocket.segment.segment import Segment


def packing_for(compressor: Compressor | None, segments: Sequence[Segment]) -> Packing | None:
    """Return the packing of an exchange's segments, None where they travel as they are."""
    return None if compressor is None else Packing(compressor, segments)


class Packing:
    """A compressor with the states of one exchange's segments.

    Attributes:
        compressor: gives the messages their form.
        traits: the compressor's.
        states: the compressor's state of each segment, by the segment's index.
        packed_bytes: bytes of each segment's last message, by the segment's index. Where a channel sends more than
            that, the length for which `Collective.cost` gives the bytes sent.

    Raises:
        ValueError: the compressor cannot carry one of the segments.
    """

    def __init__(self, compressor: Compressor, segments: Sequence[Segment]) -> None:
        self.compressor = compressor
        self.traits = compressor.traits
        self.states: dict[int, State] = {segment.index: compressor.init(segment) for segment in segments}
        self.packed_bytes: dict[int, float] = {}
        # By the segment's index, what all ranks know of its last message.
        self._known: dict[int, object] = {}
        self._keeps = False
        # By the segment's index, what its state held before its last message, and whose messages are of this round.
        self._before: dict[int, dict[str, Tensor]] = {}
        self._packed: set[int] = set()

    def keep(self, keeps: bool) -> None:
        """Choose whether `restore` may undo the next round, at the cost of a copy of each packed state."""
        self._keeps = keeps
        self._packed.clear()

    def restore(self) -> None:
        """Restore the states from before the round, if they were kept."""
        for index in self._packed:
            self.states[index].load_state_dict(self._before[index])
        self._packed.clear()

    def capacity_bytes(self, segment: Segment) -> int:
        """Return the bytes of the longest message that a segment can have."""
        return self.compressor.footprint(segment).longest_bytes

    def pack(self, segment: Segment, round: int) -> Array:
        """Return the message of `segment.outgoing`: flat, C-contiguous, in host memory.

        Valid until the segment changes or is packed again.

        Raises:
            UserError: the segment's first message has a form that cannot travel.
        """
        state = self.states[segment.index]
        if self._keeps:
            self._keep(segment.index, state)
        payload = message_of(self.compressor, segment, state, round).payload
        self.packed_bytes[segment.index] = payload.nbytes
        if self.traits.answers:
            self.packed_bytes[segment.index] = self.compressor.footprint(segment).message_bytes
        return payload

    def answer(self, total: Array, segment: Segment, round: int) -> Array | None:
        """Return the next message after the sum of all ranks' last ones; None when the round has no more."""
        if not self.traits.answers:
            return None
        known = self._known.get(segment.index)
        message = self.compressor.answer(
            Message(total, segment, round, known), segment, self.states[segment.index]
        )
        if message is None:
            return None
        self._known[segment.index] = message.known
        return message.payload

    def _keep(self, index: int, state: State) -> None:
        if index not in self._before:
            self._before[index] = state.state_dict()
        else:
            for name, tensor in state.tensors().items():
                self._before[index][name].copy_(tensor)
        self._packed.add(index)

    def add(self, payload: Array, weight: float, segment: Segment, round: int) -> None:
        """Add `weight` times a message of this round to `segment.incoming`.

        Args:
            payload: a result of `pack` on this rank or another, of any dtype or as bytes.
            weight: the message's share in the result.
        """
        known = self._known.get(segment.index)
        self.compressor.accumulate(Message(payload, segment, round, known), weight, segment.incoming)

    def clear(self, payload: Array, segment: Segment, round: int, out: Tensor) -> None:
        """Set the elements of `out` [numel] to 0 that a message of this round carries."""
        self.compressor.clear_sent(Message(payload, segment, round), out)

    def read(self, payload: Array, segment: Segment, round: int) -> SparseValues:
        """Return the values and indices in a message of this round; only for compressors with `selects`."""
        return self.compressor.read(Message(payload, segment, round))

    def take_back(self, indices: Array, values: Array, segment: Segment) -> None:
        """Treat some elements of the segment's last message as unsent in its state."""
        self.states[segment.index].take_back(indices, values)

    def end(self, segment: Segment) -> None:
        """Turn the added messages of a round in `segment.incoming` into values."""
        self.compressor.to_values(segment, segment.incoming[: segment.numel])

    def take_residual(self, segment: Segment) -> Tensor | None:
        """Remove and return the values [numel] that no round has sent, on the CPU; None where none are ever kept."""
        residual = self.states[segment.index].residual
        if residual is None:
            return None
        kept = residual.to("cpu", copy=True).contiguous()
        residual.zero_()
        self.compressor.to_values(segment, kept)
        return kept

    def put_mean(self, total: Array, size: int, segment: Segment, round: int) -> None:
        """Fill `segment.incoming` with the mean of the elements that travelled, and this rank's own other values.

        Args:
            total: the sum of this round's messages, which carry the same elements on every rank.
            size: number of ranks.
        """
        message, numel = Message(total, segment, round), segment.numel
        segment.incoming[:numel].copy_(segment.outgoing[:numel])
        segment.incoming[numel:].zero_()
        self.compressor.clear_sent(message, segment.incoming[:numel])
        self.compressor.accumulate(message, 1 / size, segment.incoming)

    def state_dict(self) -> Tree:
        """Return copies of the states for a resumed run, by the segment's index."""
        return {str(index): state.state_dict() for index, state in self.states.items()}

    def load_state_dict(self, saved: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Continue from a result of `state_dict`.

        Raises:
            ValueError: the saved state is of other segments, or of another compressor.
        """
        if {int(index) for index in saved} != set(self.states):
            raise ValueError(
                f"the saved state has segments {sorted(saved)}, but this session has {sorted(self.states)}"
            )
        for index, state in self.states.items():
            state.load_state_dict(saved[str(index)])
