"""A strategy: a composed, validated description of what crosses the wire in a training step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hocket.config.component import describe
from hocket.errors import CompositionError
from hocket.strategy.exchange import Exchange
from hocket.strategy.samples import SampleExchange

if TYPE_CHECKING:
    from hocket.plugin import Registry

__all__ = ["Strategy"]


@dataclass(frozen=True)
class Strategy:
    """What crosses the wire at the moments of a training step. `compose` makes and checks it.

    Attributes:
        name: what the recipe or file calls it. A label: strategies that send the same are equal.
        samples: what moves samples between ranks, before the forward pass.
        gradients: exchanges between backward and the optimizer's step.
        parameters: exchanges after the optimizer's step.
    """

    name: str | None = field(default=None, compare=False)
    samples: SampleExchange | None = None
    gradients: tuple[Exchange, ...] = ()
    parameters: tuple[Exchange, ...] = ()

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """All exchanges, in the order of a step."""
        return (*self.gradients, *self.parameters)

    @property
    def replicas_stay_equal(self) -> bool:
        """Whether replicas that begin equal are equal after every step, to the bit.

        So it is where every step's gradients end in a value that the whole world shares and what is done to
        parameters, if anything, keeps equal replicas equal.
        """
        if not self.gradients or not all(exchange.equalises_world for exchange in self.parameters):
            return False
        last = self.gradients[-1]
        return last.equalises_world and last.every == 1

    def check_size(self, size: int) -> None:
        """Refuse a number of ranks for which a scope or a topology is not defined.

        Args:
            size: ranks of the world.

        Raises:
            CompositionError: names the exchange and which sizes are possible.
        """
        for exchange in self.exchanges:
            try:
                sizes = {len(exchange.over.ranks(rank, size)) for rank in range(size)}
                for scope_size in sorted(sizes):
                    if exchange.topology is not None:
                        exchange.topology.check_size(scope_size)
            except ValueError as error:
                raise CompositionError(f"{exchange.name} among {size} ranks: {error}") from error

    def resolved(self, registry: Registry | None = None) -> dict[str, Any]:
        """Return the strategy as plain, complete configuration, of which `compose` makes an equal strategy.

        Args:
            registry: knows the components' names; the process's by default.
        """
        plain: dict[str, Any] = describe(self, registry)
        for slot in ("gradients", "parameters"):
            for exchange in plain[slot]:
                del exchange["slot"], exchange["index"]
        return plain
