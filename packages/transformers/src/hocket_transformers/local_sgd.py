"""Accelerate's loops: an exchange by Hocket in place of the library's own, for Trainer and for one's own loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hocket import Session, attach, compose
from hocket.errors import UserError

__all__ = ["exchanging", "refuse_distribution"]

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
    to evaluate or to save.

    Args:
        accelerator: of the loop.
        model, optimizer: as `accelerator.prepare` returned them, or not prepared.
        strategy, overrides: as of `hocket.compose`.
        options: as of `hocket.attach`.

    Raises:
        UserError: Accelerate shards the model.
    """
    refuse_distribution(accelerator)
    plain = accelerator.unwrap_model(model, keep_torch_compile=False)
    with ExitStack() as stack:
        if isinstance(model, DistributedDataParallel):
            stack.enter_context(model.no_sync())
        session = stack.enter_context(attach(plain, optimizer, compose(strategy, *overrides), **options))
        own = accelerator.no_sync
        accelerator.no_sync = partial(_accumulating, session, plain, own, accelerator)
        try:
            yield session
            session.consensus()
        finally:
            accelerator.no_sync = own


def _accumulating(
    session: Session, plain: nn.Module, own: Any, accelerator: Accelerator, model: nn.Module
) -> Any:
    """Return the context of a backward whose gradients only add up, which `accelerator.accumulate` enters."""
    is_attached = accelerator.unwrap_model(model, keep_torch_compile=False) is plain
    return session.accumulate() if is_attached else own(model)
