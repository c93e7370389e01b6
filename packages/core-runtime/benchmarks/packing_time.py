"""The time that this machine takes to compress exchanges' messages, and to add received ones."""

from __future__ import annotations

import math
import time

import torch

from hocket.collective.api import Messages
from hocket.compressor.api import Compressor, Message
from hocket.plan.layout import Layout
from hocket.plan.plan import ExchangePlan, Plan
from hocket.segment.segment import Segment

#: So many elements are compressed at least, or all; what a segment takes is proportional to them.
_LEAST_NUMEL = 1 << 22
_REPEATS = 3


def packing_seconds(plan: Plan) -> float:
    """Measure the mean seconds per step that one rank takes to compress, and to add received messages.

    It runs on one thread, as if ranks share a host's cores. Values are drawn from a normal distribution, and all ranks'
    messages are as long as this one's.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return sum(_of_exchange(planned) for planned in plan.exchanges)
    finally:
        torch.set_num_threads(threads)


def _of_exchange(planned: ExchangePlan) -> float:
    exchange = planned.exchange
    if exchange.compressor is None or not planned.layouts:
        return 0.0
    size = max(map(len, planned.scopes))
    gathered = exchange.collective.traits.messages is Messages.GATHERED
    taken, numel = 0.0, 0
    for layout in sorted(planned.layouts, key=lambda each: each.wire_numel, reverse=True):
        taken += _of_segment(exchange.compressor, layout, size if gathered else 1)
        numel += layout.wire_numel
        if numel >= _LEAST_NUMEL:
            break
    share = sum(layout.wire_numel for layout in planned.layouts) / numel
    return taken * share / exchange.period(size)


def _of_segment(compressor: Compressor, layout: Layout, messages: int) -> float:
    """Return the least seconds of a few rounds of one segment."""
    if compressor.traits.applies_optimizer_terms:
        compressor = compressor.without_optimizer_terms()
    outgoing, incoming = (torch.zeros(layout.wire_numel, dtype=layout.dtype) for _ in range(2))
    segment = Segment("measured", 0, layout.spans, outgoing, incoming)
    state = compressor.init(segment)
    generator = torch.Generator().manual_seed(0)
    least = math.inf
    for round in range(_REPEATS):
        outgoing[: segment.numel].normal_(generator=generator)
        segment.finite = True
        start_s = time.perf_counter()
        message: Message = compressor.compress(segment, state, round)
        while (answer := compressor.answer(message, segment, state)) is not None:
            message = answer
        for _ in range(messages):
            compressor.accumulate(message, 1.0, incoming)
        least = min(least, time.perf_counter() - start_s)
    return least
