"""The variable state of modules: extra state of their own, and buffers that appear and grow."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor, nn

from hocket.checkpoint.files import StateFile
from hocket.errors import CheckpointError
from hocket.plan.buffers import RUNNING

#: Where a file has the model's buffers.
_BUFFERS = "model/buffers/"


def extra_states(model: nn.Module) -> dict[str, object]:
    """Return the results of modules' own `get_extra_state`, by their names."""
    return {name: module.get_extra_state() for name, module in _with_extra_state(model)}


def load_extra_states(model: nn.Module, states: Mapping[str, object], where: str) -> None:
    """Load a result of `extra_states` into modules.

    Raises:
        CheckpointError: a module has none in the checkpoint, or does not take it; the message begins with `where`.
    """
    for name, module in _with_extra_state(model):
        what = f"{where}: extra state of module {name!r}"
        if name not in states:
            raise CheckpointError(f"{what} is missing: build the model as when it was saved")
        try:
            module.set_extra_state(states[name])
        except Exception as error:
            raise CheckpointError(
                f"{what} does not fit {type(module).__name__} ({type(error).__name__}: {error}): build the model as "
                "when it was saved"
            ) from error


def _with_extra_state(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield name, module


def not_persistent(model: nn.Module) -> list[str]:
    """Return the names of buffers that `model.state_dict()` leaves out, also of those that are None."""
    return [
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is None or name in module._non_persistent_buffers_set
    ]


def comparable(
    own: Mapping[str, str], saved: Mapping[str, str | None], passing: Collection[str]
) -> tuple[dict[str, str], dict[str, str | None]]:
    """Return descriptions of a model's tensors and a file's, without buffers that may differ.

    A buffer may have grown since, and one that is not persistent may be new.

    Args:
        own, saved: by name.
        passing: names of buffers that are not persistent, here or where the file was written.
    """

    def may_differ(name: str) -> bool:
        if not name.startswith(_BUFFERS) or name.rpartition(".")[2] in RUNNING:
            return False  # a statistic of other width is another layer's
        mine, other = own.get(name), saved.get(name)
        if mine is None or other is None:
            return name.removeprefix(_BUFFERS) in passing
        return mine.partition("[")[0] == other.partition("[")[0]

    return (
        {name: description for name, description in own.items() if not may_differ(name)},
        {name: description for name, description in saved.items() if not may_differ(name)},
    )


@torch.no_grad()
def place_buffers(model: nn.Module, file: StateFile) -> None:
    """Give a model the file's buffers where its own are missing or have another shape; with the file's values."""
    here = dict(model.named_buffers())
    for stored in file.names("model"):
        name = stored.removeprefix(_BUFFERS)
        mine = here.get(name)
        if not stored.startswith(_BUFFERS):
            continue
        saved = file.tensor(stored)
        if mine is None or mine.shape != saved.shape:
            _place(model, name, saved, mine)


def _place(model: nn.Module, name: str, value: Tensor, before: Tensor | None) -> None:
    path, _, leaf = name.rpartition(".")
    try:
        owner = model.get_submodule(path)
    except AttributeError:  # it was in a module that is not here now
        return
    if before is None:
        parameter = next(model.parameters(), value)
        value = value.to(parameter.device)
    else:
        value = value.to(before.device)
    if leaf in owner._buffers:
        owner._buffers[leaf] = value
    else:
        owner.register_buffer(leaf, value, persistent=False)
