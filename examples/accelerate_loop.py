"""A loop of Accelerate's whose ranks communicate by Hocket.

    pip install accelerate
    hocket launch -n 4 --transport torch accelerate_loop.py --strategy sgp

Accelerate has no place for another communicator, and would wrap the model in DDP, which Hocket refuses. So the model is
not prepared: `accelerator.prepare` gets the optimizer alone, and `accelerator.autocast()` is around the forward.
Processes, devices, precision and `gather` of metrics are Accelerate's as before.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import hocket


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
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    strategy = hocket.compose(options.strategy, *options.overrides)
    with hocket.attach(model, optimizer, strategy) as session:
        stepping = accelerator.prepare(optimizer)
        loader = hocket.loader(data, 32, shuffle=True)
        for epoch in range(options.epochs):
            for x, y in session.data(loader):
                stepping.zero_grad()
                with accelerator.autocast():
                    loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                stepping.step()
            losses = accelerator.gather(loss.detach())
            accelerator.print(
                f"epoch {epoch + 1}: loss {losses.mean():.3f}, mean of {len(losses)} last batches"
            )
        with session.consensus(), torch.no_grad():
            accuracy = (model(inputs).argmax(1) == data.tensors[1]).float().mean().item()
        accelerator.print(f"{options.strategy}: accuracy {100 * accuracy:.1f} %")


if __name__ == "__main__":
    main()
