"""Rules that reject meaningless combinations of one exchange's choices."""

from __future__ import annotations

from collections.abc import Iterator

from hocket.collective.api import Ends, Messages
from hocket.strategy.exchange import GRADIENTS, PARAMETERS, Every, Exchange, Overlap, ProgressMode
from hocket.strategy.rules.refusal import Refusal, refuse, title_of
from hocket.strategy.scope import World

_OVERLAPS = {
    GRADIENTS: (Overlap.NONE, Overlap.BACKWARD),
    PARAMETERS: (Overlap.NONE, Overlap.FORWARD),
}


def collective_fits_slot(exchange: Exchange) -> Iterator[Refusal]:
    """Refuse a collective in a slot that it does not declare as meaningful."""
    slots = exchange.collective.traits.slots
    if exchange.slot not in slots:
        allowed = " or ".join(sorted(slots))
        yield refuse(
            exchange,
            "collective",
            f"{title_of(exchange.collective)} cannot exchange {exchange.slot}: use it in {allowed}",
        )


def overlap_fits_slot(exchange: Exchange) -> Iterator[Refusal]:
    """Refuse overlaps of the other slot: gradients overlap with backward, parameters with computing after the step."""
    possible = _OVERLAPS[exchange.slot]
    if exchange.overlap not in possible:
        yield refuse(
            exchange,
            "overlap",
            f"{exchange.slot} cannot be overlapped with {exchange.overlap}: use {' or '.join(possible)}",
        )


def gradients_every_step(exchange: Exchange) -> Iterator[Refusal]:
    """Refuse gradients that are not exchanged in every step, as replicas would drift apart for good."""
    if exchange.slot == GRADIENTS and exchange.every != 1:
        yield refuse(
            exchange,
            "every",
            f"with gradients exchanged every {exchange.every} steps the replicas drift apart in between: for "
            "larger batches use session.accumulate(), for local steps average the parameters every "
            f"{exchange.every} (recipe periodic_average)",
        )


def period_of_all_ranks(exchange: Exchange) -> Iterator[Refusal]:
    """Refuse a period by number of ranks over scopes of different sizes, as following exchanges share their steps."""
    if isinstance(exchange.every, Every) and not isinstance(exchange.over, World):
        yield refuse(
            exchange,
            "every",
            f"{exchange.every} over {title_of(exchange.over)} would give groups of different sizes different periods: "
            "use a number of steps, or `over: world`",
        )


def thread_fits_collective(exchange: Exchange) -> Iterator[Refusal]:
    """Refuse a progress thread for requests that the training thread's waits advance, too."""
    if exchange.progress is ProgressMode.THREAD and not exchange.collective.traits.threadable:
        yield refuse(
            exchange,
            "progress",
            f"{title_of(exchange.collective)} cannot use `progress: thread`, because it runs in the training thread or "
            "has its own schedule: use `progress: inline`, or `collective: gossip`",
        )


def collective_carries_compressor(exchange: Exchange) -> Iterator[Refusal]:
    """Refuse a compressor that the collective does not carry, or cannot add in flight."""
    messages = exchange.collective.traits.messages
    if exchange.compressor is None:
        return
    if messages is Messages.NONE:
        yield refuse(
            exchange,
            "compressor",
            f"{title_of(exchange.collective)} sends uncompressed values: use none, or a collective that can compress "
            "(allreduce, sparse_allreduce, gossip)",
        )
    elif messages is Messages.SUMMED and not exchange.compressor.traits.reducible:
        yield refuse(
            exchange,
            "compressor",
            f"{title_of(exchange.collective)} adds messages while it sends them, but messages of "
            f"{title_of(exchange.compressor)} cannot be added: use a collective that gathers (sparse_allreduce, "
            "gossip), or compressor none",
        )


def answers_are_to_a_sum(exchange: Exchange) -> Iterator[Refusal]:
    """Refuse a compressor that answers to the sum of all messages where ranks do not get that sum."""
    traits, compressor = exchange.collective.traits, exchange.compressor
    if compressor is None or not compressor.traits.answers:
        return
    if traits.messages is Messages.GATHERED or (
        traits.messages is Messages.SUMMED and traits.ends is not Ends.SAME
    ):
        yield refuse(
            exchange,
            "collective",
            f"{title_of(compressor)} needs the sum of all ranks' messages, which {title_of(exchange.collective)} "
            "does not give: use allreduce",
        )


def other_bases_are_gathered(exchange: Exchange) -> Iterator[Refusal]:
    """Refuse messages of another basis with collectives that need values, as these are added up first."""
    traits, compressor = exchange.collective.traits, exchange.compressor
    if compressor is None or not compressor.traits.transforms:
        return
    if traits.messages is not Messages.NONE and not (
        traits.messages is Messages.GATHERED and traits.ends is Ends.SAME
    ):
        yield refuse(
            exchange,
            "collective",
            f"{title_of(compressor)} transforms values before it sends them, so {title_of(exchange.collective)} "
            "would have to transform each message back: use sparse_allreduce",
        )


def collective_takes_compressor(exchange: Exchange) -> Iterator[Refusal]:
    """Refuse a compressor that its collective refuses by itself."""
    try:
        exchange.collective.check_compressor(exchange.compressor)
    except ValueError as error:
        yield refuse(exchange, "compressor", str(error))


