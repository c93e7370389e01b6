"""`hocket.attach`: from a model, an optimizer and a strategy to a session."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hocket.checkpoint.tree import flatten, unflatten
from hocket.engine.api import Attachment, Engine, MakeOptimizer
from hocket.engine.data_parallel import DataParallel
from hocket.errors import AttachError
from hocket.plugin import core_version
from hocket.segment.storage import ParameterStorage
from hocket.session.base import TrainingSession
from hocket.session.handshake import agree
from hocket.session.optimizers import Optimizers
from hocket.session.ranks import find_ranks
from hocket.session.refusals import check, needs_closure, refuse_closure
from hocket.session.session import Session
from hocket.session.taken_terms import check_taken_terms
from hocket.strategy import Strategy, compose
from hocket.trace import Observer
from hocket.transport import join
from hocket.transport.lane import Lane
from hocket.transport.peer import Peer, gather

__all__ = ["attach", "attach_replica", "broadcast_model"]


@overload
def attach(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    strategy: Strategy | str | os.PathLike[str] | Mapping[str, Any],
    *,
    initial: Literal["rank0", "keep"] = ...,
    on_nonfinite: Literal["error", "skip"] = ...,
    peer: Peer | None = ...,
    observer: Observer | None = ...,
) -> Session: ...


@overload
def attach(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    strategy: Strategy | str | os.PathLike[str] | Mapping[str, Any],
    *,
    initial: Literal["rank0", "keep"] = ...,
    on_nonfinite: Literal["error", "skip"] = ...,
    peer: Peer | None = ...,
    observer: Observer | None = ...,
    engine: Engine,
    make_optimizer: MakeOptimizer | None = ...,
) -> TrainingSession: ...


def attach(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    strategy: Strategy | str | os.PathLike[str] | Mapping[str, Any],
    *,
    initial: Literal["rank0", "keep"] = "rank0",
    on_nonfinite: Literal["error", "skip"] = "error",
    peer: Peer | None = None,
    observer: Observer | None = None,
    engine: Engine | None = None,
    make_optimizer: MakeOptimizer | None = None,
) -> TrainingSession:
    """Attach a strategy to a model and its optimizer; collective.

    The trainable parameters become views of flat buffers, hooks are set, and, with `initial="rank0"`, every rank
    gets the parameters, the buffers and the optimizers' state of rank 0. Before that the ranks compare what they were
    started with.

    Args:
        model: on its device and in its dtype; not compiled, not wrapped.
        optimizer: any torch optimizer over the model's parameters; all of them, in a list, where there are several. A
            step is over when each has stepped, or was skipped.
        strategy: composed already, or what `hocket.compose` takes.
        initial: whose parameters, buffers and optimizer state training starts from: `rank0`'s on all ranks, or each
            `keep`s its own.
        on_nonfinite: what becomes of a step in which a rank's gradients hold NaN or Inf: an `error` that names
            rank and parameter, or all ranks `skip` it. GradScaler's own skipping comes before either.
        peer: this rank's endpoint; that of the launcher, or of the virtual world, where None.
        observer: is told of exchanges, waits and phases, for instance a `hocket.Trace`; of one type on all ranks.
        engine: how `session.train_batch` lets a batch flow through the model; whole on every rank where None.
        make_optimizer: for engines that keep several copies of the weights: makes, of parameter groups, an optimizer
            like the given one. Where None the given one is copied, as torch's own can be.

    Raises:
        AttachError: the model or an optimizer cannot be carried, on some rank or not by this strategy, or has a session
            already.
        DisagreementError: the ranks have different strategies, versions, models or settings of optimizers.
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
    optimizers = tuple(optimizer) if isinstance(optimizer, list | tuple) else (optimizer,)
    engine = engine or DataParallel()
    facts: dict[str, Any] = {}
    refusal = None
    try:
        check(model, optimizers)
        for each in optimizers:
            if needs_closure(each):
                refuse_closure(each, strategy)
            check_taken_terms(strategy, each)
        facts = _facts(model, optimizers, strategy, initial, on_nonfinite, observer, engine)
    except AttachError as error:
        refusal = str(error)
    agree(peer, facts, refusal)
    return engine.attach(
        Attachment(model, optimizers, strategy, peer, initial, on_nonfinite, observer, make_optimizer)
    )


