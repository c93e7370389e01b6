"""`hocket.attach`: from a model, an optimizer and a strategy to a session."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hocket.errors import AttachError, CheckpointError, ExchangeTimeoutError, some
from hocket.launch.joining import join
from hocket.plain import TreeView
from hocket.plugin import CORE
from hocket.results import CHECKPOINTS
from hocket.results.script import take_folder
from hocket.segment.partition import unusual_strides
from hocket.segment.shards import fsdp_modules, is_sharded
from hocket.session.api import Attachment, MakeOptimizer, left_by
from hocket.session.ddp import watch_ddp
from hocket.session.engine import DataParallel, Engine
from hocket.session.engine_session import EngineSession
from hocket.session.island import find_island, mesh_of
from hocket.session.island_refusals import check_gathered, check_island
from hocket.session.ranks import agree
from hocket.session.refusals import (
    check,
    check_devices,
    check_gradients,
    check_lanes,
    check_optimizer_terms,
    needs_closure,
    refuse_closure,
)
from hocket.session.save.save_folders import look_at
from hocket.session.script_run import ScriptRequest, ScriptRun, is_script
from hocket.session.session import Session
from hocket.session.statistics import check_statistics, warn_of_unsynchronised
from hocket.session.step.optimizers import Optimizers, stepped_by
from hocket.strategy import Strategy, check_composition
from hocket.strategy.advice import overshooting, widened
from hocket.trace import Observer
from hocket.transport.gathering import gather
from hocket.transport.peer import Peer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_log = logging.getLogger("hocket")

P = ParamSpec("P")


_STILL_OPEN = (
    "A rank that catches an error and attaches again leaves the others in the earlier session: train within `with "
    "session:`, which ends it on all ranks"
)


def _in_session(attach: Callable[P, Session]) -> Callable[P, Session]:
    """Give `attach` an endpoint of the session's own, and notify the other ranks if it fails."""

    @wraps(attach)
    def attach_in_session(*given: P.args, **named: P.kwargs) -> Session:
        asked = cast("Peer | None", named.get("peer"))
        peer = join() if asked is None else asked
        number = peer.begin_session()
        try:
            own = peer.session(number)
            own.announce_leaving = partial(peer.leave_session, number)
            named["peer"] = own
            session = attach(*given, **named)
        except Exception as error:
            peer.leave_session(number, left_by(error, 0))
            if isinstance(error, ExchangeTimeoutError) and number > 1:
                raise ExchangeTimeoutError(f"{error}. {_STILL_OPEN}") from error
            raise
        session.inner.owns_peer = own is not peer
        return session

    return attach_in_session


