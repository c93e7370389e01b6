"""The order of parameters' elements in memory, which saved states of exchanges depend on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hocket.errors import CheckpointError
from hocket.segment.partition import unusual_strides
from hocket.segment.segment import Segment

__all__ = ["check_strides", "strides_of"]


def strides_of(segments: Iterable[Segment]) -> dict[str, list[int]]:
    """Return the strides of parameters in segments, where their order is not that of the axes."""
    spans = [span for segment in segments for span in segment.spans]
    found = {span.name: unusual_strides(span.shape, span.stride) for span in spans}
    return {name: strides for name, strides in found.items() if strides is not None}


def check_strides(exchange: str, now: Mapping[str, Sequence[int]], then: Mapping[str, Sequence[int]]) -> None:
    """Refuse a state of an exchange whose elements lie in another order than these parameters'.

    Raises:
        CheckpointError: they do.
    """
    differing = [name for name in {**now, **then} if now.get(name) != then.get(name)]
    if differing:
        raise CheckpointError(
            f"{exchange}: parameter {differing[0]} lies in memory in another order than when this was "
            f"saved (channels_last?): strides {now.get(differing[0], 'of its axes in order')}, and "
            f"{then.get(differing[0], 'of its axes in order')} then. What the exchange keeps is in that order: "
            "give the model the memory format that it had, before attach"
        )
