"""Actions of every rank, or of rank 0 alone, whose failure raises on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from hocket.errors import CheckpointError, HocketError, reason
from hocket.plain import Tree
from hocket.transport.peer import Peer, gather

__all__ = ["collectively", "of_ranks", "on_rank_0"]

T = TypeVar("T")


def collectively(peer: Peer, act: Callable[[], T]) -> list[T]:
    """Run `act` on each rank, and return the results (JSON-able) of all ranks; collective.

    Raises:
        CheckpointError: on every rank, if `act` raised this, OSError or an error that is not Hocket's on any rank;
            names the ranks and the causes.
    """
    own: Tree
    cause = None
    try:
        own = {"result": act()}
    except Exception as error:
        cause, own = error, {"error": _described(error)}
    everyone = gather(peer, own)
    errors = of_ranks([of_rank.get("error", "") for of_rank in everyone])
    if errors:
        raise CheckpointError("\n".join(errors)) from cause
    return [of_rank["result"] for of_rank in everyone]


def of_ranks(reported: Sequence[str]) -> list[str]:
    """Return the different texts of all ranks, each with the ranks that reported it; empty ones are left out."""
    ranks_by_text: dict[str, list[str]] = {}
    for rank, text in enumerate(reported):
        if text:
            ranks_by_text.setdefault(text, []).append(str(rank))
    return [
        text if len(ranks) == len(reported) else f"rank {', '.join(ranks)}: {text}"
        for text, ranks in ranks_by_text.items()
    ]


def on_rank_0(peer: Peer, act: Callable[[], T]) -> T:
    """Run `act` on rank 0, and return its result (JSON-able) on every rank; collective.

    Raises:
        CheckpointError: on every rank, if `act` raised this, OSError or an error that is not Hocket's.
    """
    own: list[object] = [None, None]
    cause = None
    if peer.rank == 0:
        try:
            own = [act(), None]
        except Exception as error:
            cause, own = error, [None, _described(error)]
    result: T
    result, error_of_0 = gather(peer, own)[0]
    if error_of_0 is not None:
        raise CheckpointError(error_of_0) from cause
    return result


def _described(error: Exception) -> str:
    """Return the text of an error for the other ranks, or raise it if they meet it by themselves."""
    if isinstance(error, HocketError) and not isinstance(error, CheckpointError):
        raise error
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {reason(error)}"
    if isinstance(error, CheckpointError | OSError):
        return str(error)
    return f"{type(error).__name__}: {error}"
