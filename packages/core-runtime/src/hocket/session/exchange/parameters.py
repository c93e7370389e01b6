"""The exchange of parameters after the optimizer's step.

- Overlap none, without delay: sent and merged before `optimizer.step()` returns.
- Overlap forward: sent when the next forward begins, in the order of the segments, and merged
  segment by segment before that first reads them (see `forward`), or before another step of the optimizer. Changes to
  parameters after a step (pruning masks, clipped weights) are sent too. Ranks that share memory merge in place, all
  segments at once. Without such changes the results equal those of overlap none, bit for bit.
- With a delay: sent after a step, and merged so many steps later, after that step's optimizer. Merge add does it as
  x += combination - sent, which keeps the replicas' mean (with delay 1 Assran et al. 2019, Overlap-SGP).

With an outer optimizer ranks send the distance from outer parameters, and merge these (see `outer`).

Push-sum weights travel with the segments (see `push_sum`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import TypedDict

import torch
from torch import Tensor

from hocket.config.component import component_name
from hocket.errors import NonFiniteError, some
from hocket.outer.api import Merge
from hocket.outer.merge import AddDisplacement
from hocket.plan.layout import WEIGHT
from hocket.segment.segment import Segment
from hocket.segment.storage import Pieces
from hocket.session.exchange.active import ActiveExchange
from hocket.session.exchange.buffers import BufferMean
from hocket.session.exchange.outer import OuterSegment, agree_on_weights
from hocket.session.exchange.push_sum import PushSum
from hocket.session.island import Island
from hocket.strategy.exchange import Overlap
from hocket.transport.lane import Lane

_log = logging.getLogger("hocket")


# From so many elements on, one compiled pass is faster than torch's five.
_SMALLEST_FUSED = 1 << 16


class MixState(TypedDict):
    """The state of an exchange of parameters in a checkpoint, beside the open exchange's own.

    Attributes:
        weights: push-sum weights, by parameter.
        values: parameters times their weights, where their dtypes are too short for them, by parameter.
        outer: the outer parameters and what their optimizer remembers, by parameter.
    """

    weights: dict[str, float]
    values: dict[str, Tensor]
    outer: dict[str, dict[str, Tensor]]


class ParameterMix:
    """An exchange of the slot, with its segments under way.

    Args:
        opened: the open exchange over this rank's scope.
        places: of each of its segments, the places of the parameters.
        num_segments: of the whole model, of which this rank may exchange a share.
        take_values: takes over values that parameters were set to (`p.data = ...`) since the step's end.
        buffers: averages the model's buffers; None where they are the ranks' own.
        any_frozen: returns whether a parameter is frozen on this rank now.
        island: the ranks that hold this replica together.
    """

    def __init__(
        self,
        opened: ActiveExchange,
        places: Sequence[Pieces],
        num_segments: int,
        take_values: Callable[[], None],
        buffers: BufferMean | None,
        any_frozen: Callable[[], bool],
        island: Island,
    ) -> None:
        self.opened, exchange = opened, opened.exchange
        self._buffers, self._num_segments, self._take_values = buffers, num_segments, take_values
        self.overlap, self._delay, self._merges = exchange.overlap, exchange.delay, exchange.merge
        self._places = {s.index: (s, pieces) for s, pieces in zip(opened.segments, places, strict=True)}
        # The segments that are sent from where the parameters are, and whose combination lands there.
        ends = [(i, s, pieces[0][1].data_ptr()) for i, (s, pieces) in self._places.items()]
        self._sent = {i for i, s, address in ends if s.outgoing.data_ptr() == address}
        self._landing = {i for i, s, address in ends if s.incoming.data_ptr() == address}
        #: Whether overlap forward sends and merges when a step ends, as nobody tells when a forward begins.
        self.at_steps_end = False
        # The number of the step that the exchange follows.
        self._step = 0
        # The segments that are to be sent after it, or wait for the next forward.
        self._due: list[int] = []
        self.push_sum = PushSum(self._places, travels=exchange.carries_weight)
        #: The outer parameters of each segment, by its index; empty where there are none.
        self.outer: dict[int, OuterSegment] = {}
        for index, place in self._places.items() if exchange.outer is not None else ():
            self.outer[index] = OuterSegment(exchange, *place, any_frozen, island)
        self._weights_lane = self._open_weights_lane()
        # The segments whose `outgoing` holds the next message already, and whether that is finite.
        self._copied: dict[int, bool] = {}
        # The segments that were sent before a check for NaN and Inf.
        self._unseen: set[int] = set()
        # By the address of a buffer, the segment that lies there.
        self._lies_at: dict[int, int] = {}

    def _open_weights_lane(self) -> Lane | None:
        """Open the lane on which ranks agree, before a compressor remembers them, on weights and moved parameters."""
        traits, packing = self.opened.exchange.collective.traits, self.opened.channel.packing
        remembers = packing is not None and packing.traits.keeps_residual
        if self.outer and remembers and traits.divides_by_weight and traits.equal_result:
            return self.opened.peer.lane(f"{self.opened.exchange.name} weights")
        return None

    @property
    def due(self) -> bool:
        """Tell whether segments wait for the next forward."""
        return bool(self._due)

    @property
    def under_way(self) -> bool:
        """Tell whether segments wait for the next forward, or were sent in it and are not merged yet."""
        return self.due or not self.opened.idle

    def started(self) -> set[int]:
        """Return the numbers of the segments that are under way."""
        return {index for index, (segment, _) in self._places.items() if self.opened.started(segment)}

    def debias(self) -> None:
        """Set parameters to x / w, which the model computes with, except those that a merge overwrites."""
        for index in sorted(self.push_sum.biased):
            if self._delay or not self.opened.started(self._places[index][0]):
                self.push_sum.debias(index)

    def state_dict(self) -> MixState:
        """Return push-sum weights and values, and the outer state, by parameter."""
        return {
            "weights": self.push_sum.weights_by_name(),
            "values": self.push_sum.values_by_name(),
            "outer": {
                name: kept for outer in self.outer.values() for name, kept in outer.state_dict().items()
            },
        }

    def load_state_dict(self, state: MixState) -> None:
        """Continue from a result of `state_dict`, with parameters as x / w."""
        self.push_sum.load(state["weights"], state["values"])
        for outer in self.outer.values():
            outer.load_state_dict(state["outer"])

    def after_step(self, step: int, weight: float) -> None:
        """Merge segments that are due, and send the next ones; with overlap forward at the next forward.

        Args:
            step: the number of the step that has ended, from 1.
            weight: of its batches (see `outer`).

        Raises:
            NonFiniteError: a parameter that was about to be sent is NaN or Inf.
        """
        for outer in self.outer.values():
            outer.count(weight)
        due = self._due_after(step)
        if self._delay:
            ready = [
                i for i in self._due_after(step - self._delay) if self.opened.started(self._places[i][0])
            ]
            if ready:
                self.push_sum.bias()
            for index in ready:
                self.merge(index, sends=index in due)
        else:
            self.merge_all()
        self._step, self._due = step, due
        if self.overlap is not Overlap.FORWARD or self.at_steps_end:
            self.begin()
            if not self._delay:
                self.merge_all()
        self.debias()
        if self._buffers is not None and self.opened.exchange.averages_buffers_after(
            step, self.opened.peer.size
        ):
            self._buffers.average()

    def take_changes(self) -> None:
        """Add other ranks' changes to parameters since the last outcome; collective, with no exchange under way."""
        for segment, pieces in self._places.values():
            changes = self.opened.channel.take_changes(segment)
            if changes is None:  # on all ranks alike
                return
            self.opened.count_partners(self.opened.channel.take_partners(segment))
            for place, target in pieces:
                target.add_(changes[place].to(target.device))

    def take_late(self) -> None:
        """Step outer parameters by the mean of distances that no round has sent; collective.

        With momentum, which continues by itself, it would be one step too many: the rest is dropped.
        """
        opened, outer = self.opened, self.opened.exchange.outer
        late = {i: opened.channel.take_stale(self._places[i][0]) for i in self.outer}
        kept = {i: distance for i, distance in late.items() if distance is not None}
        if outer is None or not kept:  # on all ranks alike
            return
        if not outer.additive:
            _log.warning(
                "%s: outer optimizer %s has momentum, so values that its compressor has not sent yet are dropped as "
                "the phase changes. Without outer momentum they are kept",
                opened.exchange.name,
                component_name(outer),
            )
            return
        lane = opened.peer.lane(f"{opened.exchange.name} late")
        for index, distance in kept.items():
            total = torch.empty_like(distance)
            lane.iallreduce(distance.numpy(), total.numpy()).wait()
            self.outer[index].step(total.mul_(opened.scale))
        lane.close()

    def close(self) -> None:
        """Close the lanes beside the exchange; collective."""
        if self._weights_lane is not None:
            self._weights_lane.close()
        if self._buffers is not None:
            self._buffers.close()

    def _due_after(self, step: int) -> list[int]:
        """Return the segments that are sent after a step."""
        exchange, size = self.opened.exchange, self.opened.peer.size
        if not exchange.stagger:
            return list(self._places) if exchange.is_due(step, 0, 1, size) else []
        return [i for i in self._places if exchange.is_due(step, i, self._num_segments, size)]

    def begin(self) -> None:
        """Send the segments that are due, if they are not sent yet."""
        if not self._due:
            return
        if self.overlap is Overlap.FORWARD:  # long after the step, at whose end they were taken over
            self._take_values()
        due, self._due = self._due, []
        self.push_sum.bias()
        lane, opened = self._weights_lane, self.opened
        mean_weights = {} if lane is None else agree_on_weights(self.outer, due, opened, lane)
        takes_turns = opened.exchange.takes_turns
        for index in due if takes_turns else ():  # before one of them is merged
            self._check(index)
        for index in due:
            if takes_turns:
                self._make_room(index)
            else:
                self._check(index)
            segment = self._fill(index, mean_weights.get(index, 1.0))
            if self.overlap is Overlap.FORWARD:
                self.opened.start_in_order(segment)
            elif self._delay or takes_turns:
                self.opened.start(segment)
        if self.overlap is Overlap.NONE and not (self._delay or takes_turns):
            self.opened.start_all(due)
        if self.overlap is not Overlap.FORWARD:  # messages are made, and a checkpoint may follow
            for index in mean_weights:
                self.outer[index].give_back()

    def _check(self, index: int) -> None:
        """Refuse NaN and Inf in segment number `index`, if nobody else looks for them."""
        segment, pieces = self._places[index]
        # A NaN in another rank's distance from outer parameters does not show in this rank's own.
        found_later = self.opened.channel.finds_nonfinite(segment) and index not in self.outer
        if not (self._copied.get(index) or found_later):
            self._refuse_nonfinite(segment, pieces)

    def _make_room(self, index: int) -> None:
        """Merge segments under way that lie in the buffers of segment number `index`."""
        segment = self._places[index][0]
        for address in (segment.outgoing.data_ptr(), segment.incoming.data_ptr()):
            self.merge(self._lies_at.get(address, index))
            self._lies_at[address] = index

    def _fill(self, index: int, mean_weight: float) -> Segment:
        """Fill the message of segment number `index`, and return the segment."""
        segment, pieces = self._places[index]
        finite = self._copied.pop(index, None)
        if index in self.outer:
            self.outer[index].send(mean_weight)
        elif index in self.push_sum.unrounded:
            segment.outgoing[: segment.numel].copy_(self.push_sum.unrounded[index].step())
        elif finite is None and index not in self._sent:
            for place, target in pieces:
                segment.outgoing[place].copy_(target)
        if self.push_sum.weights:
            segment.outgoing_trailer[WEIGHT] = self.push_sum.weights[index]
        return segment

    def merge(self, index: int, *, sends: bool = False) -> None:
        """Finish segment number `index`, if it is under way, and merge the result into the parameters.

        Args:
            sends: whether the parameters are sent again at once, so that one pass can merge and copy.
        """
        if index not in self._places or not self.opened.started(self._places[index][0]):
            return
        segment, pieces = self._places[index]
        outcome = self.opened.finish(segment)
        if index in self._unseen:
            self._unseen.discard(index)
            if not segment.sent_is_finite():
                self._raise_nonfinite(segment, pieces, (self.opened.peer.rank,))
        if outcome.nonfinite:
            self._raise_nonfinite(segment, pieces, outcome.nonfinite)
        if self.push_sum.weights:
            # With a delay nothing has changed the weight since it was sent.
            self.push_sum.weights[index] = float(segment.incoming_trailer[WEIGHT])
        if index in self.outer:
            self.outer[index].take(self.opened.scale)
        elif index in self.push_sum.unrounded:
            self._take(segment, [(slice(0, segment.numel), self.push_sum.unrounded[index].step())])
            self.push_sum.unrounded[index].show()
        elif self._delay and _fuses(segment, pieces, self._merges):
            self._take_in_one_pass(segment, pieces[0][1], sends=sends)
        else:
            self._take(segment, pieces)
        if index in self.push_sum.biased and self.overlap is Overlap.FORWARD:
            self.push_sum.debias(index)

    def _take(self, segment: Segment, pieces: Pieces) -> None:
        scale = self.opened.scale
        if segment.index in self._landing:
            if scale != 1.0:
                for _, target in pieces:
                    target.mul_(scale)
            return
        combined = segment.incoming[: segment.numel]
        if self._delay or not self._merges.takes_all:
            combined.mul_(scale)
            for place, target in pieces:
                sent = segment.outgoing[place] if self._merges.needs_sent else None
                self._merges.merge(target, combined[place], sent)
        elif combined.dtype == pieces[0][1].dtype:
            for place, target in pieces:
                torch.mul(combined[place], scale, out=target)
        else:
            combined.mul_(scale)
            for place, target in pieces:
                target.copy_(combined[place])

    def _take_in_one_pass(self, segment: Segment, target: Tensor, *, sends: bool) -> None:
        """Merge as `_take` does with a delay and merge add, and copy the result into `outgoing`."""
        from hocket.kernels import merge_delayed

        combined, sent = (flat[: segment.numel].numpy() for flat in (segment.incoming, segment.outgoing))
        finite = merge_delayed(target.numpy(), combined, self.opened.scale, sent, sends=sends)
        if sends:
            self._copied[segment.index] = finite

    def merge_all(self) -> None:
        """Finish and merge all segments that are under way or due."""
        self.begin()
        if self.opened.idle:
            return
        if self._delay:
            self.push_sum.bias()
        for index in self._places:
            self.merge(index)

    def _refuse_nonfinite(self, segment: Segment, pieces: Pieces) -> None:
        if segment.on_device:
            self._unseen.add(segment.index)  # checked once it is copied from the device: now would be a wait
        # One pass, which a single NaN or Inf poisons; only then each parameter on its own.
        elif not all(math.isfinite(float(target.sum())) for _, target in pieces):
            self._raise_nonfinite(segment, pieces, (self.opened.peer.rank,))

    def _raise_nonfinite(self, segment: Segment, pieces: Pieces, ranks: Sequence[int]) -> None:
        """Raise for NaN or Inf from `ranks` of the scope; this rank's parameters hold it in any case."""
        values = torch.zeros(segment.numel, dtype=pieces[0][1].dtype)
        for place, target in pieces:
            values[place] = target.cpu()
        names = [s.name for s in segment.spans if not bool(torch.isfinite(values[s.start : s.stop]).all())]
        if names:
            whose = " and ".join(str(self.opened.ranks[rank]) for rank in ranks)
            raise NonFiniteError(
                f"parameter {some(names)} of rank {whose} is NaN or Inf after step {self._step}, and "
                f"{self.opened.exchange.name} is about to send it: lower the learning rate, or clip gradients"
            )


def _fuses(segment: Segment, pieces: Pieces, merges: Merge) -> bool:
    """Return whether one compiled pass can merge, and pays: merge add, on the CPU, of one dtype."""
    target = pieces[0][1]
    same = target.dtype == segment.outgoing.dtype == segment.incoming.dtype
    alike = same and target.device.type == "cpu" and len(pieces) == 1 and isinstance(merges, AddDisplacement)
    return alike and segment.numel >= _SMALLEST_FUSED and target.numel() == segment.numel
