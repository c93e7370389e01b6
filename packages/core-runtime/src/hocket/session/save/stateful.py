"""The state of a session for checkpoints of torch's own format: what all ranks share, and each rank's own.

The model and the optimizer go beside it, as in a program without Hocket. Where replicas differ, a rank's own part holds
its replica, too, and the model beside it is the replicas' mean.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

from hocket.checkpoint.collectively import collectively
from hocket.checkpoint.files import StateFile, describe
from hocket.checkpoint.manifest import Manifest
from hocket.checkpoint.tree import flatten, unflatten
from hocket.collective.api import Ends
from hocket.errors import CheckpointError
from hocket.plain import Tree, TreeView
from hocket.session.save.checks import of_this_place, require_fit
from hocket.session.save.loading import Loading
from hocket.session.save.saving import content_of, manifest_of
from hocket.session.save.strategy_state import strategy_state
from hocket.strategy.scope import World

if TYPE_CHECKING:
    from hocket.session.engine_session import EngineSession

_log = logging.getLogger("hocket")

#: A nested state: its structure as JSON, and its tensors in host memory. For torch's checkpoints it is one value: these
#: load only the keys that are there already, and a new session has no residuals yet.
Packed: TypeAlias = "tuple[str, dict[str, Tensor]]"

#: The key of what is the same on all ranks.
_ALL = "all"

#: The place of the state, in messages.
_WHERE = Path("the session's state")

#: The kinds of a rank's own values beside outer parameters.
_OWN_KINDS = ("sent", "counted", "moved")


class _HeldState(StateFile):
    """State in memory, read as if from a rank's file."""

    def __init__(self, state: TreeView) -> None:
        structure: Any
        structure, self._tensors = flatten(state)
        self._sections = dict(structure["dict"])
        self.path, self.run, self.left, self._first = _WHERE / "this rank's part", "", [], None
        self._own, self._names = set(self._tensors), list(self._tensors)

    def describe(self, name: str) -> str | None:
        return describe(self._tensors[name]) if name in self._tensors else None

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name].clone()


def state_of(session: EngineSession) -> dict[str, Packed]:
    """Carry out `session.state_dict`."""
    session.require("session.state_dict", training=True)
    with session.trained_values():
        session.end_step_to_save()
        own: Tree = content_of(session, {}, ())
        common = _take_common(session, own)
        return {_ALL: _packed(common), _key(session.rank): _packed(own)}


def _key(rank: int) -> str:
    return f"rank{rank:04d}"


def _take_common(session: EngineSession, own: Tree) -> Tree:
    """Take out of a rank's state what is the same on all ranks, and return that."""
    if session.replicas_equal and "modules" in own:  # else it holds stages of a pipeline
        own["model"] = {**own["model"], "parameters": {}}
        del own["optimizer"]
    mixes: Tree = {}
    for exchange, mix in own.get("parameters", {}).items():
        is_shared = exchange in _with_shared_outer(session)
        outer = {
            name: {kind: kept.pop(kind) for kind in list(kept) if kind not in _OWN_KINDS}
            for name, kept in (mix["outer"].items() if is_shared else ())
        }
        mixes[exchange] = {"weights": {}, "values": {}, "outer": outer}
    return {
        "manifest": asdict(manifest_of(session, session.run_id)),
        "session": own["session"],
        "exchanges": {name: {"rounds": each["rounds"]} for name, each in own.get("exchanges", {}).items()},
        "parameters": mixes,
        "late": {},
        "passes": {"ended": own["passes"]["ended"]},
    }


def _with_shared_outer(session: EngineSession) -> set[str]:
    """Return the names of exchanges whose outer parameters are the same on all ranks."""
    if session.island.own is not None:
        return set()
    return {
        each.name
        for each in session.strategy.at(session.step).parameters
        if isinstance(each.over, World) and each.collective.traits.ends is Ends.SAME
    }


def _packed(state: TreeView) -> Packed:
    structure, tensors = flatten(state)
    return json.dumps(structure), {n: t.detach().to("cpu", copy=True) for n, t in tensors.items()}


def _unpacked(state: Mapping[str, Packed], key: str) -> Tree:
    try:
        structure, tensors = state[key]
        content: Tree = unflatten(json.loads(structure), tensors.__getitem__)
    except (KeyError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{_WHERE}: {key} is missing, or is not as session.state_dict() returns it ({type(error).__name__}: "
            f"{error}): pass what session.state_dict() returned"
        ) from error
    return content


def load_state_of(session: EngineSession, state: Mapping[str, Packed]) -> None:
    """Carry out `session.load_state_dict`."""
    session.require("session.load_state_dict", training=True)
    peer, now = session.peer, dict(content_of(session, {}, ()))
    read: list[tuple[Manifest, Tree]] = []

    def read_common() -> bool:
        common = _unpacked(state, _ALL)
        read.append((Manifest(**common.pop("manifest")), common))
        return read[0][0].ranks == session.size and _key(session.rank) in state

    exact = all(collectively(peer, read_common))
    manifest, common = read[0]
    files: list[StateFile] = []

    def check() -> None:
        saved = _unpacked(state, _key(session.rank)) if exact else {}
        files.append(_HeldState(_joined(now, common, saved)))
        require_fit(session, manifest, of_this_place(session, files)[0], {})

    collectively(peer, check)
    Loading(session, _WHERE, {}).go_on_from(manifest, files, exact=exact)
    if not exact and session.is_main:
        _warn_of_drop(session, manifest, state)


def _joined(now: TreeView, common: TreeView, own: TreeView) -> Tree:
    """Return a rank's whole state: the saved one, and as it is now what was not saved."""
    joined = {**now, **common, **own}
    if own:
        joined["model"] = {kind: own["model"][kind] or each for kind, each in now["model"].items()}
        for exchange, mix in own.get("parameters", {}).items():
            for name, shared in common["parameters"][exchange]["outer"].items():
                mix["outer"][name].update(shared)
    return joined


def _warn_of_drop(session: EngineSession, manifest: Manifest, state: Mapping[str, Packed]) -> None:
    """Warn of what another number of ranks, or ranks without parts of their own, do not go on with."""
    dropped: list[str] = []
    if _key(0) in state:
        saved = _unpacked(state, _key(0))
        dropped += ["replicas that differ"] if saved["model"]["parameters"] else []
        kept = [key.split("/")[1:3] for key in strategy_state([_HeldState(saved)], whole=False)]
        shown = {f"{who} {kind}" for who, kind in kept if kind.removeprefix("outer.") not in _OWN_KINDS}
        dropped += sorted(shown)
    _log.warning(
        "%s was saved by %d ranks, but %d ranks run. Check schedulers and everything else that counts steps: an "
        "epoch now has a different number of steps. Training continues from the present model and optimizer, and from "
        "the outer parameters that all ranks shared. The interrupted pass over the data begins again. What each rank "
        "kept for itself is dropped (%s)",
        _WHERE,
        manifest.ranks,
        session.size,
        ", ".join(dropped) or "random states",
    )
