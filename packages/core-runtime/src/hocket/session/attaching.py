"""`hocket.attach`: from a model, an optimizer and a strategy to a session."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

import hocket
from hocket.errors import AttachError
from hocket.observation import Observer
from hocket.segment.storage import ParameterStorage
from hocket.session.handshake import agree
from hocket.session.ranks import find_ranks
from hocket.session.refusals import check
from hocket.session.session import Session
from hocket.strategy import Strategy, compose
from hocket.transport import join
from hocket.transport.peer import Lane, Peer

__all__ = ["attach"]


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy | str | os.PathLike[str] | Mapping[str, Any],
    *,
    initial: Literal["rank0", "keep"] = "rank0",
    on_nonfinite: Literal["error", "skip"] = "error",
    peer: Peer | None = None,
    observer: Observer | None = None,
) -> Session:
    """Attach a strategy to a model and its optimizer; collective.

    The trainable parameters become views of flat buffers, hooks are set, and, with `initial="rank0"`, every rank
    gets the parameters and buffers of rank 0. Before that the ranks compare what they were started with.

    Args:
        model: on its device and in its dtype; not compiled, not wrapped.
        optimizer: any torch optimizer over the model's parameters.
        strategy: composed already, or what `hocket.compose` takes.
        initial: whose parameters training starts from: `rank0`'s on all ranks, or each `keep`s its own.
        on_nonfinite: what becomes of a step in which a rank's gradients hold NaN or Inf: an `error` that names
            rank and parameter, or all ranks `skip` it. GradScaler's own skipping comes before either.
        peer: this rank's endpoint; that of the launcher, or of the virtual world, where None.
        observer: is told of exchanges, waits and phases, for instance a `hocket.Trace`; of one type on all ranks.

    Raises:
        AttachError: the model or the optimizer cannot be carried.
        DisagreementError: the ranks have different strategies, versions or models.
        ConfigError: the strategy cannot be composed.
    """
    for key, given, allowed in (
        ("initial", initial, ("rank0", "keep")),
        ("on_nonfinite", on_nonfinite, ("error", "skip")),
    ):
        if given not in allowed:
            raise AttachError(f"{key}={given!r} is not allowed: {' or '.join(map(repr, allowed))}")
    if not isinstance(strategy, Strategy):
        strategy = compose(strategy)
    if peer is None:
        peer = join()
    check(model, optimizer)
    agree(peer, _facts(model, optimizer, strategy, initial, on_nonfinite, observer))
    if observer is not None:
        peer = observer.join(peer)
    try:
        ranks = find_ranks(peer)
        storage = ParameterStorage(model, ranks.host)
        equal = peer.size == 1 or initial == "rank0"
        session = Session(model, optimizer, strategy, ranks, storage, on_nonfinite, equal, observer)
        if initial == "rank0" and peer.size > 1:
            _broadcast(session, model)
    except BaseException:
        if observer is not None:
            observer.abandon()
        raise
    return session


def _facts(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy,
    initial: str,
    on_nonfinite: str,
    observer: Observer | None,
) -> dict[str, Any]:
    return {
        "hocket-core": hocket.__version__,
        "torch": torch.__version__,
        "strategy": {key: value for key, value in strategy.resolved().items() if key != "name"},
        "initial": initial,
        "on_nonfinite": on_nonfinite,
        "observer": type(observer).__name__,
        "optimizer": type(optimizer).__name__,
        "parameter": {name: _description(p) for name, p in model.named_parameters()},
        "frozen": {name: True for name, p in model.named_parameters() if not p.requires_grad},
        "buffer": {name: _description(b) for name, b in model.named_buffers()},
    }


def _description(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _broadcast(session: Session, model: nn.Module) -> None:
    """Give every rank the parameters and buffers of rank 0."""
    tensors: list[Tensor] = list(session.flats)
    tensors += [parameter.data for parameter in model.parameters() if not parameter.requires_grad]
    tensors += list(model.buffers())
    with torch.no_grad():
        for tensor in tensors:
            _broadcast_tensor(tensor, session.control)


def _broadcast_tensor(tensor: Tensor, lane: Lane) -> None:
    data = tensor.detach().to("cpu").contiguous()
    # As bytes: NumPy does not know every dtype of torch.
    raw: np.ndarray[Any, Any] = data.reshape(-1).view(torch.uint8).numpy()
    lane.ibroadcast(raw, 0).wait()
    if data.data_ptr() != tensor.data_ptr():
        tensor.copy_(data)
