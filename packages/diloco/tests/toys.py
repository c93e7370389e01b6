"""A model whose gradients NumPy knows, and sessions that train it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from oracle import Vector
from torch import Tensor, nn

import hocket

T = TypeVar("T")

#: Layers by their sizes.
LAYERS = {"a": 5, "b": 17, "c": 3, "d": 8}
LR = 0.05


class Toy(nn.Module):
    """Layers of one vector each."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        for layer, size in LAYERS.items():
            module = nn.Module()
            module.weight = nn.Parameter(torch.linspace(-1, 1, size, dtype=torch.float64).to(dtype))
            setattr(self, layer, module)


def _target(rank: int, step: int, size: int) -> NDArray[np.float64]:
    target: NDArray[np.float64] = np.cos(np.arange(size) * (1 + rank) + 0.7 * step + rank)
    return target


def gradient(rank: int, step: int, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the gradient in a step, from 1 on, of a rank's layer: towards a target that wanders."""
    found: NDArray[np.float64] = values - _target(rank, step, values.shape[-1])
    return found


def inner_step(step: int, theta: dict[str, Vector]) -> None:
    """Step all ranks, [ranks, n] by layer, in place."""
    for values in theta.values():
        for rank, own in enumerate(values):
            values[rank] = own - LR * gradient(rank, step, own)


def start(ranks: int) -> dict[str, Vector]:
    return {name: np.stack([values] * ranks) for name, values in layers_of(Toy()).items()}


def layers_of(model: nn.Module) -> dict[str, NDArray[np.float64]]:
    named = model.named_parameters()
    return {name.rpartition(".")[0]: p.detach().double().numpy().copy() for name, p in named}


def steps_of(session: Any, count: int) -> None:
    """Step with this rank's gradients."""
    for _ in range(count):
        for parameter in session.model.parameters():
            values = parameter.detach().double().numpy()
            own = gradient(session.rank, session.step + 1, values)
            parameter.grad = torch.from_numpy(own).to(parameter.dtype)
        session.optimizer.step()


def on_ranks(size: int, call: Callable[[], T]) -> list[T]:
    return hocket.virtual(size).run(call)


def toy_session(
    strategy: Any, dtype: torch.dtype = torch.float64, lr: float = LR, *, shift: bool = False, **how: Any
) -> Any:
    """Attach a toy; with `shift` each rank's begins elsewhere."""
    model = Toy(dtype)
    if shift:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(hocket.join().rank)
    return hocket.attach(model, torch.optim.SGD(model.parameters(), lr=lr), strategy, **how)


def train(
    strategy: Any, steps: int, look: Sequence[int] = (), dtype: torch.dtype = torch.float64
) -> tuple[Mapping[str, NDArray[np.float64]], Mapping[str, NDArray[np.float64]], float]:
    """Train a toy; return its layers, those of the consensus, and the bytes sent.

    Args:
        look: the steps after which the consensus is looked at.
    """
    with toy_session(strategy, dtype) as session:
        for step in range(1, steps + 1):
            steps_of(session, 1)
            if step in look:
                with session.consensus():
                    pass
        own, sent = layers_of(session.model), session.counters.bytes_sent
        with session.consensus():
            return own, layers_of(session.model), sent


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])
