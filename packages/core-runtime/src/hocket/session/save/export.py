"""Exports of a session's model for other programs: the consensus or each replica, whole, in one collective call.

A rank that holds a whole model writes alone. Of a sharded one the ranks of an island gather tensor after tensor for
their first, which writes; or all ranks write their shards in the format of torch.distributed.checkpoint.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from hocket.checkpoint.collectively import collectively, on_rank_0
from hocket.checkpoint.export_folder import export_folder
from hocket.checkpoint.model_files import ModelTensors, files_of, write_dcp, write_safetensors
from hocket.checkpoint.shared import require_folder
from hocket.errors import CheckpointError, allowed_words, some, suggest
from hocket.plugin import CORE
from hocket.segment.shards import gathered, is_sharded
from hocket.session.save.model_state import model_state, unwrapped
from hocket.transport.peer import Peer, gather

if TYPE_CHECKING:
    from hocket.session.engine_session import EngineSession

_log = logging.getLogger("hocket")

Format = Literal["safetensors", "dcp", "hf"]

FORMATS = ("safetensors", "dcp", "hf")

#: The size of a safetensors file, as Hugging Face's libraries cut them.
MOST_BYTES = 5_000_000_000


class SavesPretrained(Protocol):
    """An object that goes along with a model: a tokenizer, a processor, a configuration."""

    def save_pretrained(self, folder: str, /) -> object:
        """Write itself into a folder."""


@dataclass(frozen=True)
class Export:
    """An export, as it is asked for.

    Attributes:
        folder: its place.
        format: one of `FORMATS`.
        replica: whether each replica is written, and not the consensus.
        max_shard_bytes: the size of a safetensors file; None for that of the format.
        also: what else is written into the folder.
    """

    folder: Path
    format: str
    replica: bool
    max_shard_bytes: int | None
    also: Sequence[SavesPretrained]


def export_model(session: EngineSession, export: Export) -> Path:
    """Carry out `session.export`; return the folder, or that of this rank's replica."""
    session.require("session.export")
    _check(session, export)
    if not export.replica:
        session.warn_of_age()
    with session.replica() if export.replica else session.consensus():
        if session.island.own is None:
            return _of_whole_models(session, export)
        return _of_islands(session, export)


def _check(session: EngineSession, export: Export) -> None:
    """Refuse what cannot be exported, alike on all ranks.

    Raises:
        CheckpointError: says what can.
    """
    if export.format not in FORMATS:
        ending = allowed_words(", ".join(map(repr, FORMATS)), suggest(export.format, FORMATS))
        raise CheckpointError(f"session.export: format is {export.format!r}{ending}")
    if export.max_shard_bytes is not None and export.max_shard_bytes < 1:
        raise CheckpointError(
            f"session.export: max_shard_bytes is {export.max_shard_bytes}; allowed: 1 or more"
        )
    model = unwrapped(session.model)
    if export.format == "hf" and not hasattr(model, "save_pretrained"):
        raise CheckpointError(
            f"session.export: {type(model).__name__} has no save_pretrained, which format='hf' needs: use "
            "format='safetensors', or give a model of transformers, peft or huggingface_hub's PyTorchModelHubMixin"
        )
    for each in export.also:
        if not hasattr(each, "save_pretrained"):
            raise CheckpointError(
                f"session.export: also=... holds a {type(each).__name__}, which has no save_pretrained: leave it out"
            )
    if session.island.own is not None and export.format == "dcp" and _dcp_team(session, export) is None:
        raise CheckpointError(
            "session.export: format dcp needs one replica over all ranks of torch.distributed, but these ranks hold "
            "several replicas or only part of one: use safetensors or hf"
        )


def _of_whole_models(session: EngineSession, export: Export) -> Path:
    place = _place(session, export)

    def write() -> None:
        with export_folder(place, _about(session, export)) as folder:
            _write(session, export, folder, is_main=True)

    if export.replica:
        collectively(session.peer, write)
    else:
        on_rank_0(session.peer, write)
    return place


def _of_islands(session: EngineSession, export: Export) -> Path:
    """Write a sharded model: the ranks of each island together, or those of the first one; as DCP all ranks."""
    place, island = _place(session, export), session.island
    assert island.own is not None
    team = (_dcp_team(session, export) if export.format == "dcp" else None) or island.own
    all_write = team is island.everyone

    def write() -> None:
        if not (all_write or export.replica or _number(session) == 0):
            return
        with contextlib.ExitStack() as stack:  # what the team's first rank writes into

            def begin() -> str:
                return stack.enter_context(export_folder(place, _about(session, export))).name

            folder = place.parent / on_rank_0(team, begin)
            if export.format == "dcp":
                collectively(team, partial(require_folder, folder))
            collectively(team, lambda: _write(session, export, folder, is_main=team.rank == 0))
            on_rank_0(team, stack.close)

    problem, cause = "", None
    try:
        write()
    except CheckpointError as error:
        problem, cause = str(error), error
    problems = list(dict.fromkeys(filter(None, gather(session.peer, problem))))
    if problems:
        raise CheckpointError("\n".join(problems)) from cause
    return place


