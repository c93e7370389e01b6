"""One rank of the job of `test_ddp.py`: trains with each hook, and writes what DDP made of the gradients."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    fp16_compress_hook,
)
from torch.nn.parallel import DistributedDataParallel

from hocket.compressor import (
    BFloat16,
    Compressor,
    CompressorTraits,
    ErrorFeedback,
    Float16,
    Identity,
    Message,
    SharedRandom,
    State,
    TopK,
    largest,
    pack_sparse,
)
from hocket.compressor.ddp import ddp_comm_hook
from hocket.segment.segment import Segment

STEPS = 4
SHAPES = ((4, 16), (16,), (80,))
NUMEL = 160


@dataclass(frozen=True)
class Positive(TopK):
    """Sends what is positive: messages of other lengths on each rank."""

    @property
    def traits(self) -> CompressorTraits:
        return replace(super().traits, equal_sizes=False)

    def compress(self, segment: Segment, state: State, round: int) -> Message:
        indices, values = largest(segment.outgoing, segment.numel)
        return Message(pack_sparse(segment, values[values > 0], indices[values > 0]), segment, round)


CASES: dict[str, Compressor] = {
    "none": Identity(),
    "all": TopK(1.0),
    "topk": ErrorFeedback(TopK(0.1)),
    "shared_random": ErrorFeedback(SharedRandom(0.25)),
    "fp16": Float16(),
    "bf16": BFloat16(),
    "positive": Positive(1.0),
}


#: Torch's own hooks, by the compressor that does the same.
OF_TORCH: dict[str, Callable[..., Any]] = {
    "none": allreduce_hook,
    "fp16": fp16_compress_hook,
}


def own_gradients(rank: int, step: int) -> list[Tensor]:
    """Return a rank's gradients, which are what they are wherever the parameters are."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


class Linear(nn.Module):
    """Returns the sum of the parameters times what it is given: the parameters' gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(shape) for shape in SHAPES)

    def forward(self, gradients: list[Tensor]) -> Tensor:
        total: Tensor = sum((w * g).sum() for w, g in zip(self.weights, gradients, strict=True))
        return total


def train(hook: Callable[..., Any], rank: int, bucket_cap_mb: float) -> Tensor:
    """Return what DDP put into the gradients, [steps, numel]."""
    model = DistributedDataParallel(Linear(), bucket_cap_mb=bucket_cap_mb)
    model.register_comm_hook(None, hook)
    steps = []
    for step in range(STEPS):
        model.zero_grad()
        model(own_gradients(rank, step)).backward()
        steps.append(torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]))
    return torch.stack(steps)


def main(rank: int, store: str, results: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    got = {name: train(ddp_comm_hook(compressor), rank, 25) for name, compressor in CASES.items()}
    got |= {f"torch {name}": train(hook, rank, 25) for name, hook in OF_TORCH.items()}
    # A bucket for each parameter but the first step's, which are cut in another way.
    got["many buckets"] = train(ddp_comm_hook(Identity()), rank, 1e-4)
    torch.save(got, results)
    dist.destroy_process_group()
    # DDP keeps Gloo's threads beyond its group. One of them may drop a hook's Python objects while the interpreter
    # ends, which aborts the process (pytorch/pytorch#179291): it ends without that.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
