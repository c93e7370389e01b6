"""Lightning Fabric's ModelParallelStrategy shards the model by FSDP2 within islands, and Hocket exchanges between them.

    pip install lightning
    torchrun --nproc-per-node 4 fabric_islands.py --strategy diloco parameters.0.every=10

Fabric starts torch's process group and sets up the sharded module; two ranks hold a replica together. The session is
attached to the module itself, after `setup_module` and before `setup_optimizers`.
"""

from __future__ import annotations

import argparse
import os

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import hocket

RANKS_OF_AN_ISLAND = 2


def shard(model: nn.Module, whole: DeviceMesh) -> nn.Module:
    """Shard a model over the ranks of this rank's island, where Fabric's mesh is of all ranks."""
    sizes = (distributed.get_world_size() // RANKS_OF_AN_ISLAND, RANKS_OF_AN_ISLAND)
    mesh = init_device_mesh(whole.device_type, sizes, mesh_dim_names=("island", "shard"))
    return fully_shard(model, mesh=mesh["shard"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strategy", default="agd")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of the strategy")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()

    here, ranks = (int(os.environ[name]) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    fabric = Fabric(
        accelerator="cpu",
        devices=here,
        num_nodes=ranks // here,
        strategy=ModelParallelStrategy(shard, data_parallel_size=ranks, tensor_parallel_size=1),
    )
    fabric.launch()
    torch.manual_seed(0)
    inputs = torch.randn(2048, 20)
    data = TensorDataset(inputs, inputs[:, :4].argmax(1))
    model = fabric.setup_module(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4)))
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = hocket.loader(data, 32, shuffle=True)
    strategy = hocket.compose(options.strategy, *options.overrides)
    with hocket.attach(model.module, plain, strategy) as session:
        optimizer = fabric.setup_optimizers(plain)
        for epoch in range(options.epochs):
            for x, y in session.data(loader):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                fabric.backward(loss)
                optimizer.step()
            mean = fabric.all_reduce(loss.detach())
            fabric.print(f"epoch {epoch + 1}: loss {mean:.3f}, mean of {ranks} ranks' last batches")
        with session.consensus(), torch.no_grad():  # all ranks of an island evaluate together
            accuracy = (model(inputs).argmax(1) == data.tensors[1]).float().mean().item()
        fabric.print(f"{options.strategy}: accuracy {100 * accuracy:.1f} %")


if __name__ == "__main__":
    main()