def _dcp_team(session: EngineSession, export: Export) -> Peer | None:
    """Return the ranks that write shards of one model together, those of torch.distributed; None if these do not."""
    from torch import distributed

    island, size = session.island, distributed.get_world_size()
    if not export.replica and size == session.size:
        return island.everyone
    return island.own if size == island.size else None


def _number(session: EngineSession) -> int:
    """Return the number of this rank's replica."""
    island = session.island
    return island.members.index(session.rank) if island.members else session.rank


def _place(session: EngineSession, export: Export) -> Path:
    return export.folder / f"replica-{_number(session):04d}" if export.replica else export.folder


def _about(session: EngineSession, export: Export) -> dict[str, object]:
    return {
        "format": export.format,
        "of": f"replica {_number(session)}" if export.replica else "consensus",
        "strategy": session.strategy.name,
        "ranks": session.size,
        "step": session.step,
        "hocket-core": CORE.version,
    }


def _write(session: EngineSession, export: Export, folder: Path, *, is_main: bool) -> None:
    """Write the model, or gather it for the rank that does.

    Args:
        session: whose model it is.
        export: as it is asked for.
        folder: the folder that the files go into.
        is_main: whether this rank writes; else it only takes part, or writes its shards.
    """
    state = model_state(session.model)
    if export.format == "dcp":
        write_dcp(folder, state, together=session.island.own is not None)
    elif export.format == "hf":
        whole = _gathered_state(state, keep=is_main)
        if is_main:
            write_pretrained(session.model, whole, folder, export.max_shard_bytes)
    else:
        write_whole(folder, state, export.max_shard_bytes or MOST_BYTES, is_main=is_main)
    if is_main:
        for each in export.also:
            each.save_pretrained(str(folder))


def write_whole(folder: Path, state: Mapping[str, Any], most_bytes: int | None, *, is_main: bool) -> None:
    """Write a model's state as safetensors; collective where it is in shards, of which the whole is never in memory.

    Args:
        folder: an existing folder.
        state: the model's, by name; what is no tensor is left out, with a warning.
        most_bytes: the size of a file; None for one file.
        is_main: whether this rank writes; else it only takes part.

    Raises:
        CheckpointError: a tensor that the format cannot hold.
        OSError: a file cannot be written.
    """
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    others = [name for name in state if name not in tensors]
    if others and is_main:
        _log.warning(
            "%s is not a tensor, so safetensors cannot hold it; session.export(folder, format='dcp') can",
            some(others),
        )
    forms = {name: _form(tensor) for name, tensor in tensors.items()}
    in_order = [tensors[name] for part in files_of(forms, most_bytes).values() for name in part]
    with _gathering(in_order) as wholes:
        if is_main:
            write_safetensors(folder, ModelTensors(forms, lambda _: next(wholes)), most_bytes)


def _form(tensor: Tensor) -> Tensor:
    """Return a tensor of the dtype and shape of the whole."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") if is_sharded(tensor) else tensor


@contextlib.contextmanager
def _gathering(tensors: Sequence[Tensor]) -> Iterator[Iterator[Tensor]]:
    """Give an iterator over whole tensors, each gathered when it is asked for; collective within an island.

    What was not asked for, as after an error, is gathered at the end, for the other ranks.
    """
    wholes = map(gathered, tensors)
    try:
        yield wholes
    finally:
        for _ in wholes:
            pass


def _gathered_state(state: Mapping[str, Any], *, keep: bool) -> dict[str, Any]:
    """Return a state with whole tensors on the CPU where they were in shards; an empty one unless `keep`."""
    whole = {}
    for name, value in state.items():
        own = gathered(value).cpu() if is_sharded(value) else value
        if keep:
            whole[name] = own
    return whole


def write_pretrained(
    model: Any, state: Mapping[str, Any], folder: Path, max_shard_bytes: int | None = None
) -> None:
    """Write a model by its own `save_pretrained`.

    Args:
        model: the model, perhaps in wrappers, and sharded.
        state: its whole state.
        folder: an existing folder.
        max_shard_bytes: the size of a file; None for what the model takes.

    Raises:
        CheckpointError: it takes no state from elsewhere and would write another one, or has written no weights.
    """
    model = unwrapped(model)
    accepted = inspect.signature(model.save_pretrained).parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in accepted.values())
    own = model.state_dict()
    given: dict[str, Any] = {}
    if own.keys() != state.keys() or any(map(is_sharded, own.values())):
        if "state_dict" not in accepted and not takes_any:
            raise CheckpointError(
                f"{type(model).__name__}.save_pretrained does not take a state_dict, which a sharded or partly "
                "compiled model needs: use format='safetensors'"
            )
        given["state_dict"] = dict(state)
    if max_shard_bytes is not None and ("max_shard_size" in accepted or takes_any):
        given["max_shard_size"] = max_shard_bytes
    model.save_pretrained(str(folder), **given)
    if not any(path.suffix in (".safetensors", ".bin") for path in folder.rglob("*")):
        raise CheckpointError(
            f"{type(model).__name__}.save_pretrained wrote no weights on this rank, because transformers writes on "
            "rank 0 of torch.distributed only: use format='safetensors'"
        )