@_in_session
def attach(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    strategy: Strategy | str | os.PathLike[str] | TreeView,
    *,
    initial: Literal["rank0", "keep"] = "rank0",
    on_nonfinite: Literal["error", "skip"] = "error",
    on_difference: Literal["average", "error"] = "average",
    lanes: Literal["host", "nccl", "gloo"] = "host",
    peer: Peer | None = None,
    observer: Observer | None = None,
    out: str | os.PathLike[str] | None = None,
    statistics: Sequence[str] = (),
    engine: Engine | None = None,
    make_optimizer: MakeOptimizer | None = None,
    island: DeviceMesh | None = None,
    same_samples: Sequence[str] | None = None,
) -> Session:
    """Attach a strategy to a model and its optimizer; collective.

    The trainable parameters become views of flat buffers, hooks are set, and, with `initial="rank0"`, every rank
    gets the parameters, the buffers and the optimizers' state of rank 0. Before that the ranks compare their arguments.
    A model that was in a session before goes on counting its steps and passes.

    A model that FSDP2 or tensor parallelism has sharded over a mesh is one replica of the mesh's ranks, an island: the
    strategy runs between islands, and its parameters stay where torch keeps them.

    Until `close`, training writes into these buffers in place: to keep weights, `clone()` them. Weights that you swap
    in (`p.data = ...`, such as averages for evaluation) survive a consensus, a distance and a save. `p.grad` is a view
    of a buffer, too. A gradient that you keep in a variable gets its own memory before the next backward; a view of it
    (`p.grad.detach()`, `.data`, `.view(-1)`) does not, so clone it, as with DDP's `gradient_as_bucket_view=True`.

    With `overlap: forward`, or a delay, parameters lack exchanges that are under way: a forward under
    `torch.no_grad()` reads this rank's own values. Call `session.settle()` on all ranks before your own validation. If
    a compressor applies momentum, `p.grad` after `backward()` holds the velocity that the optimizer steps by.

    Args:
        model: on its device and in its dtype; not compiled, not wrapped.
        optimizer: any torch optimizer over the model's parameters; all of them, in a list, where there are several. A
            step is over when each has stepped, or was skipped.
        strategy: a composed strategy, or an argument of `hocket.compose`.
        initial: the parameters, buffers and optimizer state to start from: `rank0`'s on all ranks, or `keep` for each
            rank's own.
        on_nonfinite: the reaction to NaN or Inf in a rank's gradients: an `error` that names rank and parameter, or all
            ranks `skip` the step; that rank alone where gradients are not exchanged. GradScaler's own skipping comes
            before either.
        on_difference: the reaction to replicas that differ although the strategy keeps them equal: ranks set them to
            their `average`, with a warning, or an `error` names the first parameter. Ranks compare at consensus, save
            and close, and every hundred rounds of gradients.
        lanes: the carrier of exchanges: the transport, in `host` memory; or torch's `nccl` (experimental) or `gloo`,
            from where the model lies, on CUDA or the CPU.
        peer: this rank's endpoint; that of the launcher, or of the virtual world, where None.
        observer: is notified of exchanges, waits and phases, for instance a `hocket.Trace`; of one type on all ranks.
        out: the folder of this session's results, as `hocket run` writes them: `config.yaml`, `run.json`, rows of
            `session.log` in `metrics.jsonl`, `summary.json`; None for that of `hocket launch --out`, or none.
        statistics: names of buffers, with `*` for any text, that are statistics of the samples that the model has seen:
            where BatchNorm's are averaged they are, too. Other buffers have no mean.
        engine: the way of a batch through the model in `session.train_batch`; None for a whole model on every rank.
        make_optimizer: makes an optimizer like the given one from parameter groups, for engines that keep several
            copies of the weights. Where None the given one is copied, which works for torch's own.
        island: the mesh of the ranks that hold one replica; that of the parameters where None.
        same_samples: the names of the mesh's dimensions whose ranks read the same samples. Where None: tp, cp and sp
            beside FSDP, and all dimensions without it.

    Raises:
        AttachError: the model or an optimizer cannot be carried, on some rank or not by this strategy, or has a session
            already.
        DisagreementError: the ranks have different strategies, versions, models or settings of optimizers.
        ConfigError: the strategy cannot be composed.
    """
    for key, given, allowed in (
        ("initial", initial, ("rank0", "keep")),
        ("on_nonfinite", on_nonfinite, ("error", "skip")),
        ("on_difference", on_difference, ("average", "error")),
        ("lanes", lanes, ("host", "nccl", "gloo")),
    ):
        if given not in allowed:
            raise AttachError(f"{key}={given!r} is not allowed; allowed: {' or '.join(map(repr, allowed))}")
    request = ScriptRequest.of(out)
    strategy = request.choose(strategy)
    observer = request.observer(observer)
    check_composition(strategy)
    assert peer is not None
    optimizers = tuple(optimizer) if isinstance(optimizer, list | tuple) else (optimizer,)
    engine = engine or DataParallel()
    facts: dict[str, object] = {}
    refusal = None
    try:
        if request.folder is not None and peer.rank == 0:
            take_folder(request.folder)
        if isinstance(model, nn.Module):
            check_gathered(model)
            for module in fsdp_modules(model):
                module.reshard()  # what a forward has gathered hides the shards
            island = mesh_of(model, island, same_samples)
        check(model, optimizers)
        if island is not None:
            check_island(model, optimizers, strategy, peer, engine, island, same_samples)
        watch_ddp()
        check_statistics(model, statistics)
        check_devices(model, strategy, peer)
        check_gradients(model, strategy)
        check_lanes(lanes, model, strategy, whole=isinstance(engine, DataParallel))
        for each in map(stepped_by, optimizers):
            if needs_closure(each):
                refuse_closure(each, strategy)
            check_optimizer_terms(strategy, each)
        facts = _facts(model, optimizers, strategy, initial, on_nonfinite, observer, engine) | {
            "lanes": lanes,
            "statistics": list(statistics),
            "on_difference": on_difference,
            "out": request.folder is not None,
        }
    except AttachError as error:
        refusal = str(error)
    agree(peer, facts, refusal, strategy.name)
    found = None if island is None else find_island(peer, island, model, same_samples)
    if peer.rank == 0 and peer.size > 1:
        warn_of_unsynchronised(model)
    for warning in _warnings(model, strategy) if peer.rank == 0 else ():
        _log.warning(warning)
    attached = engine.attach(
        Attachment(
            model,
            optimizers,
            strategy,
            peer,
            initial,
            on_nonfinite,
            on_difference,
            lanes,
            observer,
            make_optimizer,
            tuple(statistics),
            found,
        )
    )
    if request.folder is None and not is_script():
        return Session(attached)
    hosts = gather(peer, peer.memory.host_name, what="the names of the ranks' hosts")
    session = Session(attached, ScriptRun(attached, request.folder, hosts))
    _look_at_checkpoints(attached, request.folder)
    return session


