"""Exchanges parameters after the optimizer's step.

- Overlap none, without delay: sent and merged before `optimizer.step()` returns.
- Overlap forward: sent when the next forward begins, in the order of the segments (see `send_window`), and merged
  segment by segment before that first reads them (see `forward`), or before another step of the optimizer. What is
  written into parameters after a step (pruning masks, clipped weights) is a part of what is sent. Ranks that share
  memory merge it where it is, all segments at once. Where nothing is written, bit for bit the numbers of overlap none.
- With a delay: sent after a step, and merged so many steps later, after that step's optimizer. Merge add does it as
  x += combination - what was sent, which keeps the replicas' mean (with delay 1 Assran et al. 2019, Overlap-SGP).

With an outer optimizer what is sent is the distance from outer parameters, and these are merged (see `outer`).

Where a push-sum weight w travels with a segment, the model computes with x / w and the optimizer steps x: the
parameters are multiplied by w before its step and divided by it afterwards (Assran et al. 2019, algorithm 1). Of
float16 and bfloat16 parameters x is kept in float32, and what the optimizer changes is added to it (`unrounded`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hocket.config.component import component_name
from hocket.errors import NonFiniteError, some
from hocket.outer.api import Merge
from hocket.outer.merge import Add
from hocket.plan.layout import WEIGHT
from hocket.segment.segment import Segment, view_of
from hocket.segment.storage import Pieces
from hocket.session.buffers import BufferMean
from hocket.session.exchange import ActiveExchange
from hocket.session.outer import OuterSegment
from hocket.session.unrounded import Unrounded
from hocket.strategy.exchange import Overlap
from hocket.transport.lane import Lane

__all__ = ["ParameterMix"]

_log = logging.getLogger("hocket")


# From so many elements on, one compiled pass is faster than torch's five.
_SMALLEST_FUSED = 1 << 16


class ParameterMix:
    """One exchange of the slot, with what of it is under way.

    Args:
        opened: over this rank's scope.
        places: of each of its segments, where the parameters lie.
        num_segments: of the whole model, of which this rank may exchange a share.
        take_values: takes over what parameters were set to (`p.data = ...`) since the step's end.
        buffers: averages the model's buffers; None where they are the ranks' own.
        any_frozen: returns whether a parameter is frozen on this rank now.
    """

    def __init__(
        self,
        opened: ActiveExchange,
        places: Sequence[Pieces],
        num_segments: int,
        take_values: Callable[[], None],
        buffers: BufferMean | None,
        any_frozen: Callable[[], bool],
    ) -> None:
        self.opened = opened
        exchange = opened.exchange
        self._buffers = buffers
        self.overlap, self._delay, self._merges = exchange.overlap, exchange.delay, exchange.merge
        self._num_segments = num_segments
        self._places = {s.index: (s, pieces) for s, pieces in zip(opened.segments, places, strict=True)}
        # The segments that are sent from where the parameters are, and whose combination lands there.
        ends = [(i, s, pieces[0][1].data_ptr()) for i, (s, pieces) in self._places.items()]
        self._sent = {i for i, s, address in ends if s.outgoing.data_ptr() == address}
        self._landing = {i for i, s, address in ends if s.incoming.data_ptr() == address}
        self._take_values = take_values
        #: Whether overlap forward sends and merges when a step ends, as nobody tells when a forward begins.
        self.at_steps_end = False
        # The number of the step that the exchange follows.
        self._step = 0
        # The segments that are to be sent after it, or wait for the next forward.
        self._due: list[int] = []
        #: The push-sum weight of each segment, by its index; empty where none travels.
        self.weights: dict[int, float] = {}
        if exchange.carries_weight:
            self.weights = dict.fromkeys(self._places, 1.0)
        #: What x is, by the segment's index, where parameters are too short for it.
        self.unrounded = {
            i: Unrounded(pieces[0][1], segment.outgoing.dtype)
            for i, (segment, pieces) in self._places.items()
            if i in self.weights and segment.outgoing.dtype != pieces[0][1].dtype
        }
        #: The outer parameters of each segment, by its index; empty where there are none.
        self.outer: dict[int, OuterSegment] = {}
        if exchange.outer is not None:
            self.outer = {i: OuterSegment(exchange, *place, any_frozen) for i, place in self._places.items()}
        # What ranks agree over on weights, and on which parameters have moved, before a compressor remembers them.
        self._weights_lane: Lane | None = None
        traits, packing = exchange.collective.traits, opened.channel.packing
        remembers = packing is not None and packing.traits.keeps_residual
        if self.outer and remembers and traits.divides_by_weight and traits.equal_result:
            self._weights_lane = opened.peer.lane(f"{exchange.name} weights")
        # The segments whose parameters hold x, and not x / w.
        self._biased: set[int] = set()
        # The segments whose `outgoing` holds what is sent next, and whether that is finite.
        self._copied: dict[int, bool] = {}
        # The segments that were sent before anybody has looked for NaN and Inf in them.
        self._unseen: set[int] = set()

    @property
    def due(self) -> bool:
        """Whether segments wait for the next forward."""
        return bool(self._due)

    @property
    def under_way(self) -> bool:
        """Whether segments wait for the next forward, or were sent in it and are not merged yet."""
        return self.due or not self.opened.idle

    def started(self) -> set[int]:
        """Return the numbers of the segments that are under way."""
        return {index for index, (segment, _) in self._places.items() if self.opened.started(segment)}

    def bias(self) -> None:
        """Make parameters hold x, what the optimizer steps, in place of x / w, what the model computes with."""
        for index in self.weights.keys() - self._biased:
            self._biased.add(index)
            if index in self.unrounded:
                self.unrounded[index].bias(self.weights[index])
            elif self.weights[index] != 1.0:
                for _, target in self._places[index][1]:
                    target.mul_(self.weights[index])

    def debias(self) -> None:
        """Make parameters hold x / w, what the model computes with, where what is under way does not overwrite them."""
        for index in sorted(self._biased):
            if self._delay or not self.opened.started(self._places[index][0]):
                self._debias(index)

    def set_weights(self, weights: dict[int, float], values: Mapping[int, Tensor] | None = None) -> None:
        """Give segments, of which none is under way, other weights, and take parameters for what they divide to.

        Args:
            weights: by the segment's index.
            values: what `values` returned, where parameters are too short for them.
        """
        self.weights = weights
        self._biased = set()
        for index, value in (values or {}).items():
            self.unrounded[index].value.copy_(value)

    def values(self) -> dict[int, Tensor]:
        """Return copies of what parameters are too short for, by the segment's index."""
        return {index: unrounded.value.clone() for index, unrounded in self.unrounded.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return each parameter's push-sum weight, and the values for which parameters are too short."""
        places = [(weight, self._places[index][0]) for index, weight in self.weights.items()]
        return {
            "weights": {span.name: weight for weight, segment in places for span in segment.spans},
            "values": self._values_by_name(),
            "outer": {
                name: kept for outer in self.outer.values() for name, kept in outer.state_dict().items()
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take parameters for what the push-sums that `state_dict` returned are divided to."""
        firsts = {index: self._places[index][0].spans[0].name for index in self.weights}
        self.set_weights({index: state["weights"][name] for index, name in firsts.items()})
        for name, value in self._values_by_name().items():
            value.copy_(state["values"][name])
        for outer in self.outer.values():
            outer.load_state_dict(state["outer"])

    def _values_by_name(self) -> dict[str, Tensor]:
        return {
            span.name: view_of(unrounded.value, span)
            for index, unrounded in self.unrounded.items()
            for span in self._places[index][0].spans
        }

    def _debias(self, index: int) -> None:
        self._biased.discard(index)
        if index in self.unrounded:
            self.unrounded[index].debias(self.weights[index])
        elif self.weights[index] != 1.0:
            for _, target in self._places[index][1]:
                target.div_(self.weights[index])

    def after_step(self, step: int, weight: float) -> None:
        """Merge what has come, and send what is due; with overlap forward when the next forward begins.

        Args:
            step: the number of the step that has ended, from 1.
            weight: what batches counted in it (see `outer`).

        Raises:
            NonFiniteError: a parameter that was about to be sent is NaN or Inf.
        """
        for outer in self.outer.values():
            outer.count(weight)
        due = self._due_after(step)
        if self._delay:
            come = [i for i in self._due_after(step - self._delay) if self.opened.started(self._places[i][0])]
            if come:
                self.bias()
            for index in come:
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
        """Add what others have changed of parameters since the last outcome; collective, with nothing under way."""
        for segment, pieces in self._places.values():
            changes = self.opened.channel.take_changes(segment)
            if changes is None:  # on all ranks alike
                return
            self.opened.count_partners(self.opened.channel.take_partners(segment))
            for place, target in pieces:
                target.add_(changes[place].to(target.device))

    def take_late(self) -> None:
        """Step outer parameters by the mean of what no round has taken of the ranks' distances; collective.

        With momentum, which goes on by itself, it would be a step too many: what is left is dropped.
        """
        opened, outer = self.opened, self.opened.exchange.outer
        late = {i: opened.channel.take_stale(self._places[i][0]) for i in self.outer}
        kept = {i: distance for i, distance in late.items() if distance is not None}
        if outer is None or not kept:  # on all ranks alike
            return
        if not outer.additive:
            _log.warning(
                "%s: %s steps with momentum, and what its residuals hold of the ranks' distances is left behind",
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
        """Close what is beside the exchange; collective."""
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
        """Send the segments that are due, if that is still to be done."""
        if not self._due:
            return
        if self.overlap is Overlap.FORWARD:  # long after the step, at whose end they were taken over
            self._take_values()
        due, self._due = self._due, []
        self.bias()
        mean_weights = self._agree(due)
        for index in due:
            segment = self._fill(index, mean_weights.get(index, 1.0))
            if self.overlap is Overlap.FORWARD:
                self.opened.start_in_window(segment)
            elif self._delay:
                self.opened.start(segment)
        if self.overlap is Overlap.NONE and not self._delay:
            self.opened.start_all(due)
        if self.overlap is not Overlap.FORWARD:  # messages are made, and a checkpoint may follow
            for index in mean_weights:
                self.outer[index].give_back()

    def _fill(self, index: int, mean_weight: float) -> Segment:
        """Let segment number `index` hold what is sent of it, and return it."""
        segment, pieces = self._places[index]
        finite = self._copied.pop(index, None)
        # Who gets a NaN in a distance from outer parameters does not find it in its own.
        told = self.opened.channel.finds_nonfinite(segment) and index not in self.outer
        if not (finite or told):
            self._refuse_nonfinite(segment, pieces)
        if index in self.outer:
            self.outer[index].send(mean_weight)
        elif index in self.unrounded:
            segment.outgoing[: segment.numel].copy_(self.unrounded[index].step())
        elif finite is None and index not in self._sent:
            for place, target in pieces:
                segment.outgoing[place].copy_(target)
        if self.weights:
            segment.outgoing_trailer[WEIGHT] = self.weights[index]
        return segment

    def _agree(self, due: Sequence[int]) -> Mapping[int, float]:
        """Return what the ranks' batches have counted on average, by the index of segments that are due; collective.

        What has moved on no rank stays out of them.
        """
        lane = self._weights_lane
        if lane is None:
            return {}
        moved = {index: self.outer[index].moved() for index in due}
        own = np.array([n for index in due for n in (self.outer[index].weight, *moved[index])], np.float64)
        total = np.empty_like(own)
        self.opened.wait_for(lambda: lane.iallreduce(own, total), "weights", own.nbytes)
        means, start = {}, 0
        assert self.opened.channel.packing is not None
        for index in due:
            means[index] = float(total[start]) / lane.size
            end = start + 1 + len(moved[index])
            state = self.opened.channel.packing.states[index]
            self.outer[index].hold(state.residual, (total[start + 1 : end] != 0).tolist())
            start = end
        return means

    def merge(self, index: int, *, sends: bool = False) -> None:
        """Finish segment number `index`, if it is under way, and write what came of it into the parameters.

        Args:
            sends: whether they are sent at once, so that one pass can merge and copy.
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
        if self.weights:
            # With a delay nothing has changed the weight since it was sent.
            self.weights[index] = float(segment.incoming_trailer[WEIGHT])
        if index in self.outer:
            self.outer[index].take(self.opened.scale)
        elif index in self.unrounded:
            self._take(segment, [(slice(0, segment.numel), self.unrounded[index].step())])
            self.unrounded[index].show()
        elif self._delay and _fuses(segment, pieces, self._merges):
            self._take_in_one_pass(segment, pieces[0][1], sends=sends)
        else:
            self._take(segment, pieces)
        if index in self._biased and self.overlap is Overlap.FORWARD:
            self._debias(index)

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
        """Do what `_take` does with a delay and merge add, bit for bit, and copy the result where it is sent from."""
        from hocket.kernels import merge_delayed

        combined, sent = (flat[: segment.numel].numpy() for flat in (segment.incoming, segment.outgoing))
        finite = merge_delayed(target.numpy(), combined, self.opened.scale, sent, sends=sends)
        if sends:
            self._copied[segment.index] = finite

    def merge_all(self) -> None:
        """Finish and merge everything that is under way, or due."""
        self.begin()
        if self.opened.idle:
            return
        if self._delay:
            self.bias()
        for index in self._places:
            self.merge(index)

    def _refuse_nonfinite(self, segment: Segment, pieces: Pieces) -> None:
        if segment.on_device:
            self._unseen.add(segment.index)  # looked at when it has come from there: now would be a wait
        # One pass, which a single NaN or Inf poisons; only then each parameter on its own.
        elif not all(math.isfinite(float(target.sum())) for _, target in pieces):
            self._raise_nonfinite(segment, pieces, (self.opened.peer.rank,))

    def _raise_nonfinite(self, segment: Segment, pieces: Pieces, ranks: Sequence[int]) -> None:
        """Raise for NaN or Inf in what `ranks` of the scope gave; parameters hold it, whoever it came from."""
        values = torch.cat([target for _, target in pieces])
        names = [s.name for s in segment.spans if not bool(torch.isfinite(values[s.start : s.stop]).all())]
        if names:
            whose = " and ".join(str(self.opened.ranks[rank]) for rank in ranks)
            raise NonFiniteError(
                f"parameter {some(names)} of rank {whose} is NaN or Inf after step {self._step}, in what "
                f"{self.opened.exchange.name} exchanges: lower the learning rate, or clip gradients"
            )


def _fuses(segment: Segment, pieces: Pieces, merges: Merge) -> bool:
    """Return whether one compiled pass is worth its start, and can be: of merge add, on the CPU, of one dtype."""
    target = pieces[0][1]
    same = target.dtype == segment.outgoing.dtype == segment.incoming.dtype
    alike = same and target.device.type == "cpu" and len(pieces) == 1 and isinstance(merges, Add)
    return alike and segment.numel >= _SMALLEST_FUSED
