"""Rules that reject meaningless combinations of one exchange's choices."""

from __future__ import annotations

from collections.abc import Iterator

from hocket.collective.api import Ends, Messages
from hocket.strategy.exchange import GRADIENTS, PARAMETERS, Every, Exchange, Overlap, ProgressMode
from hocket.strategy.rules.refusal import Refusal, refuse, title_of
from hocket.strategy.scope import World

__all__ = ["EXCHANGE_RULES"]

_OVERLAPS = {
    GRADIENTS: (Overlap.NONE, Overlap.BACKWARD),
    PARAMETERS: (Overlap.NONE, Overlap.FORWARD),
}


def collective_fits_slot(exchange: Exchange) -> Iterator[Refusal]:
    """A collective declares the slots in which it means something."""
    slots = exchange.collective.traits.slots
    if exchange.slot not in slots:
        allowed = " or ".join(sorted(slots))
        yield refuse(
            exchange, "collective", f"{title_of(exchange.collective)} means nothing here: use it in {allowed}"
        )


def overlap_fits_slot(exchange: Exchange) -> Iterator[Refusal]:
    """Gradients overlap with the backward that makes them, parameters with what follows the step."""
    possible = _OVERLAPS[exchange.slot]
    if exchange.overlap not in possible:
        yield refuse(
            exchange,
            "overlap",
            f"{exchange.slot} cannot be overlapped with {exchange.overlap}: use {' or '.join(possible)}",
        )


def gradients_every_step(exchange: Exchange) -> Iterator[Refusal]:
    """Steps with gradients that nobody exchanged let the replicas drift apart for good."""
    if exchange.slot == GRADIENTS and exchange.every != 1:
        yield refuse(
            exchange,
            "every",
            f"with gradients exchanged every {exchange.every} steps the replicas drift apart in between: for "
            "larger batches use session.accumulate(), for local steps average the parameters every "
            f"{exchange.every} (recipe periodic_average)",
        )


def period_of_all_ranks(exchange: Exchange) -> Iterator[Refusal]:
    """Exchanges that follow each other take place in the same steps, whatever the sizes of their scopes."""
    if isinstance(exchange.every, Every) and not isinstance(exchange.over, World):
        yield refuse(
            exchange,
            "every",
            f"{exchange.every} over {title_of(exchange.over)} differs with the size of each scope: use a number, or "
            "over: world",
        )


def thread_fits_collective(exchange: Exchange) -> Iterator[Refusal]:
    """Requests that the training thread's other waits advance, too, cannot be a progress thread's."""
    if exchange.progress is ProgressMode.THREAD and not exchange.collective.traits.threadable:
        yield refuse(
            exchange,
            "progress",
            f"{title_of(exchange.collective)} is advanced by the training thread, or brings its own schedule: use "
            "inline, or gossip",
        )


def collective_carries_compressor(exchange: Exchange) -> Iterator[Refusal]:
    """Some collectives carry no messages of compressors, and some add them in flight and cannot look into them."""
    messages = exchange.collective.traits.messages
    if exchange.compressor is None:
        return
    if messages is Messages.NONE:
        yield refuse(
            exchange,
            "compressor",
            f"{title_of(exchange.collective)} sends values whole: use none, or a collective that carries messages "
            "(allreduce, sparse_allreduce, gossip)",
        )
    elif messages is Messages.SUMMED and not exchange.compressor.traits.reducible:
        yield refuse(
            exchange,
            "compressor",
            f"{title_of(exchange.collective)} combines messages in flight, and those of "
            f"{title_of(exchange.compressor)} cannot be added as they are: use a collective that gathers "
            "(sparse_allreduce, gossip), or compressor none",
        )


def answers_are_to_a_sum(exchange: Exchange) -> Iterator[Refusal]:
    """What answers to the sum of all ranks' messages needs a collective that gives all of them that sum."""
    traits, compressor = exchange.collective.traits, exchange.compressor
    if compressor is None or not compressor.traits.answers:
        return
    if traits.messages is Messages.GATHERED or (
        traits.messages is Messages.SUMMED and traits.ends is not Ends.SAME
    ):
        yield refuse(
            exchange,
            "collective",
            f"{title_of(compressor)} answers to the sum of all ranks' messages, which {title_of(exchange.collective)} "
            "does not give: use allreduce",
        )


def other_bases_are_gathered(exchange: Exchange) -> Iterator[Refusal]:
    """Messages of another basis than values are added up before they are values."""
    traits, compressor = exchange.collective.traits, exchange.compressor
    if compressor is None or not compressor.traits.transforms:
        return
    if traits.messages is not Messages.NONE and not (
        traits.messages is Messages.GATHERED and traits.ends is Ends.SAME
    ):
        yield refuse(
            exchange,
            "collective",
            f"{title_of(compressor)} sends another basis than values, of which {title_of(exchange.collective)} would "
            "make values message by message: use sparse_allreduce",
        )


