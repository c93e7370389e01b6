"""The bytes of what a rank saves: the copy in host memory that checkpoints beside training are written from."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hocket.compressor.api import footprint_of
from hocket.plan.plan import ExchangePlan, Plan

if TYPE_CHECKING:
    from torch.optim import Optimizer


def saved_bytes(
    plan: Plan,
    model: nn.Module,
    optimizers: Callable[[nn.Module], Sequence[Optimizer]],
    divided: Mapping[str, int] = MappingProxyType({}),
) -> int:
    """Return the bytes of a rank's state: model, optimizers after a step, and what exchanges keep.

    Args:
        plan: of the strategy.
        model: on any device, `meta` included.
        optimizers: builds the optimizers of a model.
        divided: by name, the number of ranks among which a parameter and its optimizer's state are divided; 1 for
            others.
    """
    is_empty = all(parameter.is_meta for parameter in model.parameters())
    held = model if is_empty else copy.deepcopy(model).to("meta")
    of_optimizers = _optimizer_bytes(held, optimizers(held))
    parameters = sum(
        -(-(_nbytes([parameter]) + of_optimizers[parameter]) // divided.get(name, 1))
        for name, parameter in held.named_parameters()
    )
    return round(parameters + _nbytes(held.buffers()) + sum(map(_kept_bytes, plan.exchanges)))


def _optimizer_bytes(model: nn.Module, optimizers: Sequence[Optimizer]) -> Counter[Tensor]:
    """Return the bytes of the optimizers' state after a step without values, by parameter.

    An optimizer that reads values cannot make it; then only what it has made until then counts.
    """
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    found: Counter[Tensor] = Counter()
    for optimizer in optimizers:
        with contextlib.suppress(RuntimeError, NotImplementedError):
            optimizer.step()
        for stepped, state in optimizer.state.items():
            found[stepped] += _nbytes(each for each in state.values() if isinstance(each, Tensor))
    model.zero_grad()
    return found


def _kept_bytes(planned: ExchangePlan) -> float:
    """Return the bytes of compressors' memories, of outer parameters, and of what a delay keeps under way."""
    exchange = planned.exchange
    under_way = 2 if exchange.delay else 0
    return sum(
        layout.numel * layout.dtype.itemsize * (layout.num_kept + under_way)
        + footprint_of(exchange.compressor, layout).state_bytes
        for layout in planned.layouts
    )


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
