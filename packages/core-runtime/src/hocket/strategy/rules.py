"""The rules of composition: which parts mean something together, and what to use in place of others.

A rule looks at one exchange or at a whole strategy and yields refusals. The rules are independent of each
other and of the configuration that a strategy came from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hocket.config.component import component_name, describe
from hocket.strategy.exchange import GRADIENTS, PARAMETERS, Exchange, Overlap
from hocket.strategy.strategy import Strategy

__all__ = ["Refusal", "refusals"]

_OVERLAPS = {
    GRADIENTS: (Overlap.NONE, Overlap.BACKWARD),
    PARAMETERS: (Overlap.NONE, Overlap.FORWARD, Overlap.DELAYED),
}


@dataclass(frozen=True)
class Refusal:
    """Why a strategy means nothing.

    Attributes:
        key: the exchange and field at fault, for instance `gradients.0.overlap`.
        reason: what is wrong, and the nearest thing that works.
    """

    key: str
    reason: str


def refusals(strategy: Strategy) -> Iterator[Refusal]:
    """Yield everything that is wrong with a strategy; nothing where it can be run."""
    for exchange in strategy.exchanges:
        for exchange_rule in _EXCHANGE_RULES:
            yield from exchange_rule(exchange)
    for strategy_rule in _STRATEGY_RULES:
        yield from strategy_rule(strategy)


def collective_fits_slot(exchange: Exchange) -> Iterator[Refusal]:
    """A collective declares the slots in which it means something."""
    slots = exchange.collective.slots
    if exchange.slot not in slots:
        allowed = " or ".join(sorted(slots))
        yield _refuse(
            exchange, "collective", f"{_title(exchange.collective)} means nothing here: use it in {allowed}"
        )


def overlap_fits_slot(exchange: Exchange) -> Iterator[Refusal]:
    """Gradients can hide behind the backward that makes them, parameters behind what follows the step."""
    possible = _OVERLAPS[exchange.slot]
    if exchange.overlap not in possible:
        yield _refuse(
            exchange,
            "overlap",
            f"{exchange.slot} cannot be hidden behind {exchange.overlap}: use {' or '.join(possible)}",
        )


def gradients_every_step(exchange: Exchange) -> Iterator[Refusal]:
    """Steps with gradients that nobody exchanged let the replicas drift apart for good."""
    if exchange.slot == GRADIENTS and exchange.every > 1:
        yield _refuse(
            exchange,
            "every",
            f"with gradients exchanged every {exchange.every} steps the replicas drift apart in between: for "
            "larger batches use session.accumulate(), for local steps average the parameters every "
            f"{exchange.every} (recipe periodic_average)",
        )


def collective_carries_compressor(exchange: Exchange) -> Iterator[Refusal]:
    """A collective that combines in flight adds messages that it cannot look into."""
    if not (exchange.compressor.reducible or exchange.collective.gathers):
        yield _refuse(
            exchange,
            "compressor",
            f"{_title(exchange.collective)} combines messages in flight, and those of "
            f"{_title(exchange.compressor)} cannot be added as they are: use a collective that gathers "
            "(sparse_allreduce, gossip), or compressor none",
        )


def topology_where_asked_for(exchange: Exchange) -> Iterator[Refusal]:
    """A topology that nobody asks changes nothing, and a collective that asks needs one."""
    needs = exchange.collective.needs_topology
    title = _title(exchange.collective)
    if needs and exchange.topology is None:
        yield _refuse(exchange, "topology", f"{title} needs one: for instance topology: complete")
    if not needs and exchange.topology is not None:
        yield _refuse(
            exchange, "topology", f"{title} takes none: leave it out, or use a collective that does (gossip)"
        )


def gossip_keeps_the_mean(exchange: Exchange) -> Iterator[Refusal]:
    """Without push-sum, a matrix whose rows do not sum to 1 leads nobody to the mean."""
    topology = exchange.topology
    if topology is not None and not topology.doubly_stochastic:
        yield _refuse(
            exchange,
            "topology",
            f"{_title(topology)} is not doubly stochastic, so averaging by it does not keep the mean: use ring, "
            "exponential or random_matching",
        )


def preparing_excludes_overlap(exchange: Exchange) -> Iterator[Refusal]:
    """What looks at all gradients before the first is sent cannot start while backward still makes them."""
    if exchange.compressor.prepares and exchange.overlap == Overlap.BACKWARD:
        yield _refuse(
            exchange,
            "overlap",
            f"{_title(exchange.compressor)} looks at all gradients before the first is sent, so nothing "
            "is left to hide behind backward: use none",
        )


def optimizer_terms_with_gradients(exchange: Exchange) -> Iterator[Refusal]:
    """A compressor that takes over momentum corrects gradients; in parameters the step is already taken."""
    if exchange.compressor.takes and exchange.slot != GRADIENTS:
        terms = " and ".join(sorted(exchange.compressor.takes))
        yield _refuse(
            exchange,
            "compressor",
            f"{_title(exchange.compressor)} takes over the optimizer's {terms}, and here its step is already "
            "taken: use it in gradients",
        )


def one_exchange_of_gradients(strategy: Strategy) -> Iterator[Refusal]:
    """A session carries gradients through one exchange."""
    for exchange in strategy.gradients[1:]:
        yield Refusal(
            exchange.name,
            f"{strategy.gradients[0].name} is there already, and this version carries gradients through one "
            "exchange: leave this one out, or exchange parameters after the step",
        )


def overlap_comes_last(strategy: Strategy) -> Iterator[Refusal]:
    """An exchange of parameters begins with what the one before has left, so only the last can stay under way."""
    for exchange in strategy.parameters[:-1]:
        if exchange.overlap != Overlap.NONE:
            yield _refuse(
                exchange,
                "overlap",
                f"{exchange.overlap} leaves it under way when {PARAMETERS}.{exchange.index + 1} begins: use none "
                "here, and overlap the last one",
            )


_EXCHANGE_RULES = (
    collective_fits_slot,
    overlap_fits_slot,
    gradients_every_step,
    collective_carries_compressor,
    topology_where_asked_for,
    gossip_keeps_the_mean,
    preparing_excludes_overlap,
    optimizer_terms_with_gradients,
)
_STRATEGY_RULES = (
    one_exchange_of_gradients,
    overlap_comes_last,
)


def _refuse(exchange: Exchange, field: str, reason: str) -> Refusal:
    return Refusal(f"{exchange.name}.{field}", reason)


def _title(component: object) -> str:
    """Name a component as a config does, with its fields: `allreduce`, `bytes (size_mb: 25.0)`."""
    fields = ", ".join(f"{key}: {value}" for key, value in describe(component).items() if key != "name")
    return component_name(component) + (f" ({fields})" if fields else "")
