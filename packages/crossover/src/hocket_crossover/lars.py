"""LARS: each tensor steps in proportion to its own norm, for large batches.

Source: Y. You, I. Gitman, B. Ginsburg, "Large Batch Training of Convolutional Networks", arXiv:1708.03888, in the
formulation of mxnet.optimizer.LARS, which Crossover-SGD was evaluated with (Yeo et al., section 4.1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from hocket.api import plain


class LARS(torch.optim.Optimizer):
    """SGD with momentum whose rate is scaled layer by layer.

    A step is v = momentum * v - rate * (g + weight_decay * w), then w += v.

    Where a tensor w has two axes or more, rate = lr * coefficient * |w| / (|g| + weight_decay * |w| + eps); lr itself
    where either norm is 0 or no number, and for tensors of one axis or none: biases, gamma and beta. The rate is
    part of the velocity v, so that a change of lr acts on new gradients alone. In torch's SGD it scales all of v.

    All tensors of a group are stepped at once, and no value leaves the device.

    Args:
        params: parameters, or groups of them with options of their own.
        lr: the learning rate, 0 or more.
        momentum: 0 or more, below 1.
        weight_decay: 0 or more.
        coefficient: the trust coefficient (MXNet: eta), more than 0.
        eps: keeps the division finite, 0 or more.

    Raises:
        ValueError: one of these is not in its range.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[plain.Tree],
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        coefficient: float = 0.001,
        eps: float = 1e-8,
    ) -> None:
        for name, value in (("lr", lr), ("weight_decay", weight_decay), ("eps", eps)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be finite and 0 or more, not {value}")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be 0 or more and below 1, not {momentum}")
        if not 0 < coefficient < math.inf:
            raise ValueError(f"coefficient must be finite and more than 0, not {coefficient}")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "coefficient": coefficient,
            "eps": eps,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient; return what `closure` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            given = [p for p in group["params"] if p.grad is not None]
            self._step([p for p in given if p.ndim > 1], group, adaptive=True)
            self._step([p for p in given if p.ndim <= 1], group, adaptive=False)
        return loss

    def _step(self, weights: list[Tensor], group: plain.Tree, *, adaptive: bool) -> None:
        if not weights:
            return
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        change = torch._foreach_add(gradients, weights, alpha=group["weight_decay"])
        if adaptive:
            torch._foreach_mul_(change, self._rates(weights, gradients, group))
        else:
            torch._foreach_mul_(change, group["lr"])
        if group["momentum"] == 0:
            torch._foreach_sub_(weights, change)
            return
        velocities = [self._velocity(weight) for weight in weights]
        torch._foreach_mul_(velocities, group["momentum"])
        torch._foreach_sub_(velocities, change)
        torch._foreach_add_(weights, velocities)

    def _rates(self, weights: list[Tensor], gradients: list[Tensor], group: plain.Tree) -> list[Tensor]:
        """Return the rate of each tensor, scalars on its device."""
        rates = []
        norms = zip(torch._foreach_norm(weights), torch._foreach_norm(gradients), strict=True)
        for weight_norm, gradient_norm in norms:
            denominator = gradient_norm + group["weight_decay"] * weight_norm + group["eps"]
            trust = group["coefficient"] * weight_norm / denominator
            usable = (weight_norm > 0) & (gradient_norm > 0) & torch.isfinite(weight_norm / gradient_norm)
            rates.append(group["lr"] * torch.where(usable, trust, 1.0))
        return rates

    def _velocity(self, weight: Tensor) -> Tensor:
        state = self.state[weight]
        if "velocity" not in state:
            state["velocity"] = torch.zeros_like(weight)
        velocity: Tensor = state["velocity"]
        return velocity
