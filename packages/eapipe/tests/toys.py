"""Small models and batches, their NumPy twins, and runs of them on virtual ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from reference import Batch, Layer
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import hocket
from hocket_eapipe import Pipeline
from hocket_eapipe.session import PipelineSession
from hocket_eapipe.stage import Stage

D = 5


def chain(num_layers: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Sequential:
    """Return Linear, Tanh, ..., Linear: one linear layer for each stage."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for _ in range(num_layers):
        layers += [nn.Linear(D, D), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).to(dtype)


def batch(t: int, dtype: torch.dtype = torch.float64, samples: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(t)
    inputs, target = torch.randn(2, samples, D, generator=generator, dtype=torch.float64)
    return inputs.to(dtype), target.to(dtype)


def twins(model: nn.Sequential) -> list[Layer]:
    """Return the linear layers of a model for the reference, as float64."""
    return [
        (layer.weight.detach().double().numpy().copy(), layer.bias.detach().double().numpy().copy())
        for layer in model
        if isinstance(layer, nn.Linear)
    ]


def reference_batches(count: int) -> list[Batch]:
    return [(inputs.numpy(), target.numpy()) for inputs, target in (batch(t) for t in range(1, count + 1))]


def flat(layers: Sequence[Layer] | nn.Module) -> Tensor:
    """Return all weights of a model or of its NumPy twin as one float64 vector."""
    if isinstance(layers, nn.Module):
        return torch.cat([p.detach().double().reshape(-1) for p in layers.parameters()])
    return torch.cat([torch.from_numpy(array).reshape(-1) for layer in layers for array in layer])


def sgd(model: nn.Module, lr: float = 0.3, momentum: float = 0.9) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)


def stages_of(session: hocket.Session) -> list[Stage]:
    """Return this rank's stages, in order."""
    assert isinstance(session.inner, PipelineSession)
    return session.inner.stages


def trained(
    engine: Pipeline,
    count: int,
    *,
    ranks: int = 1,
    model: Callable[[], nn.Sequential],
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    look: Callable[[hocket.Session], Any] = lambda session: None,
    batches: Callable[[int], Any] = batch,
    loss: Callable[[Any, Any], Tensor] = mse_loss,
    strategy: Any = None,
) -> list[tuple[Tensor, list[float], Any]]:
    """Train on batches 1 ... count on virtual ranks.

    Returns:
        For each rank the weights, the losses that it was told, and what `look` said of the drained session.
    """

    def body() -> tuple[Tensor, list[float], Any]:
        net = model()
        losses = []
        with hocket.attach(net, optimizer(net), strategy or {}, engine=engine) as session:
            for t in range(1, count + 1):
                result = session.train_batch(batches(t), loss)
                if result is not None:
                    losses.append(float(result.loss))
            session.settle()
            seen = look(session)
        return flat(net), losses, seen

    return hocket.virtual(ranks).run(body)
