"""The account of compressors' states: contributed = applied + remembered, whatever a loop does between steps.

A compressor's residual and velocity change when gradients are sent, long before an optimizer uses the result. So until
it has:

- Another backward adds to the step's earlier ones: it contributes its own gradients alone, whose result is added to
  `p.grad`, and its velocity goes on without a second momentum and weight decay.
- Gradients that are dropped (`zero_grad`, zeros in `p.grad`, or a step that is left out) are taken out of residuals and
  velocities again.
- A backward adds in the same way where results are sums, not means (partial allreduces): late parts count once. Of
  dropped ones a rank takes its own part out of its next contribution, and carries what came, with others' late parts,
  to its next result, or the next phase.
- A parameter that has a gradient on no rank, as a frozen one, sends nothing of its residual, and keeps all of it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from hocket.collective.packing import Packing
from hocket.segment.segment import Segment
from hocket.session.exchange.segment_state import GradientSlot, SegmentState
from hocket.session.step.kept_values import KeptValues
from hocket.session.step.optimizers import parameters_of
from hocket.session.torch_internals import current_backward

_log = logging.getLogger("hocket")

#: In so many rounds states are copied before they change; later only where that costs little, or was of use. With one
#: optimizer in the first alone, where they are zeros: who drops gradients then drops them in every step.
_FIRST_ROUNDS = 48
_FEW_BYTES = 8 << 20
#: In so many rounds it is looked which results are zero; later only in programs with several backwards a step.
_FIRST_LOOKS = 4


class _StateTensor:
    """A tensor of a compressor's state, and a copy from before gradients were sent that no optimizer has used."""

    def __init__(self, now: Tensor, *, is_momentum: bool) -> None:
        self.now = now
        self.is_momentum = is_momentum
        self.made = False
        # None while there is none, or while it is of zeros, which take no memory.
        self._before: Tensor | None = None

    def keep(self) -> None:
        """Copy the tensor."""
        if self._before is None and (self.made or self.now.any()):
            self._before = torch.empty_like(self.now)
        if self._before is not None:
            self._before.copy_(self.now)
        self.made = True

    def keep_at(self, place: slice) -> None:
        """Bring a part of the copy up to date."""
        if self.made and self._before is None:
            self._before = torch.zeros_like(self.now)
        if self._before is not None:
            self._before[place] = self.now[place]

    def forget(self) -> None:
        """Free the copy."""
        self.made, self._before = False, None

    def undo_at(self, place: slice) -> None:
        """Give a part of the tensor the values of the copy."""
        self.now[place] = 0 if self._before is None else self._before[place]


