"""SpecTrain: passes read the weights as they are expected to be when the batch's gradient will be applied.

Source: C.-C. Chen, C.-L. Yang, H.-Y. Cheng, "Efficient and Robust Parallel DNN Training through Model Parallelism on
Multi-GPU Platforms", 2018, eq. 3: w - s * lr * v, v the smoothed gradient, s the version gap.
"""

from __future__ import annotations

import torch

from hocket.errors import AttachError, CompositionError
from hocket_eapipe.optimizers import Follower
from hocket_eapipe.weights.api import Binding, StagePart, alias, copied
from hocket_eapipe.weights.newest import Newest

_MOMENTUM = "momentum_buffer"


class SpecTrain(Newest):
    """Predicted weights: w - s * lr * v in the forward, w anew in the backward (s = 0).

    s is 0 there because the gradient is applied at once. v is the momentum buffer of torch's SGD, which steps by
    lr * v. The backward's values replace the forward's, in one working copy of the weights for all batches.

    Raises:
        AttachError: the optimizer is not torch's SGD with momentum.
        CompositionError: a compressor has taken the momentum over.
    """

    def __init__(self, part: StagePart, follower: Follower) -> None:
        super().__init__(part, follower)
        optimizer = part.session.optimizer
        if type(optimizer) is not torch.optim.SGD or any(not g["momentum"] for g in optimizer.param_groups):
            raise AttachError(
                "SpecTrain predicts weights from the momentum of torch's SGD, but the optimizer is "
                f"{type(optimizer).__name__} without momentum: use SGD with momentum, or another policy"
            )
        if part.session.phase.terms is not None:
            raise CompositionError(
                "SpecTrain predicts weights from the optimizer's momentum, but the compressor of gradients.0 "
                "applies it instead: use a compressor without momentum correction, or another policy"
            )
        self._names = {parameter: name for name, parameter in self._parameters.items()}
        self._working = {name: copied(p).requires_grad_(False) for name, p in self._parameters.items()}

    def forward(self, batch: int) -> Binding:
        # The batch's own gradient comes after those of all batches before it.
        self._predict(gap=batch - 1 - self.applied)
        return Binding({name: alias(tensor) for name, tensor in self._working.items()})

    def before_backward(self, batch: int) -> None:
        self._predict(gap=0)

    @torch.no_grad()
    def _predict(self, gap: int) -> None:
        self._follower.follow()
        self.newest()
        for group in self._part.session.optimizer.param_groups:
            for parameter in group["params"]:
                working = self._working[self._names[parameter]]
                working.copy_(parameter)
                buffer = self._part.session.optimizer.state[parameter].get(_MOMENTUM)
                if gap and buffer is not None:
                    working.add_(buffer, alpha=-gap * group["lr"])
