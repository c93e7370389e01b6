"""Torch's private corners that sessions use, and its methods that they replace, in one place.

DDP and FSDP use the same ones of autograd: `queue_callback` runs a function at the end of the backward under way, on
the thread that ends it: the one that called it or, of a backward on a GPU, autograd's own for the device. Its
exceptions leave `backward()` with their own type.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import wraps
from types import FrameType
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch._C._autograd import _profiler_enabled
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node, _engine_run_backward, get_gradient_edge
from torch.optim import Optimizer

T = TypeVar("T")

_RUN_BACKWARD = _engine_run_backward.__code__
_RUN_NODE = BackwardCFunction.apply.__code__

#: What torch wraps around the `step` of all optimizers.
_STEP = Optimizer.profile_hook_step(lambda: None).__code__

#: Returns whether a profiler of torch records this thread.
is_profiled = _profiler_enabled

#: Where torch has its distributed checkpoints, if they are in use.
_CHECKPOINTS = "torch.distributed.checkpoint.state_dict"


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run `callback` at the end of the backward under way; call this from a gradient hook."""
    Variable._execution_engine.queue_callback(callback)


def accumulation_of(parameter: Tensor) -> Node:
    """Return the node that adds to `p.grad`. Unlike the tensor's own hooks, `autograd.grad` does not call its hooks."""
    return get_gradient_edge(parameter).node


#: Returns a number that tells this backward from every other one; -1 outside of backward.
current_backward: Callable[[], int] = torch._C._current_graph_task_id


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


def steps_under_way() -> list[Optimizer]:
    """Return the optimizers that this thread is stepping, the innermost first, without failed ones.

    It is empty when torch's checkpoints make an optimizer create its state by a step of rate 0.
    """
    makes_state = getattr(sys.modules.get(_CHECKPOINTS), "_init_optim_state", None)
    code = getattr(makes_state, "__code__", None)
    found = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _STEP:
            found.append(frame.f_locals["self"])
        elif frame.f_code is code:
            return []
        frame = frame.f_back
    return found


def notices_steps(optimizer: Optimizer) -> bool:
    """Return whether torch's hooks notice an optimizer's steps: not if its `__init__` was left out."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks")


def pre_hooks(module: nn.Module) -> Iterator[Callable[..., object]]:
    """Yield what runs before a module's forward."""
    yield from module._forward_pre_hooks.values()


def is_compiled(module: nn.Module) -> bool:
    """Return whether `module.compile()` was called."""
    return module._compiled_call_impl is not None


def is_gathered_by_fsdp(module: nn.Module) -> bool:
    """Return whether FSDP2 gathers a module's parameters, with those of the module or of one around it."""
    return bool(getattr(module, "_is_fsdp_managed_module", False))


def is_sharded_by_fsdp(part: nn.Module | Tensor) -> bool:
    """Return whether FSDP has taken a module, or a parameter of one, of which each rank holds a shard then."""
    return hasattr(part, "_get_fsdp_state") or getattr(part, "_fsdp_flattened", False)


def storage_uses(tensor: Tensor) -> int:
    """Return the number of tensors that refer to a tensor's memory; its views count, too."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def outside_of_dynamo(look: Callable[..., None]) -> Callable[..., None]:
    """Return a function that compiled code calls as it is, so that models around the call compile as before."""
    function: Callable[..., None] = torch._disable_dynamo(look)  # type: ignore[attr-defined]
    return function


def replace_method(kind: type, name: str, make: Callable[[Callable[..., T]], Callable[..., T]]) -> None:
    """Replace a method of one of torch's classes for the rest of the process.

    Args:
        kind: torch's class.
        name: the method's name.
        make: gets torch's own method, which it calls; returns the new one.
    """
    own = getattr(kind, name)
    setattr(kind, name, wraps(own)(make(own)))
