"""A strategy: a composed, validated description of what crosses the wire in a training step."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hocket.config.component import describe
from hocket.errors import CompositionError
from hocket.strategy.equality import check_contributions, replicas_stay_equal
from hocket.strategy.exchange import GRADIENTS, PARAMETERS, Exchange
from hocket.strategy.samples import SampleShuffle
from hocket.strategy.scope import Placement

if TYPE_CHECKING:
    from hocket.plugin import Registry

__all__ = ["Phase", "Strategy"]


@dataclass(frozen=True)
class Phase:
    """A strategy that takes another one's place.

    Attributes:
        step: how many steps have ended when it does, 0 or more.
        strategy: without phases.
    """

    step: int
    strategy: Strategy


@dataclass(frozen=True)
class Strategy:
    """What crosses the wire at the moments of a training step.

    `compose` makes and checks it; one that is made in Python is checked by `hocket.attach`, or by `compose(strategy)`:

        hocket.Strategy(gradients=(hocket.Exchange("allreduce", overlap="backward"),))

    Attributes:
        name: what the recipe or file calls it. A label: strategies that send the same are equal.
        samples: what moves samples between ranks, before the forward pass.
        gradients: exchanges between backward and the optimizer's step.
        parameters: exchanges after the optimizer's step.
        phases: strategies that take its place later, by their first step, in order.
    """

    name: str | None = field(default=None, compare=False)
    samples: SampleShuffle | None = None
    gradients: tuple[Exchange, ...] = ()
    parameters: tuple[Exchange, ...] = ()
    phases: tuple[Phase, ...] = ()

    def __post_init__(self) -> None:
        for slot in (GRADIENTS, PARAMETERS):
            placed = (replace(each, slot=slot, index=index) for index, each in enumerate(getattr(self, slot)))
            object.__setattr__(self, slot, tuple(placed))

    def at(self, step: int) -> Strategy:
        """Return the strategy, without phases, that holds when `step` steps have ended."""
        begun = [phase.strategy for phase in self.phases if phase.step <= step]
        return begun[-1] if begun else replace(self, phases=())

    @property
    def in_turn(self) -> tuple[Strategy, ...]:
        """The strategy, and those that take its place later."""
        return (self, *(phase.strategy for phase in self.phases))

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """All exchanges, in the order of a step."""
        return (*self.gradients, *self.parameters)

    @property
    def outer(self) -> Exchange | None:
        """The last exchange with outer parameters, whose values stand for the ranks' own; None where there is none."""
        return next((exchange for exchange in reversed(self.parameters) if exchange.outer is not None), None)

    def keeps_replicas_equal(self, placement: Placement) -> bool:
        """Return whether replicas that begin equal are equal after every step, to the bit.

        Args:
            placement: which ranks there are, and on which hosts.
        """
        return placement.size == 1 or replicas_stay_equal(self.gradients, self.parameters, placement)

    def keeps_gradients_equal(self, placement: Placement) -> bool:
        """Return whether all ranks step with the same gradients, to the bit.

        Args:
            placement: which ranks there are, and on which hosts.
        """
        return placement.size == 1 or replicas_stay_equal(self.gradients, (), placement)

    def check_size(self, placement: Placement) -> None:
        """Refuse ranks for which a scope, a collective or a topology is not defined, or some of which train nobody.

        Args:
            placement: which ranks there are, and on which hosts.

        Raises:
            CompositionError: names the exchange and which sizes are possible, or whose gradients would be lost.
        """
        for phase in self.phases:
            phase.strategy.check_size(placement)
        for exchange in self.exchanges:
            try:
                sizes = {len(part) for part in exchange.over.parts(placement)}
                for size in sorted(sizes):
                    exchange.check_size(size)
            except ValueError as error:
                raise CompositionError(f"{exchange.name} among {placement.size} ranks: {error}") from error
        try:
            check_contributions(self.gradients, self.parameters, placement)
        except ValueError as error:
            raise CompositionError(str(error)) from error

    def resolved(self, registry: Registry | None = None) -> dict[str, Any]:
        """Return the strategy as plain, complete configuration, of which `compose` makes an equal strategy.

        Args:
            registry: knows the components' names; the process's by default.
        """
        plain: dict[str, Any] = describe(replace(self, phases=()), registry)
        slots = (phase.strategy.resolved(registry) for phase in self.phases)
        plain["phases"] = {
            str(phase.step): {slot: described[slot] for slot in ("gradients", "parameters")}
            for phase, described in zip(self.phases, slots, strict=True)
        }
        for slot in ("gradients", "parameters"):
            for exchange in plain[slot]:
                del exchange["slot"], exchange["index"]
                exchange["compressor"] = exchange["compressor"] or {"name": "none"}
        return plain
