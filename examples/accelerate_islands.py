"""A loop of Accelerate's whose model is sharded by FSDP2 within islands, between which Hocket exchanges.

    pip install accelerate
    torchrun --nproc-per-node 4 accelerate_islands.py --strategy diloco parameters.0.every=10

Accelerate starts torch's process group, prepares the optimizer, accumulates and gathers. The model is sharded by
`fully_shard` and not prepared, as `prepare` would exchange gradients between islands in every step.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import hocket

RANKS_OF_AN_ISLAND = 2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strategy", default="agd")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of the strategy")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()

    accelerator = Accelerator(cpu=True)
    sizes = (accelerator.num_processes // RANKS_OF_AN_ISLAND, RANKS_OF_AN_ISLAND)
    mesh = init_device_mesh(accelerator.device.type, sizes, mesh_dim_names=("island", "shard"))
    torch.manual_seed(0)
    inputs = torch.randn(2048, 20)
    data = TensorDataset(inputs, inputs[:, :4].argmax(1))
    model = fully_shard(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4)), mesh=mesh["shard"])
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = hocket.loader(data, 32, shuffle=True)
    strategy = hocket.compose(options.strategy, *options.overrides)
    with hocket.attach(model, plain, strategy) as session:
        optimizer = accelerator.prepare(plain)
        for epoch in range(options.epochs):
            for x, y in session.data(loader):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
            losses = accelerator.gather(loss.detach())
            accelerator.print(
                f"epoch {epoch + 1}: loss {losses.mean():.3f}, mean of {len(losses)} last batches"
            )
        with session.consensus(), torch.no_grad():  # all ranks of an island evaluate together
            accuracy = (model(inputs).argmax(1) == data.tensors[1]).float().mean().item()
        accelerator.print(f"{options.strategy}: accuracy {100 * accuracy:.1f} %")


if __name__ == "__main__":
    main()
