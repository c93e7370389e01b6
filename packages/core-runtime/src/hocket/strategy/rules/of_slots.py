"""Rules that reject meaningless combinations of a slot's exchanges."""

from __future__ import annotations

from collections.abc import Iterator

from hocket.collective.api import Ends
from hocket.config.component import component_name
from hocket.strategy.exchange import PARAMETERS, Exchange, Overlap
from hocket.strategy.rules.refusal import Refusal, flow, refuse, title_of
from hocket.strategy.scope import Leaders, World
from hocket.strategy.strategy import Strategy


def gradients_pass_on_segments(strategy: Strategy) -> Iterator[Refusal]:
    """Refuse later exchanges of gradients with segments, overlap or terms of their own: they follow the first one's."""
    for exchange in strategy.gradients[1:]:
        first = strategy.gradients[0]
        if exchange.segments != first.segments:
            yield refuse(
                exchange,
                "segments",
                "all exchanges of gradients must have the same segments: use "
                f"{title_of(first.segments)}, as {first.name} does",
            )
        if exchange.overlap != Overlap.NONE:
            yield refuse(
                exchange,
                "overlap",
                f"this exchange takes each segment when {strategy.gradients[exchange.index - 1].name} has finished "
                f"it, so it has no overlap of its own: leave overlap out, and set it in {first.name}",
            )
        compressor = exchange.compressor
        if compressor is not None and (
            compressor.traits.applies_optimizer_terms or compressor.traits.prepares
        ):
            yield refuse(
                exchange,
                "compressor",
                f"{title_of(exchange.compressor)} needs a rank's own gradients, which only {first.name} sends: use "
                "it there",
            )


def leaders_are_heard(strategy: Strategy) -> Iterator[Refusal]:
    """Refuse results that only the leaders of groups would get."""
    for slot in (strategy.gradients, strategy.parameters):
        for exchange in slot:
            following = slot[exchange.index + 1] if exchange.index + 1 < len(slot) else None
            if not isinstance(exchange.over, Leaders):
                continue
            group = exchange.over.as_group()
            together = exchange.over.sharded or exchange.stagger
            heard = (
                following is not None
                and following.collective.traits.ends is Ends.COPY
                and following.collective.traits.root is None
                and following.over == group
                and following.schedule == exchange.schedule
            )
            if not heard:
                yield refuse(
                    exchange,
                    "over",
                    "only leaders would get the result: add an exchange {collective: broadcast, over: "
                    f"{flow(group)}, segments: {flow(exchange.segments)}, every: {exchange.every}"
                    f"{_flow_of_due(exchange)}}} after it",
                )
            elif following is not None and together and following.segments != exchange.segments:
                why = "sharded leaders" if exchange.over.sharded else "stagger"
                yield refuse(
                    following,
                    "segments",
                    f"with {why}, the broadcast needs the segments of {exchange.name}: use "
                    f"{title_of(exchange.segments)}",
                )


def gradients_begin_with_all(strategy: Strategy) -> Iterator[Refusal]:
    """Refuse a first exchange of gradients without all ranks, as a rank's own gradient enters there."""
    for exchange in strategy.gradients[:1]:
        if isinstance(exchange.over, Leaders):
            yield refuse(
                exchange,
                "over",
                "the gradients of ranks that are not leaders would be lost: begin with an exchange over group or "
                "world",
            )
        if exchange.collective.traits.ends is Ends.COPY:
            yield refuse(
                exchange,
                "collective",
                f"{component_name(exchange.collective)} would replace the other ranks' gradients: begin with a "
                "collective that combines them (allreduce)",
            )


def reduced_values_go_on(strategy: Strategy) -> Iterator[Refusal]:
    """Refuse a slot that ends with a result on a root alone."""
    for slot in (strategy.gradients, strategy.parameters):
        for exchange in slot[-1:]:
            if exchange.collective.traits.ends is Ends.ROOT:
                yield refuse(
                    exchange,
                    "collective",
                    "only the root would have the mean: use allreduce, or add an exchange over the leaders, or a "
                    "broadcast, after it",
                )


def push_sum_is_alone(strategy: Strategy) -> Iterator[Refusal]:
    """Refuse push-sum with a second exchange of parameters, which would mix values of different weights."""
    for exchange in strategy.parameters:
        if exchange.carries_weight and len(strategy.parameters) > 1:
            yield refuse(
                exchange,
                "topology",
                f"{title_of(exchange.topology)} needs push-sum weights, which allow no other exchange of parameters: "
                "remove the others, or use a doubly stochastic topology (ring, exponential, random_matching)",
            )


def own_coordinates_need_an_average(strategy: Strategy) -> Iterator[Refusal]:
    """Refuse parameters with each rank's own coordinates unless all are averaged now and then."""
    for exchange in strategy.parameters:
        averaged = any(
            other.collective.traits.equal_result
            and isinstance(other.over, World)
            and other.compressor is None
            for other in strategy.parameters
            if other is not exchange
        )
        if exchange.compressor is None or exchange.outer is not None:
            continue  # all ranks step outer parameters by the same combination, whatever coordinates each has sent
        if not (exchange.compressor.traits.same_coordinates or averaged):
            yield refuse(
                exchange,
                "compressor",
                f"with {title_of(exchange.compressor)} each rank sends different elements, so replicas never become "
                f"equal: use shared_random, or add {{collective: allreduce, over: world, every: 100}}",
            )


def overlap_comes_last(strategy: Strategy) -> Iterator[Refusal]:
    """Refuse overlap or delay except in the last exchange of parameters, as each needs the one before."""
    for exchange in strategy.parameters[:-1]:
        following = f"{PARAMETERS}.{exchange.index + 1}"
        if exchange.overlap != Overlap.NONE:
            yield refuse(
                exchange,
                "overlap",
                f"with overlap {exchange.overlap} this exchange is not complete when {following} begins: use none "
                "here, and overlap the last exchange",
            )
        if exchange.delay:
            yield refuse(
                exchange,
                "delay",
                f"with a delay this exchange is not complete when {following} begins: use 0 here, and delay the last "
                "exchange",
            )


def _flow_of_due(exchange: Exchange) -> str:
    """Return the keys of an exchange's due steps besides its period, as in a config."""
    stagger = ", stagger: true" if exchange.stagger else ""
    return stagger + (f", offset: {exchange.offset}" if exchange.offset else "")


SLOT_RULES = (
    gradients_begin_with_all,
    gradients_pass_on_segments,
    leaders_are_heard,
    reduced_values_go_on,
    push_sum_is_alone,
    own_coordinates_need_an_average,
    overlap_comes_last,
)
