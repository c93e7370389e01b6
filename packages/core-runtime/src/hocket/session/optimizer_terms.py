"""Momentum and weight decay that a compressor applies, read each step and left out of the optimizer's."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hocket.compressor.optimizer_terms import OptimizerTerms, optimizer_terms
from hocket.config.component import component_name
from hocket.segment.partition import Span
from hocket.segment.segment import Segment, view_of
from hocket.session.exchange import ActiveExchange
from hocket.session.optimizers import Optimizers, parameters_of
from hocket.session.refusals import override_of
from hocket.transport.peer import Peer

__all__ = ["AppliedTerms"]

_log = logging.getLogger("hocket")

_BUFFER = "momentum_buffer"


class AppliedTerms:
    """The terms of torch's SGD that an exchange's compressor applies, so that the optimizer does not.

    The momentum buffers that the optimizer holds become the compressor's, shared out over the ranks, and are the
    optimizer's again after `hand_back`. Meanwhile an optimizer's `state_dict` has what this rank alone knows of them,
    and what `load_state_dict` brings becomes the compressor's.

    Args:
        optimizers: torch's SGD, one or several.
        opened: the exchange of gradients whose compressor takes terms over.
        parameters: the trainable ones by name.
        peer: the ranks whose contributions end in one mean.

    Raises:
        AttachError: the optimizer is another, or has settings that nobody takes over.
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
        self._suspended: list[dict[str, float]] | None = None
        self._told = self._told_of_rounds = False
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
        """Read the terms of this step: schedulers rewrite them."""
        within_step = self._suspended is not None  # a closure's backward
        self.resume()
        self._terms = {}
        for optimizer in self._optimizers.given:
            self._terms |= optimizer_terms(optimizer)
        if within_step:
            self.suspend()

    def note_another_round(self) -> None:
        """Say once what `p.grad` holds between the backwards of one step: that can be read, and nobody tells."""
        if self._told_of_rounds or not any(terms.momentum for terms in self._terms.values()):
            return
        self._told_of_rounds = True
        compressor = self._packing.compressor
        cure = override_of(
            f"{self._opened.exchange.name}.compressor", compressor, compressor.without_optimizer_terms()
        )
        _log.warning(
            "rank %d: backward() came twice before optimizer.step(), and compressor %s applies momentum before it "
            "sends: between the two p.grad holds velocity, not the gradient alone. What is stepped with is right; a "
            "program that reads p.grad there (SAM, FGM, gradient surgery) gets other numbers. %s leaves momentum to "
            "the optimizer",
            self._peer.rank,
            component_name(compressor),
            cure,
        )

    def give(
        self, segment: Segment, present: Iterable[bool], share: float, continues: Sequence[bool]
    ) -> None:
        """Tell the compressor the terms of a segment that is about to be compressed.

        Args:
            segment: of gradients.
            present: for each parameter, whether it has a gradient on any rank, as far as that matters.
            share: what this rank contributes to the sum of weights.
            continues: for each parameter, whether an earlier round of this step has brought something.
        """
        terms = [
            self._terms.get(self._parameters[span.name]) if has else None
            for span, has in zip(segment.spans, present, strict=True)
        ]
        if any(continues):
            terms = [
                each and each.continued() if on else each for each, on in zip(terms, continues, strict=True)
            ]
        self._packing.states[segment.index].take(terms, share)

    def suspend(self) -> None:
        """Take the terms out of the optimizer's step that follows."""
        if self._suspended is not None:  # the last step failed, and its terms have not come back
            return
        taken = self._packing.traits.applies_optimizer_terms
        self._suspended = [{name: group[name] for name in taken} for group in self._optimizers.param_groups]
        for group in self._optimizers.param_groups:
            group.update(dict.fromkeys(taken, 0.0))

    def resume(self) -> None:
        """Put them back, for schedulers and for whoever reads them."""
        if self._suspended is not None:
            for group, terms in zip(self._optimizers.param_groups, self._suspended, strict=True):
                group.update(terms)
            self._suspended = None

    def learning_rate(self, parameter: nn.Parameter) -> float:
        """Return the learning rate of a parameter, as its param group has it now; 0 if no optimizer steps it."""
        groups = self._optimizers.param_groups
        return next(
            (float(group["lr"]) for group in groups if any(p is parameter for p in group["params"])), 0.0
        )

    @torch.no_grad()
    def _take_buffers(self, optimizers: Iterable[Optimizer]) -> None:
        held = {
            parameter: optimizer.state for optimizer in optimizers for parameter in parameters_of(optimizer)
        }
        for segment, momentum in self._momenta():
            for span in segment.spans:
                parameter = self._parameters[span.name]
                if parameter not in held:
                    continue
                velocity = view_of(momentum, span)
                buffer = held[parameter].get(parameter, {}).pop(_BUFFER, None)
                if buffer is None:
                    velocity.zero_()
                else:
                    # Each rank's share: they add up to the mean over ranks of what the ranks hold.
                    velocity.copy_(buffer).mul_(self._opened.scale)

    def _add_buffers(self, optimizer: Optimizer, saved: dict[str, Any]) -> None:
        """Add momentum buffers to what an optimizer's `state_dict` returns: the share of this rank, as if of all."""
        if not self._told and self._peer.size > 1 and not self._optimizers.is_saving:
            self._told = True
            _log.warning(
                "rank %d: optimizer.state_dict() has the momentum of this rank's own gradients, as a compressor keeps "
                "a share on each rank: save it on every rank and load each rank's own, or use session.save",
                self._peer.rank,
            )
        numbers = {parameter: number for number, parameter in enumerate(parameters_of(optimizer))}
        for segment, momentum in self._momenta():
            for span in segment.spans:
                parameter = self._parameters[span.name]
                if parameter in numbers and self._terms[parameter].momentum:
                    number = numbers[parameter]
                    buffer = self._buffer_of(momentum / self._opened.scale, span)
                    saved["state"][number] = {**saved["state"].get(number, {}), _BUFFER: buffer}

    @torch.no_grad()
    def hand_back(self) -> None:
        """Give the optimizer the momentum buffers again, the mean over ranks; collective."""
        lane = self._peer.lane("momentum")
        for segment, momentum in self._momenta():
            own = momentum.cpu().contiguous()
            total = torch.empty_like(own)
            lane.iallreduce(own.numpy(), total.numpy()).wait()
            self._give_buffers(segment, total.mul_(1 / (self._peer.size * self._opened.scale)))
        lane.close()
        self.unhook()

    @torch.no_grad()
    def hand_back_own(self) -> None:
        """Give the optimizer its terms again, and what this rank alone knows of the momentum buffers."""
        self.resume()
        for segment, momentum in self._momenta():
            self._give_buffers(segment, momentum / self._opened.scale)

    def unhook(self) -> None:
        """Leave what optimizers save and load as it is."""
        for handle in self._handles:
            handle.remove()

    def _momenta(self) -> Iterator[tuple[Segment, Tensor]]:
        for segment in self._opened.segments:
            momentum = self._packing.states[segment.index].momentum
            if momentum is not None:
                yield segment, momentum

    def _give_buffers(self, segment: Segment, momentum: Tensor) -> None:
        for span in segment.spans:
            self._optimizers.state_of(self._parameters[span.name])[_BUFFER] = self._buffer_of(momentum, span)

    def _buffer_of(self, momentum: Tensor, span: Span) -> Tensor:
        """Return a parameter's share of a segment's momentum as its optimizer would hold it."""
        parameter = self._parameters[span.name]
        buffer = view_of(momentum, span).to(parameter.device, parameter.dtype)
        return buffer.clone(memory_format=torch.preserve_format)