def topology_where_asked_for(exchange: Exchange) -> Iterator[Refusal]:
    """Refuse a topology that the collective ignores, and a missing one that it needs."""
    needs = exchange.collective.traits.needs_topology
    title = title_of(exchange.collective)
    if needs and exchange.topology is None:
        yield refuse(exchange, "topology", f"{title} needs a topology, for instance `topology: complete`")
    if not needs and exchange.topology is not None:
        yield refuse(
            exchange,
            "topology",
            f"{title} has no topology: leave it out, or use a collective with one (gossip)",
        )


def gossip_averages(exchange: Exchange) -> Iterator[Refusal]:
    """Refuse gossip without push-sum by a matrix whose rows do not sum to 1, which rescales ranks' values."""
    topology, traits = exchange.topology, exchange.collective.traits
    if topology is None or topology.rows_sum_to_one or traits.ends is Ends.OPEN:
        return
    if not traits.pushes_weight:
        yield refuse(
            exchange,
            "topology",
            f"the weights of a rank's result over {title_of(topology)} do not add up to 1, so the result is not an "
            "average: use `push_sum: true`, or one of ring, exponential and random_matching",
        )
    elif exchange.slot == GRADIENTS:
        yield refuse(
            exchange,
            "topology",
            f"{title_of(topology)} averages only with push-sum, which works for parameters, not for gradients: use "
            "one of ring, exponential and random_matching",
        )


def parameters_keep_what_is_not_sent(exchange: Exchange) -> Iterator[Refusal]:
    """Refuse residuals of parameters: unsent values stay in the parameters, and would be sent twice."""
    compressor = exchange.compressor
    if exchange.slot != PARAMETERS or exchange.outer is not None:
        return
    if compressor is not None and compressor.traits.keeps_residual:
        yield refuse(
            exchange,
            "compressor",
            f"{title_of(exchange.compressor)} keeps the values that it does not send, but parameters hold them "
            "already, so they would be sent twice: use compressor shared_random, or exchange gradients instead",
        )


def summed_parameters_are_of_all(exchange: Exchange) -> Iterator[Refusal]:
    """Refuse sums of parameters that only some ranks have sent, which are no means."""
    compressor = exchange.compressor
    if not exchange.keeps_own or compressor is None:
        return
    summed = compressor.traits.reducible and exchange.collective.traits.messages is Messages.SUMMED
    if summed and not compressor.traits.same_coordinates:
        yield refuse(
            exchange,
            "compressor",
            f"{title_of(exchange.collective)} cannot average parameters if ranks send different ones, as with "
            f"{title_of(compressor)}: use shared_random, where all ranks send the same ones",
        )


def push_sum_is_not_compressed(exchange: Exchange) -> Iterator[Refusal]:
    """Refuse compressed push-sum, which would need a weight for each coordinate."""
    if exchange.carries_weight and exchange.compressor is not None:
        yield refuse(
            exchange,
            "compressor",
            "push-sum sends whole segments, but a compressor sends parts of them: use compressor none, or another "
            "topology (ring, exponential, random_matching)",
        )


def preparing_excludes_overlap(exchange: Exchange) -> Iterator[Refusal]:
    """Refuse overlap with backward for compressors that look at all gradients before the first is sent."""
    compressor = exchange.compressor
    if compressor is not None and compressor.traits.prepares and exchange.overlap == Overlap.BACKWARD:
        yield refuse(
            exchange,
            "overlap",
            f"{title_of(exchange.compressor)} needs all gradients before it sends the first, so it cannot overlap "
            "with backward: use none",
        )


def preparing_is_of_gradients(exchange: Exchange) -> Iterator[Refusal]:
    """Refuse clipping of parameters: it is for a step's gradients."""
    if exchange.compressor is not None and exchange.compressor.traits.prepares and exchange.slot != GRADIENTS:
        yield refuse(
            exchange,
            "compressor",
            f"{title_of(exchange.compressor)} needs all gradients of a step, but this exchange sends parameters: use "
            "it in gradients",
        )


def optimizer_terms_with_gradients(exchange: Exchange) -> Iterator[Refusal]:
    """Refuse momentum correction of parameters: it corrects gradients, and their step is already taken."""
    if (
        exchange.compressor is not None
        and exchange.compressor.traits.applies_optimizer_terms
        and exchange.slot != GRADIENTS
    ):
        terms = " and ".join(sorted(exchange.compressor.traits.applies_optimizer_terms))
        yield refuse(
            exchange,
            "compressor",
            f"{title_of(exchange.compressor)} applies the optimizer's {terms}, but parameters are exchanged after "
            "the optimizer's step: use it in gradients",
        )


EXCHANGE_RULES = (
    collective_fits_slot,
    overlap_fits_slot,
    gradients_every_step,
    period_of_all_ranks,
    thread_fits_collective,
    collective_carries_compressor,
    answers_are_to_a_sum,
    other_bases_are_gathered,
    collective_takes_compressor,
    topology_where_asked_for,
    gossip_averages,
    parameters_keep_what_is_not_sent,
    summed_parameters_are_of_all,
    push_sum_is_not_compressed,
    preparing_excludes_overlap,
    preparing_is_of_gradients,
    optimizer_terms_with_gradients,
)
