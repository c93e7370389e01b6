"""All that a session's future depends on: taken from it, given back, or, from other numbers of ranks, made one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hocket import randomness
from hocket.checkpoint.mean import mean_of_section, mean_of_tensor, why_no_mean
from hocket.checkpoint.tensor_file import StateFile
from hocket.checkpoint.tree import flatten
from hocket.errors import CheckpointError

if TYPE_CHECKING:
    from hocket.session.session import Session

__all__ = ["load_mean", "load_own", "model_of", "state_of"]


def state_of(session: Session, more: Mapping[str, Any]) -> dict[str, Any]:
    """Return this rank's state by sections; tensors are the session's own, not copies."""
    # First: it may still write parameters.
    parameters = session.phase.parameters.state_dict()
    counters = session.counters
    return {
        "session": {
            "step": session.step,
            "skipped_steps": session.skipped_steps,
            "bytes_sent": counters.bytes_sent,
            "exchanges": counters.exchanges,
            "under_way_s": counters.overlap.under_way_s,
            "exposed_wait_s": counters.overlap.exposed_wait_s,
        },
        "model": model_of(session),
        "optimizer": session.optimizer.state_dict(),
        "exchanges": {opened.exchange.name: opened.state_dict() for opened in session.phase.opened},
        "parameters": parameters,
        "late": session.late.state_dict(),
        "random": randomness.to_plain(randomness.read(cuda=True)),
        "passes": session.passes.state_dict(),
        "more": {name: given.state_dict() for name, given in more.items()},
    }


def model_of(session: Session) -> dict[str, dict[str, Tensor]]:
    """Return the model's parameters and buffers by name, in their own memory."""
    return {
        "parameters": {name: p.detach() for name, p in session.model.named_parameters()},
        "buffers": dict(session.model.named_buffers()),
    }


@torch.no_grad()
def load_own(session: Session, file: StateFile, more: Mapping[str, Any]) -> None:
    """Continue where this rank was.

    Args:
        file: this rank's.
        more: what else was saved, by name.

    Raises:
        CheckpointError: something does not take its state.
    """
    _load_numbers(session, file)
    for name, target in flatten({"model": model_of(session)})[1].items():
        target.copy_(file.tensor(name))
    _load_into(session.optimizer, file.read("optimizer"), f"{file.path}: optimizer")
    exchanges = file.read("exchanges")
    for opened in session.phase.opened:
        name = opened.exchange.name
        if name not in exchanges:
            raise CheckpointError(
                f"{file.path}: exchanges/{name} is missing: this rank takes part in it now, and did not when it was "
                "saved. Place the ranks on hosts as they were"
            )
        _load_into(opened, exchanges[name], f"{file.path}: exchanges/{name}")
    session.phase.parameters.load_state_dict(file.read("parameters"))
    session.late.load_state_dict(file.read("late"))
    saved = file.read("more")
    for name, given in more.items():
        _load_into(given, saved[name], f"{file.path}: more/{name}")
    now = randomness.from_plain(file.read("random"))
    session.passes.load_state_dict(file.read("passes"), now)
    randomness.write(now)


@torch.no_grad()
def load_mean(session: Session, files: Sequence[StateFile], more: Mapping[str, Any]) -> None:
    """Continue from the mean of another number of ranks.

    Args:
        files: of all ranks that have saved.
        more: what else was saved, by name.

    Raises:
        CheckpointError: something does not take its state.
    """
    first = files[0]
    _load_numbers(session, first)
    for name, target in flatten({"model": model_of(session)})[1].items():
        target.copy_(mean_of_tensor(files, name))
    session.begin_equal()
    if not why_no_mean(files, "optimizer"):
        _load_into(session.optimizer, mean_of_section(files, "optimizer"), f"{first.path}: optimizer")
    exchanges = first.read("exchanges")
    for opened in session.phase.opened:
        if opened.exchange.name in exchanges:
            opened.round = exchanges[opened.exchange.name]["round"]
    session.late.load_state_dict(mean_of_section(files, "late"))
    saved = mean_of_section(files, "more")
    for name, given in more.items():
        _load_into(given, saved[name], f"{first.path}: more/{name}")
    session.passes.ended = first.read("passes")["ended"]


def _load_numbers(session: Session, file: StateFile) -> None:
    saved, counters = file.read("session"), session.counters
    session.step, session.skipped_steps = saved["step"], saved["skipped_steps"]
    counters.bytes_sent, counters.exchanges = saved["bytes_sent"], saved["exchanges"]
    counters.overlap.under_way_s, counters.overlap.exposed_wait_s = (
        saved["under_way_s"],
        saved["exposed_wait_s"],
    )


def _load_into(given: Any, state: Any, where: str) -> None:
    try:
        given.load_state_dict(state)
    except (ValueError, KeyError, RuntimeError, TypeError) as error:
        raise CheckpointError(
            f"{where}: {type(given).__name__} does not take it: {type(error).__name__}: {error}"
        ) from error
