"""Rules about outer parameters, delays and merges: the uses of the result of an exchange of parameters."""

from __future__ import annotations

from collections.abc import Iterator

from hocket.collective.api import Ends, Messages
from hocket.outer.merge import AddDisplacement, Blend
from hocket.segment.partition import Fragments
from hocket.strategy.exchange import GRADIENTS, PARAMETERS, Buffers, Every, Exchange, Overlap
from hocket.strategy.rules.refusal import Refusal, refuse, title_of
from hocket.strategy.scope import Leaders


def outer_is_of_parameters(exchange: Exchange) -> Iterator[Refusal]:
    """Refuse outer parameters, delays and merges of gradients, which are used up in their step."""
    if exchange.slot != GRADIENTS:
        return
    given = {
        "outer": exchange.outer is not None,
        "delay": exchange.delay != 0,
        "merge": exchange.merge != AddDisplacement(),
        "stagger": exchange.stagger,
        "offset": exchange.offset != 0,
        "buffers": exchange.buffers is not Buffers.OWN,
        "offload": exchange.offload,
    }
    for field in (field for field, is_given in given.items() if is_given):
        yield refuse(exchange, field, f"{field} works only for exchanges of {PARAMETERS}: leave it out")


def offload_is_of_outer(exchange: Exchange) -> Iterator[Refusal]:
    """Refuse offload without outer parameters, as there is nothing to offload."""
    if exchange.slot != GRADIENTS and exchange.offload and exchange.outer is None:
        yield refuse(
            exchange, "offload", "there are no outer parameters to keep in host memory: leave it out"
        )


def outer_steps_by_the_mean(exchange: Exchange) -> Iterator[Refusal]:
    """Refuse outer steps without an equal mean on all ranks, unless the outer optimizer mixes."""
    traits = exchange.collective.traits
    if exchange.outer is None or exchange.outer.mixes:
        return
    if traits.catches_up and traits.ends is Ends.OWN:
        if not exchange.outer.additive:
            yield refuse(
                exchange,
                "outer",
                "a late rank takes one step for all rounds that it missed, which with momentum differs from the "
                "other ranks' steps: use {name: sgd, lr: ..., momentum: 0}, or `collective: allreduce`",
            )
        return
    if not (traits.ends is Ends.SAME and traits.sums):
        yield refuse(
            exchange,
            "outer",
            f"{title_of(exchange.collective)} does not give all ranks the same mean, so their outer parameters would "
            "drift apart: use `collective: allreduce`",
        )


def buffers_are_averaged_by_all(exchange: Exchange) -> Iterator[Refusal]:
    """Refuse means of buffers where ranks do not share the exchange's result."""
    if exchange.slot == GRADIENTS or exchange.buffers is Buffers.OWN:
        return
    traits = exchange.collective.traits
    if not (traits.ends is Ends.SAME and traits.sums):
        yield refuse(
            exchange,
            "buffers",
            f"{title_of(exchange.collective)} cannot average buffers: use `buffers: own`, or `collective: allreduce`",
        )
    if isinstance(exchange.over, Leaders):
        yield refuse(
            exchange,
            "buffers",
            "only leaders would average their buffers, and their groups would not get the result: use "
            "`buffers: own`, or `over: world`",
        )


def mixed_outer_is_gossip(exchange: Exchange) -> Iterator[Refusal]:
    """Refuse outer parameters of each rank's own, except with uncompressed gossip."""
    if exchange.outer is None or not exchange.outer.mixes:
        return
    title = title_of(exchange.outer)
    traits = exchange.collective.traits
    if traits.ends is not Ends.OWN or exchange.carries_weight:
        yield refuse(
            exchange,
            "collective",
            f"{title} works only where each rank averages with a few others: use {{collective: gossip, "
            "topology: random_matching}",
        )
    if exchange.compressor is not None:
        yield refuse(
            exchange,
            "compressor",
            f"{title} also sends the outer parameters, uncompressed: use none",
        )
    if isinstance(exchange.over, Leaders):
        yield refuse(
            exchange,
            "over",
            f"with {title} outer parameters differ between ranks, and only leaders would have them: use world or "
            "group",
        )


def outer_loses_nothing(exchange: Exchange) -> Iterator[Refusal]:
    """Refuse outer parameters that would overwrite unsent values of a rank's own."""
    compressor = exchange.compressor
    if exchange.outer is None or compressor is None:
        return
    if compressor.traits.leaves_out and not compressor.traits.keeps_residual:
        yield refuse(
            exchange,
            "compressor",
            f"{title_of(compressor)} sends only a part of the change since the last exchange, and the outer step would "
            "lose the rest: use {name: error_feedback, compressor: ...} around it",
        )


