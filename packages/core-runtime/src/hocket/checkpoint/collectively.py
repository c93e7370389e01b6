"""Actions of every rank, or of some of them, whose failure raises on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from hocket.errors import CheckpointError, HocketError, reason
from hocket.plain import Tree
from hocket.transport.peer import Peer, gather

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
    return results_of(gather(peer, own), cause)


def results_of(outcomes: Sequence[Mapping[str, Any]], cause: BaseException | None) -> list[Any]:
    """Return the results of all ranks.

    Args:
        outcomes: of each rank its `result`, or its `error` in words.
        cause: this rank's own error; None where it has none.

    Raises:
        CheckpointError: a rank has an error; names the ranks and the causes.
    """
    errors = of_ranks([of_rank.get("error", "") for of_rank in outcomes])
    if errors:
        raise CheckpointError("\n".join(errors)) from cause
    return [of_rank["result"] for of_rank in outcomes]


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
    return on_ranks(peer, [0], act)[0]


def on_ranks(peer: Peer, ranks: Collection[int], act: Callable[[], T]) -> list[T]:
    """Run `act` on some ranks, and return their results (JSON-able) on every rank, in their order; collective.

    Raises:
        CheckpointError: on every rank, if `act` raised this, OSError or an error that is not Hocket's on any of them;
            names that rank if there are several.
    """
    own: list[object] = [None, None]
    cause = None
    if peer.rank in ranks:
        try:
            own = [act(), None]
        except Exception as error:
            cause, own = error, [None, _described(error)]
    gathered = gather(peer, own)
    errors = [gathered[rank][1] or "" for rank in ranks]
    if any(errors):
        named = zip(ranks, errors, strict=True)
        lines = errors if len(ranks) == 1 else [f"rank {rank}: {error}" for rank, error in named if error]
        raise CheckpointError("\n".join(lines)) from cause
    return [gathered[rank][0] for rank in ranks]


def _described(error: Exception) -> str:
    """Return the text of an error for the other ranks, or raise it if they meet it by themselves."""
    if isinstance(error, HocketError) and not isinstance(error, CheckpointError):
        raise error
    return in_words(error)


def in_words(error: BaseException) -> str:
    """Return the text of an error for the other ranks."""
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {reason(error)}"
    if isinstance(error, CheckpointError | OSError):
        return str(error)
    return f"{type(error).__name__}: {error}"
