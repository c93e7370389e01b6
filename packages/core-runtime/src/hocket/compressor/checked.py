"""Messages of compressors, the first of each state checked for mistakes of who wrote the compressor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hocket.compressor.api import Compressor, Message, State
from hocket.errors import UserError

if TYPE_CHECKING:
    from hocket.arrays import Array
    from hocket.segment.segment import Segment


def message_of(compressor: Compressor, segment: Segment, state: State, round: int) -> Message:
    """Return the message of `compressor.compress`; check the first one of each state for mistakes.

    Raises:
        UserError: the message cannot travel; names segment, compressor and round.
    """
    message = compressor.compress(segment, state, round)
    if not state._looked_at:
        fault = payload_fault(compressor, message, segment)
        if fault is not None:
            from hocket.plugin import Kind, default_registry

            name = default_registry().name_of(Kind.COMPRESSOR, type(compressor))
            raise UserError(
                f"{segment.name}: compressor {name} in round {round}: compress returned {fault}. "
                "Run its conformance suite, hocket.testing.compressor.CompressorConformance"
            )
        state._looked_at = True
    return message


def payload_fault(compressor: Compressor, message: object, segment: Segment) -> str | None:
    """Return a description of what is wrong with the form of a message from `compress`; None if nothing is."""
    if not isinstance(message, Message):
        return f"{_kind(message)}, not a Message"
    payload: object = message.payload
    if not isinstance(payload, np.ndarray):
        return f"a payload of {_kind(payload)}, not a NumPy array"
    if payload.ndim != 1 or not payload.flags.c_contiguous:
        return f"a payload of shape {payload.shape} and strides {payload.strides}, not one contiguous axis"
    if compressor.traits.reducible and payload.dtype.name not in ("float32", "float64"):
        return f"a payload of {payload.dtype}, but reducible messages need float32 or float64"
    return _size_fault(compressor, payload, segment)


def _size_fault(compressor: Compressor, payload: Array, segment: Segment) -> str | None:
    traits, footprint = compressor.traits, compressor.footprint(segment)
    if traits.equal_sizes and not traits.answers and payload.nbytes != footprint.message_bytes:
        said = f"message_bytes={footprint.message_bytes:g}"
    elif payload.nbytes > footprint.longest_bytes:
        said = f"longest_bytes={footprint.longest_bytes}"
    else:
        return None
    dtype = str(segment.dtype).removeprefix("torch.")
    return (
        f"a payload of {len(payload)} {payload.dtype}, {payload.nbytes} bytes, but footprint says {said} of "
        f"this segment of {segment.numel} {dtype} and {segment.trailer_numel} in the trailer"
    )


def _kind(value: object) -> str:
    return "None" if value is None else f"{type(value).__module__}.{type(value).__qualname__}"
