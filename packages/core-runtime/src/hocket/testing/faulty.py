"""Carry out a body of a conformance suite with faults, in a rank of another process."""

from __future__ import annotations

from importlib import import_module

from hocket.checkpoint.tree import JSON
from hocket.plain import Tree
from hocket.transport.faults import Faults
from hocket.transport.peer import Peer

__all__ = ["carry_out_with_faults"]


def carry_out_with_faults(peer: Peer, faults: Tree, module: str, name: str, *args: JSON) -> JSON:
    """Return the result of the function `name` of `module` for `peer` with faults.

    Args:
        peer: the peer of all ranks.
        faults: the arguments of `Faults`, JSON values.
        module, name, args: as in `hocket.testing.job`.
    """
    result: JSON = getattr(import_module(module), name)(Faults(**faults).wrap(peer), *args)
    return result
