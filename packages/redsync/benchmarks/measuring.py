"""Parts that the benchmarks share: sides that take turns in one process, and their medians."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np
import torch

DISTRIBUTIONS = ("normal", "uniform", "heavy", "real")


def medians(
    sides: Mapping[str, Callable[[], object]], repeats: int, end: Callable[[], object] = lambda: None
) -> dict[str, float]:
    """Return each side's median seconds; they take turns, so that what else the machine does hits them alike.

    Args:
        sides: what is measured, by name; each runs once more, first, to warm up.
        repeats: how many turns count.
        end: called behind each turn, and measured: waits for a device.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats + 1):
        for name, side in sides.items():
            start_s = time.perf_counter()
            side()
            end()
            if repeat:
                seconds[name].append(time.perf_counter() - start_s)
    return {name: sorted(all_s)[len(all_s) // 2] for name, all_s in seconds.items()}


def residual(distribution: str, numel: int) -> torch.Tensor:
    """Return `numel` float32 values of a distribution; the same in every run."""
    generator = torch.Generator().manual_seed(0)
    match distribution:
        case "normal":
            return torch.randn(numel, generator=generator)
        case "uniform":
            return torch.rand(numel, generator=generator) * 2 - 1
        case "heavy":
            return torch.empty(numel).cauchy_(generator=generator)
        case "real":
            return _gradient(numel)
    raise ValueError(f"no distribution {distribution!r}; there are: {', '.join(DISTRIBUTIONS)}")


def _gradient(numel: int) -> torch.Tensor:
    """Return the gradient of a wide layer over Fashion-MNIST, after one step of a network with that layer."""
    import hocket_tasks.fashion_mnist as fashion

    data = fashion.FashionMNIST().data(0).train
    batch = torch.stack([data[i][0].reshape(-1) for i in range(64)])
    targets = torch.tensor([int(data[i][1]) for i in range(64)])
    torch.manual_seed(0)
    width = -(-numel // batch.shape[1])
    weight = (torch.randn(width, batch.shape[1]) / batch.shape[1] ** 0.5).requires_grad_()
    head = (torch.randn(10, width) / width**0.5).requires_grad_()
    loss = torch.nn.functional.cross_entropy(torch.relu(batch @ weight.T) @ head.T, targets)
    gradient = torch.autograd.grad(loss, weight)[0]
    return gradient.reshape(-1)[:numel].clone() * np.float32(64)
