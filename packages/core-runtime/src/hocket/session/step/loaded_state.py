"""An optimizer's state with the dtypes that it was saved in, which torch would change to the parameters'."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from hocket.checkpoint.subclasses import is_composite
from hocket.segment.shards import is_sharded, like, local


@torch.no_grad()
def load_keeping_dtypes(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Load an `optimizer.state_dict()`, and restore dtypes, values and deques' lengths that torch changes.

    A momentum of bfloat16 parameters in float32, for example, would lose the bits that it is kept for.

    Args:
        optimizer: the optimizer.
        saved: a result of `in_shards` on this rank, or of `optimizer.state_dict()`.
    """
    saved = _of_wholes(optimizer, saved)
    optimizer.load_state_dict(saved)
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    keys = [key for group in saved.get("param_groups", ()) for key in group["params"]]
    state = saved.get("state", {})
    for key, parameter in zip(keys, held, strict=False):
        if key in state and parameter in optimizer.state:
            optimizer.state[parameter] = _as_saved(optimizer.state[parameter], state[key])


def in_shards(optimizer: Optimizer) -> dict[str, Any]:
    """Return an `optimizer.state_dict()`, of DTensors this rank's parts."""
    state = optimizer.state_dict()
    if any(is_sharded(p) for group in optimizer.param_groups for p in group["params"]):
        state["state"] = tree_map_only(Tensor, local, state["state"])
    return state


def _of_wholes(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """Return saved state whose tensors are DTensors again where they are this rank's part of one."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not any(map(is_sharded, held)):
        return saved
    keys = [key for group in saved["param_groups"] for key in group["params"]]
    whole = dict(zip(keys, held, strict=False))

    def joined(key: Any, value: Any) -> Any:
        parameter = whole.get(key)
        if parameter is None or not isinstance(value, Tensor) or is_sharded(value) or not value.ndim:
            return value
        part = local(parameter)
        return like(parameter, value.to(part.device)) if value.shape == part.shape else value

    state = {key: {n: joined(key, v) for n, v in of.items()} for key, of in saved["state"].items()}
    return {**saved, "state": state}


def own_state(holder: Optimizer, held: Optimizer) -> dict[str, Any]:
    """Return the `state_dict` of an optimizer around another, if it has more state, as Lookahead's slow weights.

    It is empty if it is the inner one's, or torch's own `state_dict`, which needs torch's `__init__`.
    """
    state = vars(holder).get("state")
    if holder is held or not state or state is held.state or type(holder).state_dict is Optimizer.state_dict:
        return {}
    return holder.state_dict()


def _as_saved(loaded: Any, saved: Any) -> Any:
    """Return the loaded state, with the saved values of tensors that have another dtype now."""
    if isinstance(loaded, Tensor) and isinstance(saved, Tensor):
        if loaded.dtype == saved.dtype or loaded.shape != saved.shape or is_composite(saved):
            return loaded
        return torch.empty_like(loaded, dtype=saved.dtype).copy_(saved)
    if isinstance(loaded, dict) and isinstance(saved, Mapping):
        for key in loaded.keys() & saved.keys():
            loaded[key] = _as_saved(loaded[key], saved[key])
    elif (
        isinstance(loaded, list | tuple | deque) and type(loaded) is type(saved) and len(loaded) == len(saved)
    ):
        pairs = map(_as_saved, loaded, saved)
        return deque(pairs, saved.maxlen) if isinstance(saved, deque) else type(saved)(pairs)
    return loaded