def parameters_themselves_stay_whole(exchange: Exchange) -> Iterator[Refusal]:
    """Refuse parameters where what comes is no model: coarse, gathered in parts, or late; distances may travel so."""
    if exchange.slot != PARAMETERS or exchange.outer is not None:
        return
    traits, compressor = exchange.collective.traits, exchange.compressor
    if compressor is not None and compressor.traits.coarse:
        yield refuse(
            exchange,
            "compressor",
            f"{title_of(compressor)} is too coarse for parameters: use fp16, or give the exchange an outer optimizer, "
            "so that it sends their change since the last exchange",
        )
    # A mean of messages is none of parameters that were not sent.
    if traits.messages is Messages.GATHERED and traits.sums:
        yield refuse(
            exchange,
            "collective",
            f"{title_of(exchange.collective)} averages only sent values, so unsent parameters would be lost: use it in "
            "gradients, or give an outer ({name: sgd, lr: 1.0}), so that changes are sent",
        )
    if not traits.divides_by_weight:
        yield refuse(
            exchange,
            "collective",
            f"{title_of(exchange.collective)} adds late contributions to the next round, which is not a mean of "
            "parameters: use it in gradients, or give an outer ({name: sgd, lr: 1.0}), so that changes are sent",
        )


def delay_hides_by_itself(exchange: Exchange) -> Iterator[Refusal]:
    """Refuse overlap besides a delay, which already hides the exchange behind whole steps."""
    if exchange.delay and exchange.overlap is not Overlap.NONE:
        yield refuse(
            exchange,
            "overlap",
            f"delay {exchange.delay} already overlaps the exchange with the following steps: use none",
        )


def delay_fits_period(exchange: Exchange) -> Iterator[Refusal]:
    """Refuse delays that exceed the period, or equal it with a blend, which would undo all steps."""
    if isinstance(exchange.every, Every):
        return
    if exchange.delay > exchange.every:
        yield refuse(
            exchange,
            "delay",
            f"delay {exchange.delay} is longer than `every: {exchange.every}`: use {exchange.every} or less",
        )
    elif exchange.delay == exchange.every and isinstance(exchange.merge, Blend):
        yield refuse(
            exchange,
            "merge",
            f"with delay {exchange.delay} and every {exchange.every}, `merge: blend` would overwrite all steps before "
            "they are sent: use a shorter delay, or `merge: add`",
        )


def offset_is_within_period(exchange: Exchange) -> Iterator[Refusal]:
    """Refuse an offset beyond the period."""
    every = exchange.every
    if exchange.offset and (isinstance(every, Every) or abs(exchange.offset) >= every):
        yield refuse(
            exchange,
            "offset",
            f"{exchange.offset} is outside the period of {every} steps: use 0 or more, and less than `every`",
        )


def stagger_has_steps(exchange: Exchange) -> Iterator[Refusal]:
    """Refuse staggering over a period with too few steps."""
    cut, every = exchange.segments, exchange.every
    if exchange.stagger and isinstance(cut, Fragments) and isinstance(every, int) and cut.count > every:
        yield refuse(
            exchange,
            "stagger",
            f"{cut.count} fragments need {cut.count} steps, but every is {every}: use fewer fragments, or a longer "
            "period",
        )


def blend_is_of_averages(exchange: Exchange) -> Iterator[Refusal]:
    """Refuse a blend with a result that is no average, or that would undo steps of left-out parameters."""
    if not isinstance(exchange.merge, Blend):
        return
    traits = exchange.collective.traits
    if traits.ends is Ends.OPEN:
        yield refuse(
            exchange,
            "merge",
            f"{title_of(exchange.collective)} lets other ranks change parameters at any time, and `merge: blend` would "
            "lose a part of each change: use `merge: add`, or collective allreduce or gossip",
        )
    elif traits.ends in {Ends.COPY, Ends.ROOT} or traits.pushes_weight:
        yield refuse(
            exchange,
            "merge",
            f"the result of {title_of(exchange.collective)} is not an average of parameters, which `merge: blend` "
            "needs: use `merge: add`, or collective allreduce or gossip without push_sum",
        )
    elif (
        exchange.delay
        and exchange.keeps_own
        and exchange.compressor
        and exchange.compressor.traits.leaves_out
    ):
        yield refuse(
            exchange,
            "merge",
            f"`merge: blend` would reset parameters that {title_of(exchange.compressor)} leaves out to their values "
            f"{exchange.delay} steps ago: use `merge: add`, or `delay: 0`",
        )


def push_sum_is_in_order(exchange: Exchange) -> Iterator[Refusal]:
    """Refuse push-sum of fragments, as it multiplies a segment's parameters as one piece of memory."""
    if exchange.carries_weight and isinstance(exchange.segments, Fragments):
        yield refuse(
            exchange,
            "segments",
            "push-sum needs segments of adjacent parameters: use layers, bytes or model",
        )


OUTER_RULES = (
    outer_is_of_parameters,
    offload_is_of_outer,
    outer_steps_by_the_mean,
    buffers_are_averaged_by_all,
    mixed_outer_is_gossip,
    outer_loses_nothing,
    parameters_themselves_stay_whole,
    delay_hides_by_itself,
    delay_fits_period,
    offset_is_within_period,
    stagger_has_steps,
    blend_is_of_averages,
    push_sum_is_in_order,
)
