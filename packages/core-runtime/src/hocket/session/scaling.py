"""By what a GradScaler has multiplied a loss: what compressors remember must not depend on a scale that changes."""

from __future__ import annotations

import threading
import weakref
from functools import cache
from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.utils._pytree import tree_leaves

from hocket.session.autograd import current_backward

__all__ = ["loss_scale", "watch_scalers"]


class _Last(threading.local):
    """The last backward of this thread through a scaled loss, and its scaler."""

    backward = -1
    scaler: weakref.ref[GradScaler] | None = None


_last = _Last()


def loss_scale() -> float:
    """Return by what the loss was multiplied whose backward is under way; 1 without a scaler."""
    scaler = _last.scaler() if _last.scaler is not None and _last.backward == current_backward() else None
    return 1.0 if scaler is None else scaler.get_scale()


@cache
def watch_scalers() -> None:
    """Take note of backwards through losses that are scaled from now on; a scaler tells nobody of itself."""
    scale = GradScaler.scale

    def noted(self: GradScaler, outputs: Any) -> Any:
        scaled = scale(self, outputs)
        own = weakref.ref(self)

        def note(gradient: Tensor) -> None:
            _last.backward, _last.scaler = current_backward(), own

        for loss in tree_leaves(scaled) if self.is_enabled() else ():
            if isinstance(loss, Tensor) and loss.requires_grad:
                loss.register_hook(note)
        return scaled

    GradScaler.scale = noted
