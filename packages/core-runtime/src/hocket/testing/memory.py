"""The memory that a session's exchanges hold, to compare with what a plan says."""

from __future__ import annotations

import gc
import types
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import hocket
from hocket.testing.session import inner_of

__all__ = ["covered_bytes", "held_bytes", "reachable_bytes"]

#: What no buffer of an exchange lies behind: the user's own, and the transport, through which all ranks are reached.
_NOT_FOLLOWED = (types.ModuleType, type, nn.Module, torch.optim.Optimizer, hocket.Session)


def held_bytes(session: hocket.Session) -> int:
    """Return the bytes of the buffers of a session's exchanges, without the parameters themselves."""
    inner = inner_of(session)
    return reachable_bytes(inner.phase.opened, without=inner.storage.flats)


def reachable_bytes(roots: Any, without: Sequence[Tensor] = ()) -> int:
    """Return the bytes of all tensors and arrays that are reached from `roots`, each piece of memory once.

    Args:
        roots: where to begin.
        without: their memory does not count.
    """
    seen: set[int] = set()
    memory: dict[int, int] = {}
    queue = [roots, *without]
    while queue:
        thing = queue.pop()
        if id(thing) in seen or isinstance(thing, _NOT_FOLLOWED) or _is_transport(thing):
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            storage = thing.untyped_storage()
            start = storage.data_ptr()
            memory[start] = max(memory.get(start, 0), storage.nbytes())
        elif isinstance(thing, np.ndarray):
            while isinstance(thing.base, np.ndarray):
                thing = thing.base
            memory.setdefault(thing.ctypes.data, thing.nbytes)
        elif isinstance(thing, types.FunctionType):
            queue += [thing.__closure__, thing.__defaults__]  # not its module's globals
        else:
            queue += gc.get_referents(thing)
    return covered_bytes(memory) - sum(tensor.untyped_storage().nbytes() for tensor in without)


def covered_bytes(pieces: Mapping[int, int]) -> int:
    """Return the bytes of pieces of memory, of which some may lie in others: their lengths by address."""
    counted, end = 0, 0
    for start, nbytes in sorted(pieces.items()):
        counted += max(0, start + nbytes - max(start, end))
        end = max(end, start + nbytes)
    return counted


def _is_transport(thing: Any) -> bool:
    return type(thing).__module__.startswith("hocket.transport.")
