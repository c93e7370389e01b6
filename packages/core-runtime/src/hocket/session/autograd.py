"""The private corners of torch's autograd that sessions use, in one place.

DDP and FSDP use the same ones: `queue_callback` runs a function at the end of the backward that is under way, on
the thread that ends it: the one that called it or, of a backward on a GPU, autograd's own for the device. Its
exceptions leave `backward()` with their own type.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node, _engine_run_backward, get_gradient_edge

__all__ = ["accumulation_of", "at_end_of_backward", "current_backward", "is_nested_backward"]

_RUN_BACKWARD = _engine_run_backward.__code__
_RUN_NODE = BackwardCFunction.apply.__code__


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run `callback` at the end of the backward under way; call this from a gradient hook."""
    Variable._execution_engine.queue_callback(callback)


def accumulation_of(parameter: Tensor) -> Node:
    """Return the node that adds to `p.grad`. Unlike the tensor's own hooks, `autograd.grad` does not call its hooks."""
    return get_gradient_edge(parameter).node


def current_backward() -> int:
    """Return a number that tells this backward from every other one; -1 outside of backward."""
    return torch._C._current_graph_task_id()


def is_nested_backward() -> bool:
    """Return whether the backward under way was called by a node of another one (reentrant checkpointing)."""
    frame: FrameType | None = sys._getframe()
    called = False
    while frame is not None:
        # Whoever called it is a node of another one, on a GPU's thread as on any, or that other one itself.
        if called and frame.f_code in (_RUN_NODE, _RUN_BACKWARD):
            return True
        called = called or frame.f_code is _RUN_BACKWARD
        frame = frame.f_back
    return False