def attach_replica(given: Attachment) -> Session:
    """Attach a strategy to a model that is whole on every rank, and its optimizer; collective."""
    peer, observer = given.peer, given.observer
    if observer is not None:
        peer = observer.join(peer)
    try:
        if given.initial == "rank0":
            lane = peer.lane("attach")
            broadcast_model(given.model, lane)
            _broadcast_optimizers(Optimizers(given.optimizers), peer, lane)
            lane.close()
        ranks = find_ranks(peer)
        storage = ParameterStorage(given.model, ranks.host)
        equal = peer.size == 1 or given.initial == "rank0"
        session = Session(
            given.model, given.optimizers, given.strategy, ranks, storage, given.on_nonfinite, equal, observer
        )
    except BaseException:
        if observer is not None:
            observer.abandon()
        raise
    return session


@torch.no_grad()
def broadcast_model(model: nn.Module, lane: Lane, root: int = 0) -> None:
    """Give every rank of a lane the parameters and buffers that `root` has; collective."""
    if lane.size > 1:
        for tensor in (*model.parameters(), *model.buffers()):
            _broadcast_tensor(tensor.data, lane, root)


@torch.no_grad()
def _broadcast_optimizers(optimizers: Optimizers, peer: Peer, lane: Lane) -> None:
    """Give every rank what rank 0's optimizers remember (momentum, ...); collective."""
    if not any(gather(peer, any(optimizer.state for optimizer in optimizers.every))):
        return
    structure, tensors = flatten(optimizers.state_dict() if peer.rank == 0 else {})
    described = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()]
    structure, described = gather(peer, [structure, described])[0]
    for name, dtype, shape in described:
        if peer.rank != 0:
            tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype))
        _broadcast_tensor(tensors[name], lane, 0)
    if peer.rank != 0:
        optimizers.load_state_dict(unflatten(structure, tensors.__getitem__))


def _facts(
    model: nn.Module,
    given: Sequence[Optimizer],
    strategy: Strategy,
    initial: str,
    on_nonfinite: str,
    observer: Observer | None,
    engine: Engine,
) -> dict[str, Any]:
    optimizers = Optimizers(given)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        "hocket-core": core_version(),
        "torch": torch.__version__,
        "strategy": {key: value for key, value in strategy.resolved().items() if key != "name"},
        "engine": repr(engine),
        "initial": initial,
        "on_nonfinite": on_nonfinite,
        "observer": type(observer).__name__,
        "optimizer": optimizers.kind,
        "parameter": {name: _description(p) for name, p in model.named_parameters()},
        # What lies where in the buffers that are exchanged: the same names in another order are other parameters.
        "parameters in order": list(names.values()),
        "frozen": {name: True for name, p in model.named_parameters() if not p.requires_grad},
        "buffer": {name: _description(b) for name, b in model.named_buffers()},
        "optimizer's parameters": [
            [names.get(id(parameter)) for parameter in group["params"]] for group in optimizers.param_groups
        ],
        # Without exchanges every rank may train as it likes.
        "optimizer's settings": optimizers.settings() if strategy.exchanges or strategy.phases else None,
    }


def _description(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _broadcast_tensor(tensor: Tensor, lane: Lane, root: int) -> None:
    data = tensor.detach().to("cpu").contiguous().resolve_neg()
    # As bytes: NumPy does not know every dtype of torch.
    raw: np.ndarray[Any, Any] = data.reshape(-1).view(torch.uint8).numpy()
    lane.ibroadcast(raw, root).wait()
    if data.data_ptr() != tensor.data_ptr():
        tensor.copy_(data)
