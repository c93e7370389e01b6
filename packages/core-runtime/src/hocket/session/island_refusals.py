"""Refusals of what the shards of islands cannot carry yet, by name, before any change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hocket.collective.api import Ends
from hocket.config.component import component_name
from hocket.errors import AttachError
from hocket.segment.shards import fsdp_modules, is_sharded
from hocket.session.engine import DataParallel, Engine
from hocket.session.island import shares_of
from hocket.session.refusals import needs_closure, refuse_closure
from hocket.session.step.optimizers import stepped_by
from hocket.session.torch_internals import is_gathered_by_fsdp, is_sharded_by_fsdp
from hocket.strategy.exchange import Exchange, Overlap
from hocket.strategy.strategy import Strategy
from hocket.transport.peer import Peer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def check_island(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    strategy: Strategy,
    peer: Peer,
    engine: Engine,
    mesh: DeviceMesh,
    same_samples: Sequence[str] | None,
) -> None:
    """Refuse strategies, engines and models that islands cannot carry.

    Raises:
        AttachError: names the reason, and what to use.
    """
    if peer.threads.shares_process and peer.size > 1:
        raise AttachError(
            "virtual ranks cannot train a sharded model, because they are one process of torch.distributed: start "
            "ranks with torchrun or hocket launch --transport torch"
        )
    if not isinstance(engine, DataParallel):
        raise AttachError(
            f"engine {type(engine).__name__} needs whole models, but this one is sharded: leave the engine out"
        )
    shortest = min((p.dtype.itemsize for p in model.parameters() if p.requires_grad), default=4)
    check_sharded(optimizers, strategy, shortest)
    if shares_of(mesh, model, same_samples) > 1:
        for name in _unsummed(model):
            raise AttachError(
                f"parameter {name} is not sharded, so its gradients are not summed over the island's ranks, which "
                "read different samples: call fully_shard on the model itself as well, without ignored_params"
            )


def check_gathered(model: nn.Module) -> None:
    """Refuse a part of a model whose parameters FSDP2 gathers with a module around it.

    A session drops what FSDP has gathered before it writes to shards, and reaches FSDP's modules within the model.

    Raises:
        AttachError: names the part, and what to attach.
    """
    whole: list[Any] = fsdp_modules(model)
    within = {part for module in whole for part in module.modules()}
    for name, module in model.named_modules():
        own = [p for p in module.parameters(recurse=False) if not is_sharded_by_fsdp(p)]
        if own and is_gathered_by_fsdp(module) and module not in within:
            raise AttachError(
                f"FSDP gathers the parameters of {f'module {name!r}' if name else 'the model'} together with its outer "
                "module: attach the outer module, or call fully_shard on the attached module before the outer one"
            )


def check_sharded(
    optimizers: Sequence[torch.optim.Optimizer], strategy: Strategy, shortest: int = torch.float32.itemsize
) -> None:
    """Refuse optimizers and strategies that sharded models cannot have.

    Args:
        optimizers: any with the same settings.
        strategy: with all phases.
        shortest: bytes of the shortest parameter's elements.

    Raises:
        AttachError: names the reason, and what to use.
    """
    for each in map(stepped_by, optimizers):
        if needs_closure(each):
            refuse_closure(each, strategy, sharded=True)
        if isinstance(each, torch.optim.Adafactor) or (isinstance(each, torch.optim.SGD) and _is_fused(each)):
            kind = type(each).__name__ + " with fused=True" * _is_fused(each)
            or_unfused = ", or leave fused out" * _is_fused(each)
            raise AttachError(
                f"torch's {kind} cannot step a sharded model: use another optimizer, such as AdamW{or_unfused}"
            )
    if any(each.samples is not None for each in strategy.in_turn):
        raise AttachError(
            "samples: exchanging samples gives ranks different numbers of batches, but the ranks of an island need "
            "the same number: take samples out of the strategy"
        )
    for exchange in (exchange for each in strategy.in_turn for exchange in each.exchanges):
        reason = _reason(exchange, shortest)
        if reason:
            raise AttachError(f"{exchange.name} cannot exchange a sharded model, because {reason}")


def _is_fused(optimizer: torch.optim.Optimizer) -> bool:
    return any(group.get("fused") for group in optimizer.param_groups)


def _unsummed(model: nn.Module) -> Iterator[str]:
    return (name for name, p in model.named_parameters() if p.requires_grad and not is_sharded(p))


def _reason(exchange: Exchange, shortest: int) -> str:
    """Return the reason why shards cannot be exchanged so, and what to do; empty if they can.

    Args:
        exchange: the exchange.
        shortest: bytes of the shortest parameter's elements.
    """
    traits = exchange.collective.traits
    kind = component_name(exchange.collective)
    if exchange.overlap is Overlap.FORWARD:
        return "`overlap: forward` merges parameters after FSDP has gathered them: set `overlap: none`"
    if traits.ends is Ends.OPEN or traits.needs_thread or not traits.divides_by_weight:
        return (
            f"with collective {kind} each rank receives whatever is ready, so the shards of one replica would mix "
            "different ranks: use a collective with rounds (allreduce, gossip)"
        )
    if exchange.carries_weight and shortest < torch.float32.itemsize:
        return (
            "push-sum keeps an unsharded float32 copy of bfloat16 and float16 parameters: keep parameters in float32, "
            "with bfloat16 by fully_shard's mp_policy, or use topology ring or exponential"
        )
    return ""
