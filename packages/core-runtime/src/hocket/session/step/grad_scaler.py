"""GradScaler's factor on the loss and the steps that it has skipped, neither of which it reports."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from hocket.session.torch_internals import current_backward, replace_method


class _Here(threading.local):
    """This thread's last scaler, and whether it steps an optimizer now."""

    scaler: weakref.ref[GradScaler] | None = None
    steps = False


_here = _Here()

# The scaler of each of the last backwards, which run on other threads where devices have threads of their own.
_scalers: dict[int, weakref.ref[GradScaler]] = {}
_MOST_BACKWARDS = 1024


def loss_scale() -> float:
    """Return the factor of the loss whose backward is under way; 1 without a scaler.

    The state of compressors must not depend on a scale that changes.
    """
    own = _scalers.get(current_backward())
    scaler = None if own is None else own()
    return 1.0 if scaler is None else scaler.get_scale()


def scaler_steps(optimizer: Optimizer) -> bool:
    """Return whether a scaler that has checked this optimizer's gradients for Inf makes the step under way."""
    return _here.steps or getattr(optimizer, "found_inf", None) is not None


def found_inf(optimizer: Optimizer) -> bool:
    """Return whether a fused optimizer will skip its step for Inf, though the scaler calls it."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


def unscales_by(optimizer: Optimizer) -> Tensor | float:
    """Return the divisor of gradients within an optimizer's step, as fused ones have; else 1."""
    scale: Tensor | None = getattr(optimizer, "grad_scale", None)
    return 1.0 if scale is None else scale


def unscale(gradients: Sequence[Tensor]) -> None:
    """Divide gradients of losses that this thread's last scaler has scaled by its scale."""
    scaler = None if _here.scaler is None else _here.scaler()
    if scaler is not None and gradients:
        torch._foreach_div_(list(gradients), scaler.get_scale())


def scaler_in_use() -> bool:
    """Return whether this thread's last scaled loss has a scaler that still exists."""
    return _here.scaler is not None and _here.scaler() is not None


@cache
def watch_scalers() -> None:
    """Watch for backwards through scaled losses from now on."""

    def noting(scale: Callable[..., Any]) -> Callable[..., Any]:
        def note_scaled(self: GradScaler, outputs: Any) -> Any:
            scaled = scale(self, outputs)
            own = weakref.ref(self)
            if self.is_enabled():
                _here.scaler = own

            def note(gradient: Tensor) -> None:
                _scalers[current_backward()] = own
                if len(_scalers) > _MOST_BACKWARDS:
                    del _scalers[next(iter(_scalers))]

            for loss in tree_leaves(scaled) if self.is_enabled() else ():
                if isinstance(loss, Tensor) and loss.requires_grad:
                    loss.register_hook(note)
            return scaled

        return note_scaled

    replace_method(GradScaler, "scale", noting)


@cache
def watch_skips(on_skip: Callable[[Optimizer], None]) -> None:
    """Call `on_skip` with each optimizer whose step a scaler skips from now on."""

    def noting(step_unless_inf: Callable[..., Any]) -> Callable[..., Any]:
        def note_skip(self: GradScaler, optimizer: Optimizer, state: Any, *args: Any, **kwargs: Any) -> Any:
            _here.steps = True
            try:
                result = step_unless_inf(self, optimizer, state, *args, **kwargs)
            finally:
                _here.steps = False
            if any(found.item() for found in state["found_inf_per_device"].values()):
                on_skip(optimizer)
            return result

        return note_skip

    replace_method(GradScaler, "_maybe_opt_step", noting)