def _look_at_checkpoints(session: EngineSession, out: Path | None) -> None:
    """Warn before training if checkpoints cannot be saved where a script's results go; collective."""
    if out is None:
        return
    try:
        look_at(session, out / CHECKPOINTS)
    except CheckpointError as error:  # the script may save elsewhere, or never
        if session.is_main:
            _log.warning("session.save into this run's folder would fail: %s", error)


def _warnings(model: nn.Module, strategy: Strategy) -> Iterator[str]:
    yield from overshooting(strategy)
    dtypes = {str(each.dtype).removeprefix("torch.") for each in model.parameters() if each.requires_grad}
    if text := widened(strategy, dtypes):
        yield text
    shared = [name for name, p in model.named_parameters() if p.device.type == "cpu" and p.is_shared()]
    if shared:
        yield (
            f"parameters are in shared memory ({some(shared)}): the session moves them to memory of its own, so other "
            "processes that hold them do not see the training. Send these processes copies of model.state_dict()"
        )


def _facts(
    model: nn.Module,
    given: Sequence[Optimizer],
    strategy: Strategy,
    initial: str,
    on_nonfinite: str,
    observer: Observer | None,
    engine: Engine,
) -> dict[str, object]:
    optimizers = Optimizers(given)
    parameters = dict(model.named_parameters())
    names = {id(parameter): name for name, parameter in parameters.items()}
    return {
        "hocket-core": CORE.version,
        "torch": torch.__version__,
        "strategy": {key: value for key, value in strategy.resolved().items() if key != "name"},
        "engine": repr(engine),
        "initial": initial,
        "on_nonfinite": on_nonfinite,
        "observer": type(observer).__name__,
        "optimizer": optimizers.kind,
        "parameter": {name: _description(p) + _order(p) for name, p in parameters.items()},
        # What lies where in the buffers that are exchanged: the same names in another order are other parameters.
        "parameters in order": list(names.values()),
        "frozen": {name: True for name, p in parameters.items() if not p.requires_grad},
        "buffer": {name: _description(b) for name, b in model.named_buffers()},
        "optimizer's parameters": [
            [names.get(id(parameter)) for parameter in group["params"]] for group in optimizers.param_groups
        ],
        # Without exchanges every rank may train as it likes.
        "optimizer's settings": optimizers.settings() if strategy.exchanges or strategy.phases else None,
    }


def _description(tensor: Any) -> str:
    sharded = f" {list(map(str, tensor.placements))}" if is_sharded(tensor) else ""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{sharded}"


def _order(parameter: Tensor) -> str:
    """Return the memory order of a trained parameter's elements, if it is not that of its axes."""
    strides = unusual_strides(parameter.shape, parameter.stride()) if parameter.requires_grad else None
    return "" if strides is None else f", strides {strides} (channels_last, or transposed?)"
