"""The exchange of gradients: from autograd's hooks to `p.grad`, which then holds the strategy's combination.

When a parameter's gradient is in, its hook copies it, scaled, into the segment that will be sent and lets go of it;
when `backward()` ends, `p.grad` is bound to a view of the result. With overlap backward a segment is sent as
soon as its last gradient is in; with overlap none all are sent when backward has ended. The slot's exchanges follow
each other segment by segment: the next one sends the result of the one before, between the same two buffers.

Behind a segment's data travels a trailer through the same linear combinations: the rank's weight, whether it
holds NaN or Inf, and for each parameter whether it had a gradient. So a mean over ranks with different weights (0
for one that is out of data) is right, and a parameter without gradient on every rank keeps `grad None`, as the
optimizer expects it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from hocket.errors import AttachError, HocketError, SessionError
from hocket.plan.layout import FIRST_PRESENCE, NONFINITE, WEIGHT
from hocket.session.exchange.active import ActiveExchange
from hocket.session.exchange.segment_state import GradientSlot, SegmentState, Stage
from hocket.session.island import Island
from hocket.session.step.account import Account
from hocket.session.step.grad_scaler import loss_scale, scaler_in_use, watch_scalers
from hocket.session.step.optimizer_terms import AppliedTerms
from hocket.session.step.parameter_hooks import ParameterHooks
from hocket.session.step.state import StepState
from hocket.session.step.weights import NOTHING, Agreement, Contribution
from hocket.session.torch_internals import (
    at_end_of_backward,
    current_backward,
    is_nested_backward,
)
from hocket.strategy.exchange import Exchange, Overlap

__all__ = ["GradientSync", "Stage"]


class GradientSync:
    """The exchange of one model's gradients: sets hooks, sends segments and binds results to `p.grad`.

    Args:
        parameters: the trainable ones by name.
        opened: the slot's exchanges that this rank takes part in, over more than one rank, in order; the first has
            all of the model's segments.
        segments: the state of each segment on its way through them.
        exchanges: the slot's on all ranks.
        begin: called before a backward's gradients are sent; returns this rank's contribution to the step's mean.
        state: the session's, which says whether backwards only add to `p.grad`, and notes that results are there.
        terms: the optimizer's terms that the first exchange's compressor applies.
        agreement: of ranks on weights and finiteness before compressors update residuals; None without residuals.
        island: the ranks that hold this replica together, which leave steps out together.
        may_skip: whether steps with NaN or Inf are left out.
        several: whether several optimizers step.

    Attributes:
        contribution: what this rank has put into the last exchange.
        weight: what the batches of all ranks counted, on average, whose gradients came with the last exchange.
        account: of what compressors and partial sums remember; None where nothing is.
        nonfinite: the parameters of this rank's last contribution that held NaN or Inf.
        nonfinite_anywhere: whether a rank's last contribution held NaN or Inf, or an earlier one that it was added to.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        opened: Sequence[ActiveExchange],
        segments: Sequence[Sequence[Stage]],
        exchanges: Sequence[Exchange],
        begin: Callable[[], Contribution],
        state: StepState,
        terms: AppliedTerms | None,
        agreement: Agreement | None,
        island: Island,
        *,
        may_skip: bool,
        several: bool,
    ) -> None:
        self._island = island
        self._exchanges, self._open = opened, opened[0]
        self._begin, self._state = begin, state
        self.contribution, self.weight = NOTHING, 0.0
        self.terms, self._agreement = terms, agreement
        self._early = self._open.exchange.overlap is Overlap.BACKWARD
        self._segments = [SegmentState(stages, parameters, exchanges) for stages in segments]
        self.account = self._open_account(may_skip=may_skip, several=several)
        if agreement is None and self._open.channel.packing is None:
            for segment in (state.first for state in self._segments if state.first.on_device):
                segment.flag = segment.numel + NONFINITE
        # Of lanes on a device all ranks begin segments in their order: one that is ready early is held.
        self._ordered = any(opened.ordered for opened in self._exchanges)
        self._next = 0
        self._backward: int | None = None
        self._factor = 0.0
        # What is sent and remembered must not depend on a scale that changes, and that ranks may not share.
        self._loss_scale = 1.0
        watch_scalers()
        # Whether what `p.grad` holds is exchanged outside of a backward.
        self._by_hand = False
        self.nonfinite: list[str] = []
        self.nonfinite_anywhere = False
        # This rank's parameters of the round before, where a rank had NaN or Inf in it.
        self._nonfinite_before: list[str] | None = None
        self._hooks = ParameterHooks()

    def _open_account(self, *, may_skip: bool, several: bool) -> Account | None:
        """Return the account of what compressors and partial sums remember; None where nothing is."""
        has_agreement = self._agreement is not None
        # Where what comes is no mean, but a sum of what came in time, it must not be contributed again either.
        if not has_agreement and all(state.divides for state in self._segments):
            return None
        early = has_agreement and self._early
        rank = self._open.peer.rank
        account = Account(self._segments, rank, early=early, may_skip=may_skip, several=several)
        if self.terms is not None:
            self.terms.on_written = account.note_written
        return account

    def hook(self) -> None:
        """Set the parameters' hooks."""
        self._hooks.set(self._slots(), self._arrived, self.account)

    def _hook_unfrozen(self) -> None:
        """Set the hooks of parameters that were frozen when the others' were set, from their second backward on."""
        unfrozen = self._hooks.take_unfrozen()
        if unfrozen:
            self._hooks.set(unfrozen, self._arrived, self.account)

    def _slots(self) -> Iterator[GradientSlot]:
        return (gradient for state in self._segments for gradient in state.gradients)

    def _arrived(self, gradient: GradientSlot) -> None:
        """Take over a gradient that backward has just finished."""
        if self._state.accumulating:
            return
        if current_backward() != self._backward:
            self._begin_backward()
        if self._hooks.held and gradient in self._hooks.held:
            return
        state = gradient.state
        self._contribute(gradient)
        # Freed at once, so that backward can reuse the memory; bound again when backward ends.
        gradient.parameter.grad = None
        state.missing -= 1
        if self._ordered:
            self._send_in_order()
        elif self._early and state.missing == 0 and self._knows_enough(state):
            self._send(state)
        self._open.progress.advance()
        if len(self._exchanges) > 1 and not self._ordered:
            for each in self._segments:
                each.advance()

    def _send_in_order(self) -> None:
        """Send the next segments that are complete, in order."""
        while self._early and self._next < len(self._segments) and not self._segments[self._next].missing:
            self._send(self._segments[self._next])
            self._next += 1

    @property
    def dropped(self) -> bool:
        """Tell whether no parameter holds the gradient that the last exchange bound to it."""
        return not any(gradient.base is not None or gradient.holds_result for gradient in self._slots())

    def _begin_backward(self) -> None:
        if is_nested_backward():
            raise AttachError(
                "a backward ran inside another one (checkpoint with use_reentrant=True?), so Hocket cannot know "
                "when gradients are complete. Use torch.utils.checkpoint.checkpoint(..., use_reentrant=False), "
                "which gives the same gradients"
            )
        if torch.is_grad_enabled():
            raise SessionError(
                "backward(create_graph=True): an exchanged gradient has no graph, so it cannot be differentiated "
                "again. Use torch.autograd.grad(loss, inputs, create_graph=True) for the graph and plain "
                "backward(), or a strategy that does not exchange gradients (dpsgd)"
            )
        contribution = self._begin()
        self._backward = current_backward()
        self._hooks.begin_backward()
        self._begin_round(contribution, loss_scale())
        if self.account is not None and self.account.rounds:
            self._note_another_round()
        try:
            at_end_of_backward(self._end_backward)
        except AssertionError as error:  # torch's own word on it
            raise SessionError(
                f"Hocket cannot know when compiled autograd has finished this backward ({error}): turn it off "
                "(torch._dynamo.config.compiled_autograd = False); the model's forward can still be compiled"
            ) from error

    def _note_another_round(self) -> None:
        """Note a step's second backward.

        Raises:
            SessionError: FSDP has added its gradients to those that came with the first.
        """
        if self._island.gathers:
            raise SessionError(
                f"rank {self._island.everyone.rank}: backward() ran twice before optimizer.step(), but FSDP adds the "
                "second's gradients to those that the first already exchanged and compressed: put all but the last "
                "backward of a step into session.accumulate(), or use a strategy without a compressor (sgd, agd)"
            )
        if self.terms is not None:
            self.terms.note_another_round()

    def _begin_round(self, contribution: Contribution, loss_scale: float = 1.0) -> None:
        if not all(opened.idle for opened in self._exchanges):
            raise HocketError(
                "the last backward() failed after it had begun to send gradients, so this rank is out of step with the "
                "others: start the job again from its last checkpoint"
            )
        self._loss_scale = loss_scale
        if self._agreement is not None:
            contribution = self._agreement.weigh(contribution)
        if self.terms is not None:
            self.terms.read()
        if self.account is not None:
            self.account.begin_round(spoiled=self.nonfinite_anywhere)
        self.contribution = contribution
        self._factor = contribution.factor * self._open.scale
        self._nonfinite_before = self.nonfinite if self.nonfinite_anywhere else None
        self.nonfinite = []
        self._next = 0
        for state in self._segments:
            state.reset(self._factor / loss_scale)

    def _contribute(self, gradient: GradientSlot) -> None:
        """Copy this rank's gradient of a parameter into its segment."""
        kept = self.contribution.kept
        given = gradient.parameter.grad if kept is None else kept.get(gradient.parameter)
        gradient.take(given)

    def _end_backward(self) -> None:
        self._backward = None
        self._finish_round()
        self._hooks.end_backward()
        self._hook_unfrozen()

    def _finish_round(self) -> None:
        """Send the remaining segments, wait for all, and bind the results."""
        waiting = [state for state in self._segments if state.at < 0]
        with torch.no_grad():  # which a backward has off for its hooks
            for state in waiting:
                self._contribute_late(state)
        before = self._nonfinite_before
        adds_to_nonfinite = before is not None and any(state.adds_up for state in self._segments)
        finite = self._agreement is None or self._agree(self._agreement, waiting)
        if finite or self._early:  # with overlap backward others may wait for it already
            self._exchange(waiting)
        if not finite:
            self._leave_out()
        if adds_to_nonfinite and before is not None:
            self.nonfinite, self.nonfinite_anywhere = list(dict.fromkeys(before + self.nonfinite)), True
        if self.account is not None:
            self.account.end_round()
        self._state.move("exchange")

    def _exchange(self, waiting: Sequence[SegmentState]) -> None:
        """Send the waiting segments, and bind each segment's result when it arrives."""
        packing = self._open.channel.packing
        if packing is not None and packing.traits.prepares:
            packing.compressor.prepare(
                self._open.segments, self._open.round, self._open.peer.size, self._factor
            )
        # Where lanes are ordered, an exchange begins all segments before the next one does: ranks that take part in
        # others of a segment's exchanges would each come to the next one at another time.
        held = self._ordered and len(self._exchanges) > 1
        for state in waiting:
            self._send(state)
            if not (self._early or state.in_place or held):
                # Messages are faster one after the other than all at once, which thrash the caches. With overlap
                # backward ranks may have begun different segments, and waiting here could be for ever.
                state.finish()
        self._pass_all_on()
        for state in self._segments:
            state.finish()
            state.bind(self._loss_scale)
        trailers = [state.last.incoming_trailer for state in self._segments]
        self.weight = float(trailers[0][WEIGHT])
        if self._agreement is not None:
            self.weight *= self._agreement.mean
        self.nonfinite_anywhere = self._island.any(any(trailer[NONFINITE] != 0 for trailer in trailers))
        if self.nonfinite_anywhere:
            for state in (state for state in self._segments if state.first.flag is not None):
                self.nonfinite += state.flagged()

    def _pass_all_on(self) -> None:
        """Start the next exchange of all segments before waiting for the last one.

        It goes exchange by exchange, as leaders of a segment take part in more of them than other ranks do.
        """
        for opened in self._exchanges[1:]:
            for state in self._segments:
                if state.is_before(opened):
                    state.pass_on()

    def _knows_enough(self, state: SegmentState) -> bool:
        """Return whether a segment can be sent before ranks agree on the parameters with a gradient."""
        return self.terms is None or bool(state.present.all())

    def _agree(self, agreement: Agreement, waiting: Sequence[SegmentState]) -> bool:
        """Find the parameters with a gradient on any rank; return whether all are finite; collective."""
        for state in waiting:
            self._look(state)
        present, anywhere = ([getattr(p, name) for p in self._segments] for name in ("present", "anywhere"))
        return agreement.agree(present, anywhere, finite=not self._island.any(bool(self.nonfinite)))

    def _leave_out(self) -> None:
        """Fill every segment with NaN so that all ranks skip the step, and undo residual updates."""
        for state in self._segments:
            state.spoil()
        self.nonfinite_anywhere = True
        if self.account is not None:
            self.account.undo()

    def _contribute_late(self, state: SegmentState) -> None:
        """Contribute parameters that this backward did not reach: from an earlier one, or as absent."""
        for gradient in state.gradients:
            if not gradient.arrived:
                if self.account is not None and gradient in self.account.unstepped:
                    self.account.set_aside(gradient, by_hand=self._by_hand)  # no backward has
                self._contribute(gradient)

    def _send(self, state: SegmentState) -> None:
        segment = state.first
        if segment.flag is not None:
            state.flag_nonfinite()
        elif segment.finite is None:
            self._look(state)
        share = self.contribution.weight * self._open.scale
        trailer = segment.outgoing_trailer
        trailer[WEIGHT] = share
        if segment.flag is None:
            trailer[NONFINITE] = float(not segment.finite)
        np.multiply(state.present, self._open.scale, out=trailer[FIRST_PRESENCE:])
        if self.terms is not None:
            continues = [gradient.base is not None for gradient in state.gradients]
            self.terms.give(segment, state.present + state.anywhere != 0, share, continues)
        if self.account is not None:
            self.account.hold(state)
        state.begin()

    def _look(self, state: SegmentState) -> None:
        """Find NaN and Inf in a segment before it is sent."""
        bad = state.nonfinite()
        self.nonfinite += bad
        state.first.finite = not bad

    def exchange(self) -> None:
        """Exchange the contents of `p.grad`, outside of a backward, and bind the result."""
        self._by_hand = True
        try:
            self._begin_round(self._begin())
            self._finish_round()
        finally:
            self._by_hand = False

    def take_part(self) -> None:
        """Take part in a step's exchange without a gradient, and bind the other ranks' mean."""
        self._begin_round(NOTHING)
        self._finish_round()

    def before_step(self) -> None:
        """Take the optimizer's terms out of the step that follows."""
        if self.terms is not None:
            # A scaler that unscales has changed them all.
            changed = None if self.account is None or scaler_in_use() else self.account.changed()
            self.terms.suspend()
            if changed is not None:
                self.terms.note_changed(changed.name)

    def end_step(self, optimizer: Optimizer, *, used: bool) -> None:
        """Take note of an optimizer's step, or of one that was left out."""
        if self.account is not None:
            self.account.end_step(optimizer, used=used)
        if self.terms is not None:
            self.terms.end_step()

    def close_lane(self) -> None:
        """Close the lane of the ranks' agreement; collective."""
        if self._agreement is not None:
            self._agreement.close()

    def close(self) -> None:
        """Remove the hooks; gradients become tensors of their own."""
        self._hooks.close()
        for state in self._segments:
            state.unbind()
