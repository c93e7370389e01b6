"""What all ranks must agree in before a byte of model moves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hocket.errors import AttachError, DisagreementError
from hocket.transport.peer import Peer, gather

__all__ = ["agree", "differing", "flattened"]


def agree(peer: Peer, facts: Mapping[str, Any], refusal: str | None = None) -> None:
    """Compare `facts` over all ranks; collective.

    Args:
        peer: the world.
        facts: JSON-able values by name, nested mappings allowed.
        refusal: why this rank cannot go on, whatever the others have.

    Raises:
        AttachError: on every rank: a rank cannot go on; with its reason.
        DisagreementError: on every rank; names the facts that differ, and on which ranks.
    """
    refusals = gather(peer, refusal)
    if refusal is not None:
        raise AttachError(refusal)
    for rank, told in enumerate(refusals):
        if told is not None:
            raise AttachError(f"rank {rank} cannot attach: {told}")
    differences = differing(peer, facts)
    if differences:
        raise DisagreementError("the ranks were started differently:\n" + differences)


def differing(peer: Peer, facts: Mapping[str, Any]) -> str:
    """Compare `facts` over all ranks; collective.

    Args:
        peer: the ranks.
        facts: JSON-able values by name, nested mappings allowed.

    Returns:
        A line for each of the first facts that differ, with its values and their ranks; empty where none does.
    """
    if peer.size == 1:
        return ""
    mine = json.dumps(facts, sort_keys=True, default=str).encode()
    told = peer.allgather_bytes(mine)
    if all(other == told[0] for other in told):
        return ""
    flat = [flattened(json.loads(other)) for other in told]
    keys = sorted({key for facts_of_rank in flat for key in facts_of_rank})
    lines = []
    for key in keys:
        ranks_by_value: dict[str, list[int]] = {}
        for rank, facts_of_rank in enumerate(flat):
            ranks_by_value.setdefault(json.dumps(facts_of_rank.get(key, "nothing")), []).append(rank)
        if len(ranks_by_value) > 1:
            told_here = ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in ranks_by_value.items())
            lines.append(f"  {key}: {told_here}")
    return "\n".join(lines[:8] + ([f"  and {len(lines) - 8} more"] if len(lines) > 8 else []))


def flattened(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return the values in nested mappings and lists, by the keys that lead to them, joined by dots."""
    if isinstance(value, list):
        value = {str(index): child for index, child in enumerate(value)}
    if not isinstance(value, dict):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, child in value.items():
        flat.update(flattened(child, f"{prefix}.{key}" if prefix else key))
    return flat


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