def collective_takes_compressor(exchange: Exchange) -> Iterator[Refusal]:
    """A collective may know more of its compressor than that it carries messages."""
    try:
        exchange.collective.check_compressor(exchange.compressor)
    except ValueError as error:
        yield refuse(exchange, "compressor", str(error))


def topology_where_asked_for(exchange: Exchange) -> Iterator[Refusal]:
    """A topology that nobody asks changes nothing, and a collective that asks needs one."""
    needs = exchange.collective.traits.needs_topology
    title = title_of(exchange.collective)
    if needs and exchange.topology is None:
        yield refuse(exchange, "topology", f"{title} needs one: for instance topology: complete")
    if not needs and exchange.topology is not None:
        yield refuse(
            exchange, "topology", f"{title} takes none: leave it out, or use a collective that does (gossip)"
        )


def gossip_averages(exchange: Exchange) -> Iterator[Refusal]:
    """Without push-sum, a matrix whose rows do not sum to 1 makes some ranks' values larger and others' smaller."""
    topology, traits = exchange.topology, exchange.collective.traits
    if topology is None or topology.rows_sum_to_one or traits.passive:
        return
    if not traits.pushes_weight:
        yield refuse(
            exchange,
            "topology",
            f"what a rank receives over {title_of(topology)} and keeps does not add up to 1, so it is no average: use "
            "push_sum: true with it, or one of ring, exponential and random_matching",
        )
    elif exchange.slot == GRADIENTS:
        yield refuse(
            exchange,
            "topology",
            f"push-sum divides parameters by a weight, and gradients have none; without it {title_of(topology)} does "
            "not average: use one of ring, exponential and random_matching",
        )


def parameters_keep_what_is_not_sent(exchange: Exchange) -> Iterator[Refusal]:
    """What a round of parameters does not send is in them still: a residual would send it twice."""
    compressor = exchange.compressor
    if exchange.slot != PARAMETERS or exchange.outer is not None:
        return
    if compressor is not None and compressor.traits.keeps_residual:
        yield refuse(
            exchange,
            "compressor",
            f"{title_of(exchange.compressor)} keeps what it does not send for later, and parameters hold it anyway: "
            "use it in gradients, or shared_random here",
        )


def summed_parameters_are_of_all(exchange: Exchange) -> Iterator[Refusal]:
    """Of parameters that only some ranks have sent a sum is no mean."""
    compressor = exchange.compressor
    if not exchange.keeps_own or compressor is None:
        return
    summed = compressor.traits.reducible and exchange.collective.traits.messages is Messages.SUMMED
    if summed and not compressor.traits.same_coordinates:
        yield refuse(
            exchange,
            "compressor",
            f"of parameters that {title_of(compressor)} sends on some ranks only {title_of(exchange.collective)} "
            "gives no mean: use shared_random, by which all ranks send the same",
        )


def push_sum_is_not_compressed(exchange: Exchange) -> Iterator[Refusal]:
    """A compressed push-sum would need the share of the weight that each coordinate carries."""
    if exchange.carries_weight and exchange.compressor is not None:
        yield refuse(
            exchange,
            "compressor",
            "the push-sum weight is of the whole segment, and compressed values are not: use none, or a doubly "
            "stochastic topology (ring, exponential, random_matching)",
        )


def preparing_excludes_overlap(exchange: Exchange) -> Iterator[Refusal]:
    """What looks at all gradients before the first is sent cannot start while backward still makes them."""
    compressor = exchange.compressor
    if compressor is not None and compressor.traits.prepares and exchange.overlap == Overlap.BACKWARD:
        yield refuse(
            exchange,
            "overlap",
            f"{title_of(exchange.compressor)} looks at all gradients before the first is sent, so nothing "
            "is left to overlap with backward: use none",
        )


def preparing_is_of_gradients(exchange: Exchange) -> Iterator[Refusal]:
    """What clips looks at a step's gradients; parameters are not clipped."""
    if exchange.compressor is not None and exchange.compressor.traits.prepares and exchange.slot != GRADIENTS:
        yield refuse(
            exchange,
            "compressor",
            f"{title_of(exchange.compressor)} looks at all gradients of a step, and these are parameters: use it in "
            "gradients",
        )


def optimizer_terms_with_gradients(exchange: Exchange) -> Iterator[Refusal]:
    """A compressor that takes over momentum corrects gradients; in parameters the step is already taken."""
    if (
        exchange.compressor is not None
        and exchange.compressor.traits.applies_optimizer_terms
        and exchange.slot != GRADIENTS
    ):
        terms = " and ".join(sorted(exchange.compressor.traits.applies_optimizer_terms))
        yield refuse(
            exchange,
            "compressor",
            f"{title_of(exchange.compressor)} takes over the optimizer's {terms}, and here its step is already "
            "taken: use it in gradients",
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
