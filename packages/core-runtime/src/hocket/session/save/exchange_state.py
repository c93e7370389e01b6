"""The state of an open exchange in a checkpoint: rounds, what its channel remembers, and what is under way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple
from typing import Any

from hocket.checkpoint.tree import flatten
from hocket.collective.api import Outcome
from hocket.errors import CheckpointError
from hocket.segment.partition import unusual_strides
from hocket.segment.segment import Segment
from hocket.session.exchange.active import ActiveExchange
from hocket.session.save.strategy_state import SavedSpans


def state_of_exchange(opened: ActiveExchange) -> dict[str, Any]:
    """Return the state for a resumed run: rounds, the channel's state, received but unmerged results.

    Waits for exchanges under way without ending their rounds: a run continues the same whether it is saved or not.
    """
    pending = {}
    for segment in opened.segments:
        if opened.started(segment):
            outcome = opened.receive(segment)
            pending[segment.index] = {
                "outcome": astuple(outcome),
                "outgoing": segment.outgoing[: segment.numel],
                "incoming": segment.incoming[: segment.numel],
                "companions": segment.incoming_trailer,
            }
    channel = opened.channel.state_dict()
    return {
        "rounds": {str(index): round for index, round in opened.rounds.items()},
        "channel": channel,
        "pending": pending,
        "strides": _strides_of(opened.segments),
        # For others, who read what a channel remembers by parameter.
        "spans": _spans_of(opened.segments) if pending or flatten(channel)[1] else {},
    }


def load_exchange(opened: ActiveExchange, state: dict[str, Any]) -> None:
    """Continue from a result of `state_of_exchange` on this rank; no exchange is under way.

    Raises:
        CheckpointError: the saved parameters' elements lay in another order, and that matters.
    """
    pending = state["pending"]
    if pending or flatten(state["channel"])[1]:
        _check_strides(opened.exchange.name, _strides_of(opened.segments), state["strides"])
    # What is pending has been started.
    opened.rounds = {
        segment.index: state["rounds"][str(segment.index)] + (segment.index in pending)
        for segment in opened.segments
    }
    opened.channel.resume(dict(opened.rounds), state["channel"])
    for segment in opened.segments:
        if segment.index in pending:
            saved = pending[segment.index]
            segment.restore(saved["outgoing"], saved["incoming"], saved["companions"])
            opened.put_back(segment, Outcome(*saved["outcome"]))


def _spans_of(segments: Iterable[Segment]) -> SavedSpans:
    """Return the parameters' places in segments, by the segment's index."""
    return {
        str(s.index): (
            s.numel,
            [(each.name, each.start, list(each.shape), list(each.stride)) for each in s.spans],
        )
        for s in segments
    }


def _strides_of(segments: Iterable[Segment]) -> dict[str, list[int]]:
    """Return the strides of parameters in segments, where their order is not that of the axes."""
    spans = [span for segment in segments for span in segment.spans]
    found = {span.name: unusual_strides(span.shape, span.stride) for span in spans}
    return {name: strides for name, strides in found.items() if strides is not None}


def _check_strides(
    exchange: str, now: Mapping[str, Sequence[int]], then: Mapping[str, Sequence[int]]
) -> None:
    """Refuse a state of an exchange whose elements lie in another order than these parameters'.

    Raises:
        CheckpointError: they do.
    """
    differing = [name for name in {**now, **then} if now.get(name) != then.get(name)]
    if differing:
        raise CheckpointError(
            f"{exchange}: parameter {differing[0]} had {_written(then.get(differing[0]))} when it was saved, and has "
            f"{_written(now.get(differing[0]))} now (channels_last?): give the model the saved memory format before "
            "attach"
        )


def _written(strides: Sequence[int] | None) -> str:
    return "the usual strides" if strides is None else f"strides {strides}"
