"""A warning where torch.distributed.checkpoint saves replicas that differ: its files would mix them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import cache
from typing import Protocol
from weakref import WeakSet

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hocket.segment.shards import address_of
from hocket.session.torch_internals import replace_method

_log = logging.getLogger("hocket")

#: Where torch plans what each rank saves, if its checkpoints are in use.
_PLANNER = "torch.distributed.checkpoint.default_planner"


class OneReplica(Protocol):
    """A session with one of several replicas."""

    model: nn.Module
    step: int

    @property
    def saves_mixed(self) -> bool:
        """Tell whether a checkpoint that all ranks write now mixes replicas, and this rank is to say so."""


_watched: WeakSet[OneReplica] = WeakSet()


def watch_dcp(session: OneReplica) -> None:
    """Warn from now on, once, if torch's checkpoints save a session's model outside of a consensus."""
    planner = getattr(sys.modules.get(_PLANNER), "DefaultSavePlanner", None)
    if planner is not None:
        _replace(planner)
        _watched.add(session)


@cache
def _replace(planner: type) -> None:
    def noticing(set_up: Callable[..., None]) -> Callable[..., None]:
        def notice(
            self: object, state_dict: object, *args: object, is_coordinator: bool = False, **how: object
        ) -> None:
            # Ranks that write together have one coordinator.
            if not is_coordinator:
                _look(state_dict)
            set_up(self, state_dict, *args, is_coordinator=is_coordinator, **how)

        return notice

    replace_method(planner, "set_up_planner", noticing)


def _look(state: object) -> None:
    sessions = [each for each in list(_watched) if each.saves_mixed]
    saved = (
        {address_of(leaf) for leaf in tree_leaves(state) if isinstance(leaf, Tensor)} if sessions else set()
    )
    saved.discard(0)  # of empty shards
    for session in sessions:
        if not saved.isdisjoint(map(address_of, session.model.parameters())):
            _watched.discard(session)
            _log.warning(
                "torch.distributed.checkpoint saves the model outside of session.consensus(), at step %d: replicas "
                "differ, and it takes each tensor or shard from whichever rank has less to write, so the files mix "
                "replicas. Save `with session.consensus():`, or by session.export(folder, format='dcp')",
                session.step,
            )