class Account:
    """The account of one slot's compressors on this rank.

    Args:
        segments: each segment's way through the slot's exchanges.
        rank: this rank, for warnings.
        early: whether segments are sent before ranks have agreed that all are finite, so that `undo` may be called.
        may_skip: whether steps with NaN or Inf are left out from the start.
        several: whether several optimizers step, one of which may drop what another one's loss has sent.

    Attributes:
        unstepped: the parameters whose gradients have been exchanged since an optimizer has stepped them.
        rounds: number of rounds since an optimizer has stepped.
    """

    def __init__(
        self, segments: Sequence[SegmentState], rank: int, *, early: bool, may_skip: bool, several: bool
    ) -> None:
        self._rank = rank
        self._slots = frozenset(slot for state in segments for slot in state.gradients)
        self._sums = {slot: slot.sums for slot in self._slots if slot.sums is not None}
        self._slots_of: dict[Optimizer, frozenset[GradientSlot]] = {}
        self.unstepped: set[GradientSlot] = set()
        self.rounds = 0
        self._slot_of: dict[Tensor, GradientSlot] = {slot.parameter: slot for slot in self._slots}
        self._kept = {state: list(_remembered(state)) for state in segments}
        nbytes = sum(kept.now.nbytes for of_segment in self._kept.values() for kept in of_segment)
        nbytes += sum(state.results.nbytes for state in segments if not state.divides)
        first_rounds = _FIRST_ROUNDS if several else 1
        self._rounds_to_copy: float = float("inf") if nbytes <= _FEW_BYTES else first_rounds
        self._warned = False
        self._looks: float = _FIRST_LOOKS
        self._rounds_begun = 0
        # The gradients that were set to zero, and the backward, or the round outside of any, before which they were.
        self._zeroed: set[GradientSlot] = set()
        self._looked_before = (0, 0)
        # What parameters without a gradient remember, while others' is sent.
        self._held = KeptValues()
        self._undone = {packing for state in segments for packing, _ in _packed(state)} if early else set()
        self._can_undo = may_skip

    # ---- of a step ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def set_aside(self, slot: GradientSlot, *, by_hand: bool = False) -> None:
        """Set aside the result of a parameter's earlier rounds in the step, so that the next round adds to it.

        Args:
            slot: one of `unstepped`, whose gradient is about to change or to be read.
            by_hand: whether a program has put another tensor than the last result into `p.grad`, to be sent.
        """
        gradient = slot.parameter.grad
        is_new = slot.base is None and by_hand and not slot.holds_result
        if gradient is None or is_new or slot in self._zeroed_before_this():
            self._drop(slot)  # zeros stay there, by which momentum and weight decay go on
        elif slot.base is None:  # else a backward has only added to `p.grad`
            if slot.sums is not None:
                slot.sums.note_sent(slot.outgoing)
            slot.base = slot.part_with_result() if gradient is slot.result else gradient
            slot.parameter.grad = None

    def _zeroed_before_this(self) -> set[GradientSlot]:
        """Return the gradients that were set to zero since the exchange; waits for a device once per backward."""
        backward = current_backward()
        now = (backward, 0 if backward >= 0 else self._rounds_begun)
        if now != self._looked_before:
            self._looked_before, self._looks = now, float("inf")
            self._zeroed = _zeroed_of([slot for slot in self.unstepped if slot.parameter.grad is not None])
        return self._zeroed

    def begin_round(self, *, spoiled: bool) -> None:
        """Prepare to undo the changes of the round that begins; `spoiled` says whether the last one held NaN or Inf."""
        if spoiled and self._undone and not self._can_undo:
            self._can_undo = True
            _log.warning(
                "a GradScaler or the training loop skipped a step with NaN or Inf after its gradients were sent, so "
                "what compressors had kept for this step is lost. From now on it is kept; on_nonfinite='skip' keeps it "
                "from the start"
            )
        for packing in self._undone:
            packing.keep(self._can_undo)
        self._rounds_begun += 1
        if self._rounds_to_copy < 0:
            return
        self._rounds_to_copy -= 1
        if self._rounds_to_copy < 0:  # the copies are of an earlier round from now on
            for kept in (kept for of_segment in self._kept.values() for kept in of_segment):
                kept.forget()
            return
        for state, of_segment in self._kept.items():
            if not self.unstepped or self.unstepped.isdisjoint(state.gradients):
                for kept in of_segment:
                    kept.keep()
                continue
            for slot in state.gradients:
                if slot not in self.unstepped:
                    for kept in of_segment:
                        kept.keep_at(state.place_of(slot))

    def undo(self) -> None:
        """Restore the states from before the round, in which some rank has NaN or Inf."""
        for packing in self._undone:
            packing.restore()

    def end_round(self) -> None:
        """Note that all parameters' gradients have been exchanged."""
        self._held.give_back()
        self.unstepped = set(self._slots)
        self._looks -= 1
        for slot in self._slots:
            gradient = slot.note_version()
            slot.brought = gradient.any() if self._looks >= 0 and gradient is not None else None
            if slot.sums is not None:
                copies = gradient is not None and self._rounds_to_copy > 0
                slot.sums.copy = gradient.clone() if copies and gradient is not None else None
        self.rounds += 1

    def changed(self) -> GradientSlot | None:
        """Return a parameter whose gradient has changed since the exchange, and that no step has used."""
        return next((slot for slot in self.unstepped if slot.was_changed or slot.was_replaced), None)

    def end_step(self, optimizer: Optimizer, *, used: bool) -> None:
        """Note an optimizer's step, or one that was left out."""
        self.rounds = 0
        if not self.unstepped:
            return
        if optimizer not in self._slots_of:
            stepped = set(parameters_of(optimizer))
            self._slots_of[optimizer] = frozenset(slot for slot in self._slots if slot.parameter in stepped)
        for slot in self.unstepped & self._slots_of[optimizer]:
            if not used or slot.parameter.grad is None:
                self._drop(slot)
            elif slot.sums is not None:
                slot.sums.sent = None
        self.unstepped -= self._slots_of[optimizer]

    @torch.no_grad()
    def note_written(self, parameter: Tensor) -> bool:
        """Note that a velocity was written; return whether gradients that were sent before still wait for a step."""
        slot = self._slot_of[parameter]
        if slot not in self.unstepped:
            return False
        for kept in self._kept[slot.state]:
            if kept.is_momentum:
                kept.keep_at(slot.state.place_of(slot))
        return parameter.grad is not None

    def drop_unused(self) -> None:
        """Take out gradients that no optimizer has used and `p.grad` no longer holds, before states are handed on."""
        for slot in [slot for slot in self.unstepped if slot.parameter.grad is None]:
            self._drop(slot)

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return what is carried and owed for dropped sums, by parameter."""
        sums = self._sums.items()
        carried = {slot.name: each.carry for slot, each in sums if each.carry is not None}
        return {"carried": carried, "owed": {s.name: each.owed for s, each in sums if each.owed is not None}}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Continue from a result of `state_dict`."""
        self.unstepped.clear()
        for slot in self._slots:
            slot.base = None
        for slot, sums in self._sums.items():
            carried, owed = state["carried"].get(slot.name), state["owed"].get(slot.name)
            sums.sent = None
            sums.carry = None if carried is None else carried.to(slot.result, copy=True)
            sums.owed = None if owed is None else owed.to(slot.outgoing, copy=True)

    def take_carried(self, scale: float) -> dict[str, Tensor]:
        """Take this rank's share in the mean of what ranks carry for dropped sums, less what they owe.

        Args:
            scale: of the ranks' contributions.

        Returns:
            It by parameter, flat; for all parameters whose results are sums, so that ranks have the same.
        """
        return {slot.name: sums.take_share(slot.outgoing, scale) for slot, sums in self._sums.items()}

    @torch.no_grad()
    def _drop(self, slot: GradientSlot) -> None:
        """Undo the changes of states by this step's gradients of a parameter."""
        self.unstepped.discard(slot)
        sums = slot.sums
        if sums is not None and slot.came:
            if slot.base is None:
                sums.note_sent(slot.outgoing)
            if not sums.drop(slot.came_so_far(), slot.state.factor):
                self._warn()
        slot.base = None
        if sums is not None:
            sums.sent = None
        if not slot.came:  # no rank had a gradient, so no state has changed
            return
        for kept in self._kept[slot.state]:
            if kept.made:
                kept.undo_at(slot.state.place_of(slot))
            else:
                self._warn()
        self._rounds_to_copy = float("inf")

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            _log.warning(
                "rank %d: gradients were sent, but no optimizer stepped with them, so what compressors kept or what "
                "arrives late is applied later. From now on Hocket removes it. To have that from the start, call "
                "backward() and zero_grad() once on all ranks before the first step",
                self._rank,
            )

    # ---- of a round --------------------------------------------------------------------------------------------

    def hold(self, state: SegmentState) -> None:
        """Keep the residuals of parameters without a gradient on any rank out of the next message."""
        if state.present.all():
            return
        there = state.present + state.anywhere
        absent = [slot for slot in state.gradients if not there[slot.position]]
        places = [state.place_of(slot) for slot in absent]
        for packing, segment in _packed(state):
            of_segment = packing.states[segment.index]
            self._held.keep(of_segment.residual, places, empty=True)
            self._held.keep(of_segment.momentum, places)


