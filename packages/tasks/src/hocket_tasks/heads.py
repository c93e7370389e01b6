"""A style of tensor parallelism for torch's own attention: ranks share out its heads.

Shapes: B batch, T length, H hidden units, N heads, of which a rank has N / R.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.nn import functional


class HeadsParallel(ColwiseParallel):
    """The split of an `nn.MultiheadAttention` that attends to its own input, batch first; `out_proj` is split by rows.

    The joint projection to queries, keys and values stays one parameter, as in checkpoints. Each rank holds equal parts
    of its rows, which are those of other heads than the rank's, so that ranks gather what it gives.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.MultiheadAttention)
        for name, whole in [*module.named_parameters(recurse=False)]:
            part = distribute_tensor(whole, device_mesh, [Shard(0)])
            module.register_parameter(name, nn.Parameter(part, requires_grad=whole.requires_grad))
        module.forward = partial(_attend, module, device_mesh)  # type: ignore[method-assign]
        return module


def _attend(
    own: nn.MultiheadAttention,
    mesh: DeviceMesh,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    **options: object,
) -> tuple[Tensor, None]:
    """Return what the heads of all ranks give together, [B, T, H]; takes the place of the module's `forward`."""
    batch, length, hidden = query.shape
    states = DTensor.from_local(query, mesh, [Replicate()], run_check=False)
    rows: Any = functional.linear(states, own.in_proj_weight, own.in_proj_bias)
    joint = rows.redistribute(placements=[Replicate()])
    by_head = joint.view(batch, length, 3, own.num_heads, hidden // own.num_heads)
    part: Tensor = by_head.redistribute(placements=[Shard(3)]).to_local()
    queries, keys, values = part.permute(2, 0, 3, 1, 4)  # each [B, N / R, T, H / N]
    given = functional.scaled_dot_product_attention(
        queries, keys, values, None if is_causal else attn_mask, is_causal=is_causal
    )
    attended: Tensor = own.out_proj(given.transpose(1, 2).flatten(2))
    return attended, None
