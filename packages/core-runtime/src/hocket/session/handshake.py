"""What all ranks must agree in before a byte of model moves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hocket.errors import DisagreementError
from hocket.transport.peer import Peer

__all__ = ["agree", "flattened"]


def agree(peer: Peer, facts: Mapping[str, Any]) -> None:
    """Compare `facts` over all ranks; collective.

    Args:
        peer: the world.
        facts: JSON-able values by name, nested mappings allowed.

    Raises:
        DisagreementError: on every rank; names the facts that differ, and on which ranks.
    """
    if peer.size == 1:
        return
    mine = json.dumps(facts, sort_keys=True, default=str).encode()
    told = peer.allgather_bytes(mine)
    if all(other == told[0] for other in told):
        return
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
    shown = lines[:8] + ([f"  and {len(lines) - 8} more"] if len(lines) > 8 else [])
    raise DisagreementError("the ranks were started differently:\n" + "\n".join(shown))


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
