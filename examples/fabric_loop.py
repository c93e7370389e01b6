"""A loop of Lightning Fabric's whose ranks communicate by Hocket, by the Strategy of hocket-lightning.

    pip install lightning
    hocket launch -n 4 fabric_loop.py --strategy diloco parameters.0.every=10

Fabric keeps what is its own: device and precision, `fabric.backward`, loggers, callbacks. `session.save` keeps all that
training goes on from, of every rank; `fabric.save` keeps the replicas' mean for others to read. Hocket starts the
ranks, makes replicas equal, shares out samples (`hocket.loader`) and exchanges in `backward` and `step`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import hocket
from hocket_lightning.fabric import HocketStrategy


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strategy", default="agd")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of the strategy")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument(
        "--out", type=Path, help="a folder for checkpoints; the same command goes on from there"
    )
    options = parser.parse_args()

    fabric = Fabric(accelerator="cpu", strategy=HocketStrategy(options.strategy, *options.overrides))
    fabric.launch()
    torch.manual_seed(0)
    inputs = torch.randn(2048, 20)
    data = TensorDataset(inputs, inputs[:, :4].argmax(1))
    net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    session = fabric.strategy.session
    loader = hocket.loader(data, 32, shuffle=True)
    first = 0
    if options.out is not None and options.out.exists():
        first = session.load(options.out).epoch
    for epoch in range(first, options.epochs):
        for x, y in session.data(loader):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            fabric.backward(loss)
            optimizer.step()
        mean = fabric.all_reduce(loss.detach())
        fabric.print(f"epoch {epoch + 1}: loss {mean:.3f}, mean of {fabric.world_size} ranks' last batches")
        if options.out is not None:
            session.save(options.out, keep=1)
    with session.consensus(), torch.no_grad():
        accuracy = (model(inputs).argmax(1) == data.tensors[1]).float().mean().item()
        if options.out is not None:
            fabric.save(options.out / "model.pt", {"model": model})  # rank 0 writes
    fabric.print(f"{options.strategy}: accuracy {100 * accuracy:.1f} %")
    session.close()


if __name__ == "__main__":
    main()
