"""A strategy: a composed and checked description of a training step's communication."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hocket.config.component import describe
from hocket.errors import CompositionError
from hocket.plain import Tree
from hocket.strategy.equality import check_contributions, replicas_stay_equal
from hocket.strategy.exchange import GRADIENTS, PARAMETERS, Exchange
from hocket.strategy.samples import SampleShuffle
from hocket.strategy.scope import Placement

if TYPE_CHECKING:
    from hocket.plugin import Registry


@dataclass(frozen=True)
class Phase:
    """A later phase of a strategy, with a strategy of its own.

    Attributes:
        step: number of ended steps at its begin, 0 or more.
        strategy: the phase's strategy, without phases.
    """

    step: int
    strategy: Strategy


@dataclass(frozen=True)
class Strategy:
    """A strategy: the exchanges at each moment of a training step.

    `compose` makes and checks it; one that is made in Python is checked by `hocket.attach`, or by `compose(strategy)`:

        hocket.Strategy(gradients=(hocket.Exchange("allreduce", overlap="backward"),))

    Attributes:
        name: its name in the recipe or file, a label: strategies with the same exchanges are equal.
        samples: the exchange of samples between ranks, before the forward pass.
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
        """Return the strategy, without phases, in force after `step` steps."""
        if not self.phases:  # trainers ask in each step
            return self
        begun = [phase.strategy for phase in self.phases if phase.step <= step]
        return begun[-1] if begun else replace(self, phases=())

    @property
    def in_turn(self) -> tuple[Strategy, ...]:
        """Return the strategy, and those of its later phases."""
        return (self, *(phase.strategy for phase in self.phases))

    @property
    def in_phases(self) -> tuple[Phase, ...]:
        """Return the phases, the one from step 0 on included."""
        return (Phase(0, self.at(0)), *(phase for phase in self.phases if phase.step))

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """Return all exchanges, in the order of a step."""
        return (*self.gradients, *self.parameters)

    @property
    def outer(self) -> Exchange | None:
        """Return the last exchange with outer parameters, which replace the ranks' own; None if there is none."""
        return next((exchange for exchange in reversed(self.parameters) if exchange.outer is not None), None)

    def keeps_replicas_equal(self, placement: Placement) -> bool:
        """Return whether replicas that begin equal are equal after every step, to the bit.

        Args:
            placement: the ranks and their hosts.
        """
        return placement.size == 1 or replicas_stay_equal(self.gradients, self.parameters, placement)

    def keeps_gradients_equal(self, placement: Placement) -> bool:
        """Return whether all ranks step with the same gradients, to the bit.

        Args:
            placement: the ranks and their hosts.
        """
        return placement.size == 1 or replicas_stay_equal(self.gradients, (), placement)

    def check_size(self, placement: Placement) -> None:
        """Refuse ranks that a part of the strategy is not defined for, or whose gradients would be lost.

        Args:
            placement: the ranks and their hosts.

        Raises:
            CompositionError: names the exchange and the possible sizes, or the ranks whose gradients would be lost.
        """
        for phase in self.phases:
            phase.strategy.check_size(placement)
        for exchange in self.exchanges:
            try:
                sizes = {len(part) for part in exchange.over.parts(placement)}
                for size in sorted(sizes):
                    exchange.check_size(size)
            except ValueError as error:
                raise CompositionError(
                    f"{exchange.name} does not fit {placement.size} ranks: {error}"
                ) from error
        try:
            check_contributions(self.gradients, self.parameters, placement)
        except ValueError as error:
            raise CompositionError(str(error)) from error

    def resolved(self, registry: Registry | None = None) -> Tree:
        """Return the strategy as plain, complete configuration, of which `compose` makes an equal strategy.

        Args:
            registry: knows the components' names; the process's by default.
        """
        plain: Tree = describe(replace(self, phases=()), registry)
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
