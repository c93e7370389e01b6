"""The exchanges of the parameters slot, in order: after each step, and to merge all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from hocket.session.exchange.parameters import MixState, ParameterMix
from hocket.session.exchange.push_sum import KeptPushSum, Unrounded
from hocket.session.save.set_to_mean import set_to_mean
from hocket.strategy.exchange import Exchange, Overlap


class ParameterSync:
    """The slot's exchanges, carried out in order after each step."""

    def __init__(self, exchanges: Sequence[ParameterMix]) -> None:
        self.exchanges = exchanges

    @property
    def has_weights(self) -> bool:
        """Tell whether push-sum weights travel."""
        return any(exchange.push_sum.weights for exchange in self.exchanges)

    @torch.no_grad()
    def before_step(self) -> None:
        """Set parameters to the values that the optimizer steps, and merge segments that no forward has read."""
        self.merge_forward()
        for exchange in self.exchanges:
            exchange.push_sum.bias()

    @torch.no_grad()
    def debias(self) -> None:
        """Set parameters to the values that the model computes with, between two optimizers' steps."""
        for exchange in self.exchanges:
            exchange.debias()

    @torch.no_grad()
    def after_step(self, step: int, weight: float) -> None:
        """Merge arrived segments and start those due after step number `step`, counted from 1.

        Args:
            weight: of the step's batches (see `outer`).
        """
        for exchange in self.exchanges:
            exchange.after_step(step, weight)

    def close(self) -> None:
        """Close the lanes beside the exchanges; collective."""
        for exchange in self.exchanges:
            exchange.close()

    def unrounded(self) -> list[Unrounded]:
        """Return the push-sum values that parameters' dtypes are too short for."""
        return [
            unrounded for exchange in self.exchanges for unrounded in exchange.push_sum.unrounded.values()
        ]

    def push_sums(self) -> list[KeptPushSum]:
        """Return, by exchange, the weights, and copies of the values that parameters' dtypes are too short for."""
        return [exchange.push_sum.keep() for exchange in self.exchanges]

    def reset_weights(self) -> None:
        """Reset push-sum weights to 1, with the current parameters as values."""
        for exchange in self.exchanges:
            exchange.push_sum.set(dict.fromkeys(exchange.push_sum.weights, 1.0))

    def restore(self, push_sums: Sequence[KeptPushSum]) -> None:
        """Restore weights and values from `push_sums`, for the current parameters."""
        for exchange, (weights, values) in zip(self.exchanges, push_sums, strict=True):
            exchange.push_sum.set(weights, values)

    @torch.no_grad()
    def show_outer(self, exchange: Exchange) -> list[Callable[[], None]]:
        """Set parameters to an exchange's outer ones, as far as this rank keeps them; return what forgets it."""
        return [
            each.show()
            for mix in self.exchanges
            if mix.opened.exchange == exchange
            for each in mix.outer.values()
        ]

    @torch.no_grad()
    def take_late(self) -> None:
        """Step outer parameters by the parts of the ranks' distances that no round has sent; collective."""
        for exchange in self.exchanges:
            if exchange.outer:
                exchange.take_late()

    @torch.no_grad()
    def average_outer(self) -> None:
        """Set outer parameters to their mean, where ranks began with different ones; collective."""
        for mix in self.exchanges:
            if mix.outer:
                lane = mix.opened.peer.lane(f"{mix.opened.exchange.name} outer")
                for each in mix.outer.values():
                    set_to_mean(each.parameters, lane)
                lane.close()

    def outer_steps(self) -> dict[str, int]:
        """Return, by exchange, the most steps since distances from its outer parameters were sent."""
        return {
            mix.opened.exchange.name: max(each.steps for each in mix.outer.values())
            for mix in self.exchanges
            if mix.outer
        }

    def remembered(self) -> dict[str, tuple[Exchange, dict[str, dict[str, Tensor]]]]:
        """Return the outer optimizers' states, by the names of their exchanges."""
        return {
            mix.opened.exchange.name: (
                mix.opened.exchange,
                {name: kept for each in mix.outer.values() for name, kept in each.remembered.items()},
            )
            for mix in self.exchanges
            if mix.outer
        }

    def take_over(self, remembered: Mapping[str, tuple[Exchange, dict[str, dict[str, Tensor]]]]) -> None:
        """Continue the states of an earlier phase's outer optimizers of the same kind and scope."""
        for name, (exchange, _) in self.remembered().items():
            before, kept = remembered.get(name, (None, {}))
            if before and type(before.outer) is type(exchange.outer) and before.over == exchange.over:
                for mix in (mix for mix in self.exchanges if mix.opened.exchange is exchange):
                    for each in mix.outer.values():
                        each.load_state_dict(kept)

    @torch.no_grad()
    def settle(self) -> None:
        """Merge all exchanges under way."""
        for exchange in self.exchanges:
            exchange.merge_all()
            exchange.debias()

    @torch.no_grad()
    def drop(self) -> None:
        """End all exchanges under way on all ranks without merging them: parameters stay as they were written."""
        for mix in self.exchanges:
            started = [segment for segment in mix.opened.segments if mix.opened.started(segment)]
            for segment in started:
                mix.opened.finish(segment)
            if started:
                mix.push_sum.set(dict.fromkeys(mix.push_sum.weights, 1.0))

    @torch.no_grad()
    def take_changes(self) -> None:
        """Add other ranks' changes to parameters since the last merge; collective, with no exchange under way."""
        for exchange in self.exchanges:
            exchange.take_changes()

    @torch.no_grad()
    def merge_forward(self) -> None:
        """Merge the exchanges under way of overlap forward, as the next forward would."""
        for exchange in self.exchanges:
            if exchange.overlap is Overlap.FORWARD:
                exchange.merge_all()
                exchange.debias()

    @torch.no_grad()
    def receive(self) -> None:
        """Wait for all exchanges under way; merge those of overlap forward, as the next forward would."""
        self.merge_forward()
        for opened in (exchange.opened for exchange in self.exchanges):
            for segment in opened.segments:
                if opened.started(segment):
                    opened.wait(segment)

    @torch.no_grad()
    def state_dict(self) -> dict[str, MixState]:
        """Return the state for a resumed run beside the open exchanges' own.

        The exchanges under way of overlap forward are merged, as the next forward would merge them.
        """
        self.merge_forward()
        return {exchange.opened.exchange.name: exchange.state_dict() for exchange in self.exchanges}

    def load_state_dict(self, state: Mapping[str, MixState]) -> None:
        """Continue from a result of `state_dict` on this rank."""
        for exchange in self.exchanges:
            exchange.load_state_dict(state[exchange.opened.exchange.name])
