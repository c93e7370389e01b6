"""`hocket export`: the model of a run, a checkpoint or an export, written without the ranks that made it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hocket.checkpoint.export_folder import export_folder
from hocket.checkpoint.folder import complete, newest_first
from hocket.checkpoint.manifest import MANIFEST
from hocket.checkpoint.model_files import ModelTensors, open_model, write_dcp, write_safetensors
from hocket.disk import naming, write_durably
from hocket.errors import UserError
from hocket.plugin import CORE
from hocket.results import CHECKPOINTS, CONFIG, MODEL, SUMMARY
from hocket.results.kept_config import read_config
from hocket.results.script import is_of_script
from hocket.session.save.export import MOST_BYTES, write_pretrained
from hocket.session.save.model_state import load_model, model_state
from hocket.session.save.saved_model import SavedModel, open_checkpoint
from hocket.task.user import call_user_function, load_user_object
from hocket.training.run import build_task, load_run

FORMATS = ("safetensors", "dcp", "hf", "torch")

#: The file of format `torch`.
TRAINING = "training.pt"


@dataclass(frozen=True)
class _Source:
    """A model on the disk.

    Attributes:
        where: its place, for messages.
        of: what it is, in words.
        tensors: the model's.
        saved: the checkpoint that it is in; None where there is none.
    """

    where: Path
    of: str
    tensors: ModelTensors
    saved: SavedModel | None = None


def export_command(
    folder: Path,
    out: Path,
    format: str,
    state: bool,
    replica: int | None,
    model: str | None,
    max_shard_bytes: int | None,
) -> None:
    """Carry out `hocket export`.

    Raises:
        UserError: a wrong argument, or nothing to export.
        WriteError: the folder cannot be written.
    """
    if model is not None and format != "hf":
        raise UserError("--model works only with --format hf: leave --model out")
    if state and format != "dcp":
        raise UserError("--state works only with --format dcp: leave --state out, or change the format")
    needs_checkpoint = replica is not None or state or format == "torch"
    with _source(folder, needs_checkpoint=needs_checkpoint, replica=replica) as source:
        built = _model(folder, model) if format == "hf" else None
        if source.saved is not None and source.saved.has_pending:
            print(
                "hocket: values that were on their way between ranks when "
                f"{source.where} was saved are not in the model, as is usual with overlap or a delay"
            )
        about = {"format": format, "of": source.of, "from": str(source.where), "hocket-core": CORE.version}
        with naming(out), export_folder(out, about) as place:
            _write(source, place, format, state, built, max_shard_bytes)
    print(f"{os.path.relpath(out)}: {source.of} of {os.path.relpath(source.where)}, as {format}")


@contextlib.contextmanager
def _source(folder: Path, *, needs_checkpoint: bool, replica: int | None) -> Iterator[_Source]:
    """Open what a folder holds: a run that has ended, or else its newest checkpoint; or a model.

    Raises:
        UserError: there is none.
    """
    checkpoints = folder / CHECKPOINTS if (folder / CONFIG).exists() else folder
    ended = (folder / SUMMARY).exists() and (folder / MODEL).exists()
    is_saved = (folder / MANIFEST).exists() or bool(complete(checkpoints))
    is_run = (folder / CONFIG).exists()
    if needs_checkpoint or (is_saved and not ended) or (is_run and not (folder / MODEL).exists()):
        path = newest_first(checkpoints, _elsewhere(folder) if is_run else "")[0]
        with open_checkpoint(path, replica) as saved:
            step, ranks = saved.manifest.step, saved.manifest.ranks
            who = f"the consensus of {ranks} ranks" if replica is None else f"rank {replica}'s replica"
            yield _Source(path, f"{who} after step {step}", saved.tensors, saved)
        return
    with open_model(folder) as tensors:
        yield _Source(folder, "the model", tensors)


def _elsewhere(folder: Path) -> str:
    """Return the advice for a run's folder without a checkpoint."""
    if not is_of_script(read_config(folder / CONFIG)):
        return f"With checkpoint.every=N a run saves checkpoints; at its end it writes its model to {MODEL}"
    return (
        f"{folder} is the run of a script, not a checkpoint: pass the folder that the script gives to session.save or "
        "session.export"
    )


def _model(folder: Path, name: str | None) -> nn.Module:
    """Build the model whose `save_pretrained` writes: the user's, or that of the run's task.

    Raises:
        UserError: there is none, or it has no `save_pretrained`.
    """
    if name is not None:
        found = load_user_object(name, "--model")
        model: Any = found if isinstance(found, nn.Module) else call_user_function(found, name, "--model")
    elif (folder / CONFIG).exists() and not is_of_script(read_config(folder / CONFIG)):
        model, name = (
            build_task(load_run(str(folder / CONFIG))).model(),
            f"the model of the task in {folder / CONFIG}",
        )
    else:
        raise UserError(
            f"--format hf needs the model, which {folder} does not name: give a function that returns it, --model "
            "module:function"
        )
    if not (isinstance(model, nn.Module) and hasattr(model, "save_pretrained")):
        raise UserError(
            f"{name} is a {type(model).__name__}, which has no save_pretrained: use --format safetensors"
        )
    return model


def _write(
    source: _Source,
    place: Path,
    format: str,
    with_state: bool,
    model: nn.Module | None,
    max_shard_bytes: int | None,
) -> None:
    tensors = source.tensors
    if format == "safetensors":
        write_safetensors(place, tensors, max_shard_bytes or MOST_BYTES)
    elif model is not None:
        load_model(model, tensors, str(source.where))
        write_pretrained(model, model_state(model), place, max_shard_bytes)
    else:
        state = {name: tensors.value(name) for name in tensors.forms}
        if source.saved is None or format == "dcp":
            strategy = source.saved.strategy_state() if source.saved is not None and with_state else {}
            if with_state and not strategy:
                print("hocket: --state adds nothing: this strategy keeps no tensors besides the model")
            write_dcp(place, state, strategy)
        else:
            content = {"model": state, **source.saved.beside()}
            write_durably(place / TRAINING, lambda file: torch.save(content, file))
