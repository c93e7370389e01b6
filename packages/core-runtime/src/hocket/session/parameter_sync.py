"""The exchanges of the parameters slot, one after the other: after each step, and whenever all has to be merged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hocket.session.parameters import ParameterMix
from hocket.session.unrounded import Unrounded
from hocket.strategy.exchange import Exchange, Overlap

__all__ = ["ParameterSync", "PushSums"]

#: An exchange's push-sum weights, and the values for which parameters are too short, by the segment's index.
PushSums = tuple[dict[int, float], dict[int, Tensor]]


class ParameterSync:
    """Carries out the slot's exchanges, in order, after each step."""

    def __init__(self, exchanges: Sequence[ParameterMix]) -> None:
        self.exchanges = exchanges

    @property
    def has_weights(self) -> bool:
        """Whether push-sum weights travel."""
        return any(exchange.weights for exchange in self.exchanges)

    @torch.no_grad()
    def before_step(self) -> None:
        """Make parameters hold what the optimizer steps: what no forward has read since the last step, too."""
        self.merge_forward()
        for exchange in self.exchanges:
            exchange.bias()

    @torch.no_grad()
    def debias(self) -> None:
        """Make parameters hold what the model computes with, between the steps of two optimizers."""
        for exchange in self.exchanges:
            exchange.debias()

    @torch.no_grad()
    def after_step(self, step: int, weight: float) -> None:
        """Merge what has come and start what is due after step number `step`, counted from 1.

        Args:
            weight: what batches counted in the step (see `outer`).
        """
        for exchange in self.exchanges:
            exchange.after_step(step, weight)

    def close(self) -> None:
        """Close what is beside the exchanges; collective."""
        for exchange in self.exchanges:
            exchange.close()

    def unrounded(self) -> list[Unrounded]:
        """Return the push-sum values for which parameters are too short."""
        return [unrounded for exchange in self.exchanges for unrounded in exchange.unrounded.values()]

    def push_sums(self) -> list[PushSums]:
        """Return the weights and copies of the values for which parameters are too short, by exchange."""
        return [(exchange.weights, exchange.values()) for exchange in self.exchanges]

    def reset_weights(self) -> None:
        """Take parameters as they are for what push-sum's values are divided to, of weight 1."""
        for exchange in self.exchanges:
            exchange.set_weights(dict.fromkeys(exchange.weights, 1.0))

    def restore(self, push_sums: Sequence[PushSums]) -> None:
        """Take parameters as they are for what these push-sums, from `push_sums`, are divided to."""
        for exchange, (weights, values) in zip(self.exchanges, push_sums, strict=True):
            exchange.set_weights(weights, values)

    @torch.no_grad()
    def show_outer(self, exchange: Exchange) -> None:
        """Make parameters hold the outer ones of an exchange, as far as this rank keeps them."""
        for mix in self.exchanges:
            if mix.opened.exchange == exchange:
                for each in mix.outer.values():
                    each.show()

    @torch.no_grad()
    def take_late(self) -> None:
        """Step outer parameters by what no round has taken of the ranks' distances; collective."""
        for exchange in self.exchanges:
            if exchange.outer:
                exchange.take_late()

    @torch.no_grad()
    def average_outer(self) -> None:
        """Set outer parameters to their mean, where ranks began apart; collective."""
        for mix in self.exchanges:
            if mix.outer:
                lane = mix.opened.peer.lane(f"{mix.opened.exchange.name} outer")
                for each in mix.outer.values():
                    each.average(lane)
                lane.close()

    def outer_steps(self) -> dict[str, int]:
        """Return how many steps ago, at most, outer parameters of each exchange that keeps them were sent to."""
        return {
            mix.opened.exchange.name: max(each.steps for each in mix.outer.values())
            for mix in self.exchanges
            if mix.outer
        }

    def remembered(self) -> dict[str, tuple[Exchange, dict[str, dict[str, Tensor]]]]:
        """Return what outer optimizers remember, by the names of their exchanges."""
        return {
            mix.opened.exchange.name: (
                mix.opened.exchange,
                {name: kept for each in mix.outer.values() for name, kept in each.remembered.items()},
            )
            for mix in self.exchanges
            if mix.outer
        }

    def take_over(self, remembered: Mapping[str, tuple[Exchange, dict[str, dict[str, Tensor]]]]) -> None:
        """Go on with what an earlier phase's outer optimizers remember, where they are of one kind and scope."""
        for name, (exchange, _) in self.remembered().items():
            before, kept = remembered.get(name, (None, {}))
            if before and type(before.outer) is type(exchange.outer) and before.over == exchange.over:
                for mix in (mix for mix in self.exchanges if mix.opened.exchange is exchange):
                    for each in mix.outer.values():
                        each.load_state_dict(kept)

    @torch.no_grad()
    def settle(self) -> None:
        """Merge everything that is under way."""
        for exchange in self.exchanges:
            exchange.merge_all()
            exchange.debias()

    @torch.no_grad()
    def take_changes(self) -> None:
        """Add what others have changed of parameters since they were merged; collective, with nothing under way."""
        for exchange in self.exchanges:
            exchange.take_changes()

    @torch.no_grad()
    def merge_forward(self) -> None:
        """Merge what overlap forward has under way, as the next forward would."""
        for exchange in self.exchanges:
            if exchange.overlap is Overlap.FORWARD:
                exchange.merge_all()
                exchange.debias()

    @torch.no_grad()
    def receive(self) -> None:
        """Wait for what is under way; merge what overlap forward has, as the next forward would."""
        self.merge_forward()
        for opened in (exchange.opened for exchange in self.exchanges):
            for segment in opened.segments:
                if opened.started(segment):
                    opened.wait(segment)

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs beside the open exchanges' state.

        What overlap forward has under way is merged, as the next forward would merge it.
        """
        self.merge_forward()
        return {exchange.opened.exchange.name: exchange.state_dict() for exchange in self.exchanges}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned on this rank."""
        for exchange in self.exchanges:
            exchange.load_state_dict(state[exchange.opened.exchange.name])
