"""The shards of DTensor parameters on this rank, as plain parameters: all that knows torch's sharded tensors.

FSDP2 and tensor parallelism make each parameter a DTensor, of which a rank holds a part in plain memory. A session
works with these parts. FSDP reads that memory when it gathers a parameter, and writes gradients of the same shape.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

#: Of each DTensor parameter that a session holds, a weak reference to its shard.
_shards = WeakIdKeyDictionary()


def is_sharded(tensor: object) -> bool:
    """Return whether a tensor is a DTensor; `torch.distributed.tensor` is not imported to know that it is not."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


@torch.no_grad()
def local(tensor: Any) -> Tensor:
    """Return this rank's part of a DTensor, in its own memory; any other tensor as it is."""
    if not is_sharded(tensor):
        plain: Tensor = tensor
        return plain
    part = tensor.to_local()
    if hasattr(part, "wait"):  # an AsyncCollectiveTensor
        part = tensor._local_tensor = part.wait()
    return part.data if isinstance(part, nn.Parameter) else part


@torch.no_grad()
def like(given: Any, part: Tensor) -> Tensor:
    """Return a tensor that is sharded as `given` is, and of which `part` is this rank's; `part` if plain."""
    if not is_sharded(given):
        return part
    from torch.distributed.tensor import DTensor

    made: Any = DTensor.from_local(
        part, given.device_mesh, given.placements, run_check=False, shape=given.shape, stride=given.stride()
    )
    # Torch puts a view there, and whoever reads a gradient is to find the very tensor that was bound.
    made._local_tensor = part
    tensor: Tensor = made
    return tensor


@torch.no_grad()
def gathered(tensor: Any) -> Tensor:
    """Return the whole of a DTensor, collectively over its mesh; any other tensor as it is."""
    if not is_sharded(tensor):
        plain: Tensor = tensor
        return plain
    whole: Tensor = tensor.full_tensor()
    return whole


def part_within(tensor: Any) -> tuple[list[int], list[int]] | None:
    """Return a DTensor's whole shape, and where this rank's part begins: nowhere if it is in several pieces.

    None for any other tensor.
    """
    if not is_sharded(tensor):
        return None
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(type(placement) not in (Shard, Replicate) for placement in tensor.placements):
        return list(tensor.shape), []
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return list(tensor.shape), list(offset)


def address_of(tensor: Any) -> int:
    """Return the address of a tensor's memory, of a DTensor that of this rank's part; fast, for each step."""
    held: Tensor = tensor._local_tensor if is_sharded(tensor) else tensor
    return held.data_ptr()


class Shard(nn.Parameter):
    """The shard of a DTensor parameter: its memory is the parameter's, and so are its gradient and its hooks.

    Attributes:
        whole: the DTensor parameter.
    """

    whole: Any

    @classmethod
    def of(cls, whole: nn.Parameter) -> Shard:
        """Return the shard of a DTensor parameter."""
        shard = cls(local(whole).detach(), requires_grad=False)
        shard.whole = whole
        _shards[whole] = weakref.ref(shard)
        return shard

    @property
    def grad(self) -> Tensor | None:
        """Return this rank's part of the gradient.

        With tensor parallelism gradients arrive in other placements, partial sums among them: the first reader has them
        placed as the parameter is, collectively over its mesh.
        """
        given = self.whole.grad
        if given is None or not is_sharded(given):
            return None if given is None else local(given)
        if given.placements != self.whole.placements:
            given = self.whole.grad = given.redistribute(placements=self.whole.placements)
        return local(given)

    @grad.setter
    def grad(self, part: Tensor | None) -> None:
        before = self.whole.grad
        if before is not None and part is None and before.is_cuda:
            # Another stream may have reduced it, and FSDP counts on its life until backward ends.
            local(before).record_stream(torch.cuda.current_stream(before.device))
        self.whole.grad = None if part is None else like(self.whole, part)

    @property
    def requires_grad(self) -> bool:
        """Tell whether the parameter is trained now."""
        trained: bool = self.whole.requires_grad
        return trained

    @requires_grad.setter
    def requires_grad(self, trained: bool) -> None:
        self.whole.requires_grad = trained

    @property
    def _post_accumulate_grad_hooks(self) -> Any:  # type: ignore[override]
        return self.whole._post_accumulate_grad_hooks

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> RemovableHandle:
        """Call `hook` with this shard when the parameter's gradient is in."""
        # Weak, as a parameter's hooks keep alive what they refer to.
        own, whole = weakref.ref(self), weakref.ref(self.whole)

        def arrived(parameter: Tensor) -> None:
            shard = own()
            if shard is not None and parameter is whole():  # no deep copy of it
                hook(shard)

        handle: RemovableHandle = self.whole.register_post_accumulate_grad_hook(arrived)
        return handle


def part_of(parameter: Tensor) -> Tensor:
    """Return the shard of a parameter that a session holds in shards; any other parameter itself."""
    found = _shards.get(parameter) if len(_shards) else None
    shard = None if found is None else found()
    return parameter if shard is None else shard


def whole_of(parameter: Tensor) -> Tensor:
    """Return the DTensor parameter of a shard, which optimizers know; any other parameter itself."""
    return parameter.whole if isinstance(parameter, Shard) else parameter


@torch.no_grad()
def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """Return the modules for which FSDP2 gathers parameters."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return (
        [] if fsdp is None else [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]
    )
