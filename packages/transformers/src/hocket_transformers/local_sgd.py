"""Accelerate's loops: an exchange by Hocket in place of the library's own, for Trainer and for one's own loop."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hocket import Session, attach, compose, join
from hocket.errors import UserError

_log = logging.getLogger("hocket")

#: The folder of a checkpoint of Accelerate's that holds the session's.
_FOLDER = "hocket"

_SHARDS = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA", "TP")


def refuse_distribution(accelerator: Accelerator) -> None:
    """Refuse an Accelerator that shards the model over ranks.

    Raises:
        UserError: names how.
    """
    kind: DistributedType = accelerator.distributed_type
    if kind.name in _SHARDS or getattr(accelerator, "parallelism_config", None) is not None:
        how = kind.name if kind.name in _SHARDS else "parallelism_config"
        raise UserError(
            f"Accelerate is configured to shard the model over the ranks ({how}), but Hocket exchanges whole models: "
            "remove that from the arguments and from `accelerate config`, or train without Hocket"
        )


@contextmanager
def exchanging(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    strategy: str,
    *overrides: str,
    **options: Any,
) -> Iterator[Session]:
    """Exchange by a strategy of Hocket's in a loop of Accelerate's, as `LocalSGD` does by its own; collective.

        with exchanging(accelerator, model, optimizer, "diloco", "parameters.0.every=8") as session:

    The loop stays as it is, with `accelerator.accumulate`, `backward`, `clip_grad_norm_` and `gather`; only
    `local_sgd.step()` goes. At the end all ranks hold the replicas' mean. `with session.consensus()` sets it meanwhile,
    to evaluate or to save a model.

    Within it `accelerator.save_state` writes the mean as the model, and what every rank goes on from beside it, in
    `hocket/`; `accelerator.load_state` goes on from there.

    Args:
        accelerator: of the loop.
        model, optimizer: as `accelerator.prepare` returned them, or not prepared.
        strategy, overrides: as of `hocket.compose`.
        options: as of `hocket.attach`.

    Raises:
        UserError: Accelerate shards the model, or has found another number of ranks.
    """
    refuse_distribution(accelerator)
    size = join(warn_alone=True).size
    if accelerator.num_processes != size:
        raise UserError(
            f"Accelerate found {accelerator.num_processes} ranks, but the launcher started {size}: import "
            "hocket_transformers before you create Accelerator(...); without GPUs, write Accelerator(cpu=True)"
        )
    plain = accelerator.unwrap_model(model, keep_torch_compile=False)
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
    if accelerator.is_main_process and any(each.state for each in optimizers):
        _log.warning(
            "exchanging begins with an optimizer that already has a state. If load_state has loaded it, "
            "call load_state within `with exchanging(...)`: there it also loads the state of the exchanges"
        )
    with ExitStack() as stack:
        if isinstance(model, DistributedDataParallel):
            stack.enter_context(model.no_sync())
        session = stack.enter_context(attach(plain, optimizer, compose(strategy, *overrides), **options))
        stack.enter_context(_in_place_of(accelerator, session, plain))
        yield session
        session.consensus()


def _accumulating(
    session: Session, plain: nn.Module, accelerator: Accelerator, own: Any, model: nn.Module
) -> Any:
    """Return the context of a backward whose gradients only add up, which `accelerator.accumulate` enters."""
    is_attached = accelerator.unwrap_model(model, keep_torch_compile=False) is plain
    return session.accumulate() if is_attached else own(model)


@contextmanager
def _in_place_of(accelerator: Accelerator, session: Session, plain: nn.Module) -> Iterator[None]:
    """Have an accelerator's calls that DistributedDataParallel would take part in act on the session."""
    replaced: dict[str, Callable[..., Any]] = {
        "join_uneven_inputs": _refuse_joining,
        "load_state": partial(_load_state, session, plain, accelerator),
        "no_sync": partial(_accumulating, session, plain, accelerator),
        "save_state": partial(_save_state, session, accelerator),
        "trigger_sync_in_backward": lambda own, model: nullcontext(),
    }
    own = {name: getattr(accelerator, name) for name in replaced}
    for name, method in replaced.items():
        setattr(accelerator, name, partial(method, own[name]))
    try:
        yield
    finally:
        for name, method in own.items():
            setattr(accelerator, name, method)


def _save_state(session: Session, accelerator: Accelerator, own: Any, *given: Any, **named: Any) -> Any:
    """Save as Accelerate does, with the replicas' mean as the model, and beside it every rank's state; collective."""
    with session.consensus():
        folder = own(*given, **named)
    session.save(Path(folder, _FOLDER), keep=1, **_saved(accelerator))
    return folder


def _load_state(
    session: Session, plain: nn.Module, accelerator: Accelerator, own: Any, *given: Any, **named: Any
) -> None:
    """Load what Accelerate has saved, and then every rank's state; collective.

    Raises:
        UserError: there is no such state.
    """
    found: list[Path] = []

    def look(models: list[nn.Module], folder: str | os.PathLike[str]) -> None:
        if not Path(folder, _FOLDER).is_dir():
            raise UserError(
                f"{folder} has no folder {_FOLDER}, because it was saved outside of `exchanging`. Call "
                "load_state before `with exchanging(...)`, which then begins from the loaded model and "
                "optimizer"
            )
        found.append(Path(folder, _FOLDER))
        # The session loads its own.
        models[:] = [each for each in models if accelerator.unwrap_model(each) is not plain]

    hook = accelerator.register_load_state_pre_hook(look)
    try:
        own(*given, **named)
    finally:
        hook.remove()
    session.load(found[0], **_saved(accelerator))


def _refuse_joining(own: Any, *given: Any, **named: Any) -> Any:
    raise UserError(
        "join_uneven_inputs works only with DistributedDataParallel, and has no effect on exchanges: loop "
        "over `session.data(loader)`, which lets ranks with fewer batches take part, or leave even_batches "
        "at True"
    )


def _saved(accelerator: Accelerator) -> dict[str, Any]:
    return {} if accelerator.scaler is None else {"scaler": accelerator.scaler}
