"""One rank of the job of `test_ddp.py`: what DistributedDataParallel's hook makes of gradients that are known."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from toys import PLAIN

from hocket.compressor import Compressor
from hocket.compressor.ddp import ddp_comm_hook
from hocket_redsync.asq import Asq
from hocket_redsync.hybrid import Hybrid, Sampled, Trimmed

STEPS, SHAPE = 6, (40, 50)

CASES: dict[str, Compressor] = {
    "all": Trimmed(1.0, **PLAIN),
    "dense": Hybrid(0.01, correct_momentum=False),
    "trimmed": Trimmed(0.05, **PLAIN),
    "sampled": Sampled(0.05, **PLAIN),
    "asq": Asq(0.05, **PLAIN),
}


def own_gradient(rank: int, step: int) -> Tensor:
    """Return a rank's gradient, which is what it is wherever the parameter is."""
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(100 * step + rank))


class Given(nn.Module):
    """A model whose gradient is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SHAPE))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight * gradient).sum()


def main(rank: int, size: int, store: str, result: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    got = {}
    for name, compressor in CASES.items():
        model = Given()
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(None, ddp_comm_hook(compressor))
        steps = []
        for step in range(STEPS):
            model.zero_grad()
            wrapped(own_gradient(rank, step)).backward()
            assert model.weight.grad is not None
            steps.append(model.weight.grad.reshape(-1).clone())
        got[name] = torch.stack(steps)
    torch.save(got, result)
    dist.destroy_process_group()
    # DDP keeps Gloo's threads beyond its group. One of them may drop a hook's Python objects while the interpreter
    # ends, which aborts the process (pytorch/pytorch#179291): it ends without that.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
