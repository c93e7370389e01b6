"""The momentum and weight decay that a compressor applies in the optimizer's place, read in each step."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hocket.arrays import Array
from hocket.compressor.optimizer_terms import OptimizerTerms, optimizer_terms, settings_of
from hocket.config.component import component_name
from hocket.segment.segment import Segment, view_of
from hocket.segment.shards import like, local, part_of, whole_of
from hocket.session.exchange.active import ActiveExchange
from hocket.session.refusals import override_of
from hocket.session.step.momentum_state import BUFFER, MomentumState, buffer_of
from hocket.session.step.optimizers import Optimizers, parameters_of
from hocket.transport.peer import Peer

_log = logging.getLogger("hocket")


class AppliedTerms:
    """The terms of torch's SGD that an exchange's compressor applies, so that the optimizer does not.

    The momentum buffers that the optimizer holds become the compressor's, shared out over the ranks, and are the
    optimizer's again after `hand_back`. Meanwhile the optimizer's state has this rank's share of them, and values that
    are written, cleared or loaded there become the compressor's.

    Args:
        optimizers: torch's SGD, one or several.
        opened: the exchange of gradients whose compressor takes terms over.
        parameters: the trainable ones by name.
        peer: the ranks whose contributions end in one mean.

    Raises:
        AttachError: the optimizer is not SGD, or has settings that are not supported.
    """

    def __init__(
        self,
        optimizers: Optimizers,
        opened: ActiveExchange,
        parameters: Mapping[str, nn.Parameter],
        peer: Peer,
    ) -> None:
        assert opened.channel.packing is not None  # "none" takes nothing over
        self._optimizers = optimizers
        self._opened = opened
        self._packing = opened.channel.packing
        self._parameters = parameters
        self._peer = peer
        self._terms: dict[Tensor, OptimizerTerms] = {}
        # What they were made of: of each group its settings, and its parameters; and the terms of each segment's.
        self._settings: list[tuple[float, float, bool]] = []
        self._members: list[Tensor] = []
        self._of_segments: dict[int, list[OptimizerTerms | None]] = {}
        self._suspended: list[dict[str, float]] | None = None
        self._warned_of_shares = self._warned_of_rounds = self._warned_of_late = self._warned_of_changes = (
            False
        )
        #: Called with a parameter whose velocity was set; returns whether gradients of it wait for a step.
        self.on_written: Callable[[Tensor], bool] = lambda _: False
        self._velocities: dict[Tensor, Tensor] = {}
        for segment, momentum in self._momenta():
            self._velocities |= self._views(segment, momentum)
        # The optimizers' state of parameters that have been stepped, and all that was in each optimizer's then.
        self._states: dict[Tensor, MomentumState] = {}
        self._seen: dict[Optimizer, list[Any]] = {}
        self.read()
        self._take_buffers(optimizers.given)
        self._handles = [
            handle
            for optimizer in optimizers.given
            for handle in (
                optimizer.register_state_dict_post_hook(self._add_buffers),
                optimizer.register_load_state_dict_post_hook(lambda loaded: self._take_buffers([loaded])),
            )
        ]

    def read(self) -> None:
        """Read the terms of this step, as schedulers change them."""
        within_step = self._suspended is not None  # a closure's backward
        self._take_written()
        self.resume()
        settings = list(map(settings_of, self._optimizers.param_groups))
        members = [parameter for group in self._optimizers.param_groups for parameter in group["params"]]
        if settings != self._settings or not _are_same(members, self._members):
            self._settings, self._members = settings, members
            self._terms, self._of_segments = {}, {}
            for optimizer in self._optimizers.given:
                self._terms |= optimizer_terms(optimizer)
        if within_step:
            self.suspend()

    def note_another_round(self) -> None:
        """Warn once that `p.grad` holds velocity between the backwards of one step."""
        if self._warned_of_rounds or not any(terms.momentum for terms in self._terms.values()):
            return
        self._warned_of_rounds = True
        _log.warning(
            "rank %d: between two backward() of one step, p.grad holds momentum instead of the gradient, because "
            "compressor %s applies momentum before it sends. Steps are right. If your code reads p.grad there (SAM, "
            "FGM, gradient surgery), set %s, which leaves momentum to the optimizer",
            self._peer.rank,
            component_name(self._packing.compressor),
            self._cure(),
        )

    def note_changed(self, name: str) -> None:
        """Warn once that a change of `p.grad` before the step does not reach the momentum."""
        if self._warned_of_changes or not any(terms.momentum for terms in self._terms.values()):
            return
        self._warned_of_changes = True
        _log.warning(
            "rank %d: p.grad of %s was changed between backward() and optimizer.step() (clipped, scaled, masked). "
            "Compressor %s had already applied momentum, so later steps miss the change. Clip by local_clipping around "
            "the compressor, or set %s, which leaves momentum to the optimizer",
            self._peer.rank,
            name,
            component_name(self._packing.compressor),
            self._cure(),
        )

    def _cure(self) -> str:
        """Return the override that leaves momentum to the optimizer."""
        compressor = self._packing.compressor
        key = f"{self._opened.exchange.name}.compressor"
        return override_of(key, compressor, compressor.without_optimizer_terms())

    def give(self, segment: Segment, present: Array, share: float, continues: Sequence[bool]) -> None:
        """Pass the compressor the terms of a segment that is about to be compressed.

        Args:
            segment: of gradients.
            present: for each parameter, whether it has a gradient on any rank.
            share: this rank's share of the sum of weights.
            continues: for each parameter, whether an earlier round of this step had a gradient for it.
        """
        if segment.index not in self._of_segments:
            self._of_segments[segment.index] = [
                self._terms.get(self._parameters[span.name]) for span in segment.spans
            ]
        terms = self._of_segments[segment.index]
        if not present.all():
            terms = [each if has else None for each, has in zip(terms, present, strict=True)]
        if any(continues):
            terms = [
                each and each.continued() if on else each for each, on in zip(terms, continues, strict=True)
            ]
        self._packing.states[segment.index].take(terms, share)

    def suspend(self) -> None:
        """Take the terms out of the optimizer's step that follows."""
        self._take_written()
        if self._suspended is not None:  # the last step failed, and its terms have not come back
            return
        taken = self._packing.traits.applies_optimizer_terms
        self._suspended = [{name: group[name] for name in taken} for group in self._optimizers.param_groups]
        for group in self._optimizers.param_groups:
            group.update(dict.fromkeys(taken, 0.0))

    def resume(self) -> None:
        """Put the terms back, for schedulers and other readers."""
        if self._suspended is not None:
            for group, terms in zip(self._optimizers.param_groups, self._suspended, strict=True):
                group.update(terms)
            self._suspended = None

    def learning_rate(self, parameter: nn.Parameter) -> float:
        """Return a parameter's learning rate from its param group now; 0 if no optimizer steps it."""
        groups = self._optimizers.param_groups
        return next(
            (float(group["lr"]) for group in groups if any(part_of(p) is parameter for p in group["params"])),
            0.0,
        )

    def end_step(self) -> None:
        """Let the optimizers' state have the momentum that a step has left."""
        if len(self._states) < len(self._velocities):
            for optimizer, parameter in self._owned():
                terms = self._terms.get(parameter)
                if parameter not in self._states and parameter.grad is not None and terms and terms.momentum:
                    self._put_state(optimizer, parameter, _state_in(optimizer, parameter))
            self._note_states()
        for state in self._states.values():
            state.renew()

    @torch.no_grad()
    def _take_written(self) -> None:
        """Set the compressor's velocity from changes to the optimizers' state."""
        written = [parameter for parameter, state in self._states.items() if state.take()]
        if any(map(_differs, self._seen, self._seen.values())):
            for optimizer, parameter in self._owned():
                now = _state_in(optimizer, parameter)
                own = self._states.get(parameter)
                if now is not own and (own is not None or BUFFER in now):
                    self._take_buffer(optimizer, parameter)
                    written.append(parameter)
            self._note_states()
        late = [parameter for parameter in written if self.on_written(parameter)]
        if late and not self._warned_of_late:
            self._warned_of_late = True
            compressor = component_name(self._packing.compressor)
            name = next(name for name, each in self._parameters.items() if each is late[0])
            _log.warning(
                "rank %d: the optimizer's momentum of %s was changed between backward() and optimizer.step(). "
                "Compressor %s had already applied the old momentum, so the change takes effect one step late. Change "
                "it before backward(), or set %s, which leaves momentum to the optimizer",
                self._peer.rank,
                name,
                compressor,
                self._cure(),
            )

    def _owned(self) -> Iterator[tuple[Optimizer, Tensor]]:
        """Yield the parameters whose velocity is the compressor's, with their optimizers."""
        for optimizer in self._optimizers.given:
            for parameter in parameters_of(optimizer):
                if parameter in self._velocities:
                    yield optimizer, parameter

    def _note_states(self) -> None:
        """Be able to tell whether somebody takes states out, or puts others in."""
        self._seen = {optimizer: list(optimizer.state.values()) for optimizer in self._optimizers.given}

    def _put_state(self, optimizer: Optimizer, parameter: Tensor, given: Mapping[str, Any]) -> None:
        state = MomentumState(parameter, self._velocities[parameter], self._opened.scale, given)
        self._states[parameter] = optimizer.state[whole_of(parameter)] = state

    @torch.no_grad()
    def _take_buffers(self, optimizers: Sequence[Optimizer]) -> None:
        """Set velocities from the optimizers' buffers, at attach and when their state was loaded."""
        for optimizer, parameter in self._owned():
            if optimizer in optimizers:
                self._take_buffer(optimizer, parameter)
        self._note_states()

    def _take_buffer(self, optimizer: Optimizer, parameter: Tensor) -> None:
        """Let a parameter's velocity be this rank's share of the buffer that its optimizer holds; zeros for none.

        The ranks' shares add up to the mean of what they hold.
        """
        given = _state_in(optimizer, parameter)
        self._states.pop(parameter, None)
        if given.get(BUFFER) is None:
            self._velocities[parameter].zero_()
            return
        self._put_state(optimizer, parameter, given)
        del given  # which refers to the buffer, as whoever keeps it would
        self._states[parameter].take()

    def _add_buffers(self, optimizer: Optimizer, saved: dict[str, Any]) -> None:
        """Add momentum buffers to an optimizer's `state_dict`: this rank's share, scaled up to all ranks'."""
        if not self._warned_of_shares and self._peer.size > 1 and not self._optimizers.is_saving:
            self._warned_of_shares = True
            _log.warning(
                "rank %d: optimizer.state_dict() holds only this rank's part of the momentum, because a compressor "
                "keeps a part on each rank: save it on every rank and load each rank's own, or use session.save",
                self._peer.rank,
            )
        self._take_written()
        for number, parameter in enumerate(parameters_of(optimizer)):
            if parameter in self._velocities and (
                parameter in self._states or self._terms[parameter].momentum
            ):
                buffer = buffer_of(self._velocities[parameter], self._opened.scale, parameter)
                state = saved["state"].get(number, {})
                saved["state"][number] = {key: state[key] for key in state if key != BUFFER} | {
                    BUFFER: like(whole_of(parameter), buffer)
                }

    @torch.no_grad()
    def hand_back(self) -> None:
        """Give the momentum buffers back to the optimizer, as the mean over ranks; collective."""
        self._take_written()
        lane = self._peer.lane("momentum")
        means: dict[Tensor, Tensor] = {}
        for segment, momentum in self._momenta():
            own = momentum.cpu().contiguous()
            total = torch.empty_like(own)
            lane.iallreduce(own.numpy(), total.numpy()).wait()
            means |= self._views(segment, total.mul_(1 / self._peer.size))
        lane.close()
        self._give_buffers(means)
        self.unhook()

    @torch.no_grad()
    def hand_back_own(self) -> None:
        """Give the optimizer its terms back, and this rank's share of the momentum buffers."""
        self.resume()
        self._take_written()
        self._give_buffers(self._velocities)

    def unhook(self) -> None:
        """Remove the hooks on the optimizers' `state_dict` and `load_state_dict`."""
        for handle in self._handles:
            handle.remove()

    def _momenta(self) -> Iterator[tuple[Segment, Tensor]]:
        for segment in self._opened.segments:
            momentum = self._packing.states[segment.index].momentum
            if momentum is not None:
                yield segment, momentum

    def _views(self, segment: Segment, momentum: Tensor) -> dict[Tensor, Tensor]:
        return {self._parameters[span.name]: view_of(momentum, span) for span in segment.spans}

    def _give_buffers(self, velocities: Mapping[Tensor, Tensor]) -> None:
        for optimizer, parameter in self._owned():
            buffer = buffer_of(velocities[parameter], self._opened.scale, parameter)
            state = _state_in(optimizer, parameter)
            of_torch = (
                state.with_buffer(buffer) if isinstance(state, MomentumState) else {**state, BUFFER: buffer}
            )
            of_torch[BUFFER] = like(whole_of(parameter), of_torch[BUFFER])
            optimizer.state[whole_of(parameter)] = of_torch


def _state_in(optimizer: Optimizer, parameter: Tensor) -> Mapping[str, Any]:
    """Return an optimizer's state of a parameter, of a shard with this rank's part of the buffer; empty for none."""
    state: Mapping[str, Any] = optimizer.state.get(whole_of(parameter), {})
    if isinstance(state, MomentumState) or whole_of(parameter) is parameter or state.get(BUFFER) is None:
        return state
    return {**state, BUFFER: local(state[BUFFER])}


def _differs(optimizer: Optimizer, seen: Sequence[Any]) -> bool:
    """Return whether an optimizer's state holds others than it did."""
    return not _are_same(optimizer.state.values(), seen)


def _are_same(some: Collection[Any], others: Collection[Any]) -> bool:
    """Return whether both hold the very same objects, in the same order."""
    return len(some) == len(others) and all(map(operator.is_, some, others))
