"""A loop of Accelerate's whose ranks communicate by Hocket, as by its LocalSGD.

    pip install hocket-transformers
    hocket launch -n 4 accelerate_loop.py --strategy sgp

Processes, devices, precision, the shares of the samples, accumulation and `gather` of metrics are Accelerate's as
before; `exchanging` says how the ranks communicate.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hocket_transformers import exchanging


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strategy", default="agd")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of the strategy")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()

    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    torch.manual_seed(0)
    inputs = torch.randn(2048, 20)
    data = TensorDataset(inputs, inputs[:, :4].argmax(1))
    net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
    model, optimizer, loader = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), DataLoader(data, 32, shuffle=True)
    )
    with exchanging(accelerator, model, optimizer, options.strategy, *options.overrides):
        for epoch in range(options.epochs):
            for x, y in loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
            losses = accelerator.gather(loss.detach().reshape(1))
            accelerator.print(
                f"epoch {epoch + 1}: loss {losses.mean():.3f}, mean of {len(losses)} last batches"
            )
    with torch.no_grad():
        accuracy = (net(inputs).argmax(1) == data.tensors[1]).float().mean().item()
    accelerator.print(f"{options.strategy}: accuracy {100 * accuracy:.1f} %")


if __name__ == "__main__":
    main()
