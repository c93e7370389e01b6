"""All that training depends on: taken from a session, given back, or, from other numbers of ranks, made one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hocket.checkpoint.mean import mean_of_section, mean_of_tensor, why_no_mean
from hocket.checkpoint.tensor_file import StateFile
from hocket.checkpoint.tree import flatten
from hocket.errors import CheckpointError

if TYPE_CHECKING:
    from hocket.session.session import Session

__all__ = ["load_beside_model", "load_into", "load_mean", "load_own", "state_of", "tensors_of"]


def state_of(session: Session) -> dict[str, Any]:
    """Return this rank's state by sections; tensors are the session's own, not copies."""
    # First: it may still write parameters.
    parameters = session.phase.parameters.state_dict()
    return {
        "model": session.tensors(),
        "optimizer": session.optimizers.state_dict(),
        "exchanges": {opened.exchange.name: opened.state_dict() for opened in session.phase.opened},
        "parameters": parameters,
        "late": session.late.state_dict(),
    }


def tensors_of(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Return a model's parameters and buffers by name, in their own memory."""
    return {
        "parameters": {name: p.detach() for name, p in model.named_parameters()},
        "buffers": dict(model.named_buffers()),
    }


@torch.no_grad()
def load_own(session: Session, file: StateFile) -> None:
    """Continue where this rank was.

    Args:
        file: this rank's.

    Raises:
        CheckpointError: something does not take its state.
    """
    for name, target in flatten({"model": session.tensors()})[1].items():
        target.copy_(file.tensor(name))
    load_beside_model(session, file.read, str(file.path))


def load_beside_model(session: Session, read: Callable[[str], Any], where: str) -> None:
    """Continue where this rank was, but for the model's own tensors.

    Args:
        read: returns a section of what `state_of` returned.
        where: it comes from, for errors.

    Raises:
        CheckpointError: something does not take its state.
    """
    load_into(session.optimizers, read("optimizer"), f"{where}: optimizer")
    exchanges = read("exchanges")
    for opened in session.phase.opened:
        name = opened.exchange.name
        if name not in exchanges:
            raise CheckpointError(
                f"{where}: exchanges/{name} is missing: this rank takes part in it now, and did not when it was "
                "saved. Place the ranks on hosts as they were"
            )
        load_into(opened, exchanges[name], f"{where}: exchanges/{name}")
    session.phase.parameters.load_state_dict(read("parameters"))
    session.late.load_state_dict(read("late"))


@torch.no_grad()
def load_mean(session: Session, files: Sequence[StateFile]) -> None:
    """Continue from the mean of another number of ranks.

    Args:
        files: of all ranks that have saved.

    Raises:
        CheckpointError: something does not take its state.
    """
    first = files[0]
    push_sums = [_push_sums(file) for file in files]
    for name, target in flatten({"model": session.tensors()})[1].items():
        kept, _ = push_sums[0].get(name, (None, 1.0))
        if kept is not None:
            target.copy_(mean_of_tensor(files, kept))
        else:
            weights = [of_rank.get(name, (None, 1.0))[1] for of_rank in push_sums]
            target.copy_(mean_of_tensor(files, name, weights))
    session.begin_equal()
    if not why_no_mean(files, "optimizer"):
        load_into(session.optimizers, mean_of_section(files, "optimizer"), f"{first.path}: optimizer")
    exchanges = first.read("exchanges")
    for opened in session.phase.opened:
        if opened.exchange.name in exchanges:
            opened.count_on(exchanges[opened.exchange.name]["round"])
    session.late.load_state_dict(mean_of_section(files, "late"))


def _push_sums(file: StateFile) -> dict[str, tuple[str | None, float]]:
    """Return where x is, if anywhere, and w, by the name of each tensor that holds x / w of push-sum.

    The mean is sum(x) / sum(w), and sum(w) is how many ranks there are.
    """
    return {
        f"model/parameters/{name}": (
            f"parameters/{exchange}/values/{name}" if name in state["values"] else None,
            weight,
        )
        for exchange, state in file.read("parameters").items()
        for name, weight in state["weights"].items()
    }


def load_into(given: Any, state: Any, where: str) -> None:
    """Let an object take its state; what it refuses is a CheckpointError that begins with `where`."""
    try:
        given.load_state_dict(state)
    except (ValueError, KeyError, RuntimeError, TypeError) as error:
        raise CheckpointError(
            f"{where}: {type(given).__name__} does not take it: {type(error).__name__}: {error}"
        ) from error