def _zeroed_of(slots: Sequence[GradientSlot]) -> set[GradientSlot]:
    """Return the gradients that are zero now and were not after the exchange, as far as that was checked."""
    dense = {
        slot: g for slot in slots if (g := slot.parameter.grad) is not None and g.layout == torch.strided
    }
    flags = {slot: b for slot in dense if slot.base is None and (b := slot.brought) is not None}
    nonzero = dict(zip(dense, _read([gradient.any() for gradient in dense.values()]), strict=True))
    brought = dict(zip(flags, _read(list(flags.values())), strict=True))
    # Where nobody has looked, gradients that are zero all together were set to that.
    all_zero = len(dense) == len(slots) and not any(nonzero.values())
    zeroed = set()
    for slot, gradient in dense.items():
        changed = gradient._version != 0 if slot.base is not None else slot.was_changed
        if nonzero[slot]:
            continue
        # A sum is zero on a rank that has caught up, too.
        known = brought.get(slot, changed or (all_zero and slot.state.divides))
        if known or (changed and not slot.state.divides):
            zeroed.add(slot)
    return zeroed


def _read(flags: Sequence[Tensor]) -> list[bool]:
    values: list[bool] = torch.stack([flag.to(flags[0].device) for flag in flags]).tolist() if flags else []
    return values


def _packed(state: SegmentState) -> Iterator[tuple[Packing, Segment]]:
    for opened, segment in state.stages:
        if opened.channel.packing is not None:
            yield opened.channel.packing, segment


def _remembered(state: SegmentState) -> Iterator[_StateTensor]:
    for packing, segment in _packed(state):
        of_segment = packing.states[segment.index]
        for tensor, is_momentum in ((of_segment.residual, False), (of_segment.momentum, True)):
            if tensor is not None:
                yield _StateTensor(tensor, is_momentum=is_momentum)
