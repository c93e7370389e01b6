"""The clipping of gradients that the ranks of an island hold in shards, also of several meshes."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from hocket.session.island import Island


@torch.no_grad()
def clip_shards(
    parameters: Iterable[nn.Parameter], island: Island, max_norm: float, norm_type: float
) -> Tensor:
    """Clip gradients as `torch.nn.utils.clip_grad_norm_` does those of a whole model; collective in the island.

    Torch's function refuses plain gradients beside sharded ones, and gradients of two meshes.

    Args:
        parameters: this rank's shards.
        island: the ranks that hold the others.
        max_norm: the largest norm.
        norm_type: the norm's order, `inf` for the largest element.

    Returns:
        The norm before, on the first gradient's device.
    """
    held = [(parameter, gradient) for parameter in parameters if (gradient := parameter.grad) is not None]
    if not held:
        return torch.tensor(0.0)
    device = held[0][1].device
    given = [gradient for _, gradient in held]
    norms = [
        torch.linalg.vector_norm(g, norm_type, dtype=torch.float64).to(device)
        if g.numel()
        else torch.zeros((), dtype=torch.float64, device=device)
        for g in given
    ]
    own: list[float] = torch.stack(norms).tolist()
    if norm_type == float("inf"):
        norm = island.max(max(own))
    else:
        shares = [own_norm**norm_type / island.holders(p) for own_norm, (p, _) in zip(own, held, strict=True)]
        norm = island.sum([sum(shares)])[0] ** (1.0 / norm_type)
    factor = min(1.0, max_norm / (norm + 1e-6))
    if factor < 1.0 or math.isnan(norm):
        torch._foreach_mul_(given, factor)
    return torch.tensor(norm, dtype=torch.float32, device=device)
