"""Gathering of control messages over a peer, and checks and results shared by every lane's `iallgather`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from hocket.arrays import Array
from hocket.errors import HocketError, TransportError

#: Returns the values of all ranks, which JSON can hold, by rank; collective.
Gather = Callable[[object], list[Any]]


class Ranks(Protocol):
    """A group of ranks: a peer, seen from here."""

    @property
    def rank(self) -> int:
        """Return this rank."""

    @property
    def size(self) -> int:
        """Return the number of ranks."""

    def allgather_bytes(
        self, data: bytes, timeout_s: float | None = None, what: str = "allgather"
    ) -> list[bytes]:
        """Gather bytes; see `Peer.allgather_bytes`."""


def gather(peer: Ranks, value: object, timeout_s: float | None = None, what: str = "allgather") -> list[Any]:
    """Return every rank's `value`, which JSON can hold, by rank; collective, as `Peer.allgather_bytes`.

    Raises:
        HocketError: JSON cannot hold the value.
    """
    try:
        data = json.dumps(value).encode()
    except (TypeError, ValueError) as error:
        raise HocketError(
            f"rank {peer.rank}: {what} takes JSON values (numbers, text, lists, mappings with text as keys), not a "
            f"{type(value).__name__}: {error}. Give a tensor as tensor.tolist(), one number as tensor.item()"
        ) from None
    gathered_bytes = peer.allgather_bytes(data, timeout_s, what)
    return [json.loads(data) for data in gathered_bytes]


def check_gathering(where: str, send: Array, receive: Array, size: int) -> None:
    """Refuse buffers that cannot be gathered.

    Args:
        where: the rank and the lane, for messages.
        send: should be uint8 [n].
        receive: should be uint8 [size, capacity] with n <= capacity, and other memory than `send`.
        size: ranks of the lane.

    Raises:
        TransportError: they cannot be gathered; says what they are, and should be.
    """
    for name, array, num_dimensions in (("send", send, 1), ("receive", receive, 2)):
        if array.dtype != np.uint8 or array.ndim != num_dimensions or not array.flags.c_contiguous:
            raise TransportError(
                f"{where}: iallgather: {name} is {array.dtype}{list(array.shape)}, but must be contiguous uint8 with "
                f"{num_dimensions} dimension{'s' * (num_dimensions > 1)}"
            )
    if receive.shape[0] != size:
        raise TransportError(
            f"{where}: iallgather: receive has {receive.shape[0]} rows, but the lane has {size} ranks"
        )
    if send.size > receive.shape[1]:
        raise TransportError(
            f"{where}: iallgather: a message of {send.size} bytes, but receive has room for {receive.shape[1]} of "
            "each rank: open it with a larger capacity"
        )
    if not receive.flags.writeable:
        raise TransportError(f"{where}: iallgather: receive is read-only")
    if np.may_share_memory(send, receive):
        raise TransportError(f"{where}: iallgather: send and receive must be different buffers")


def gathered(receive: Array, lengths: Sequence[int]) -> list[Array]:
    """Return each rank's message as a view of `receive` [size, capacity], by rank."""
    return [row[:length] for row, length in zip(receive, lengths, strict=True)]
