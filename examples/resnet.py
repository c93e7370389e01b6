"""Train a small ResNet on Fashion-MNIST with AdamW, and go on after an interruption.

    hocket launch -n 4 resnet.py --strategy agd --out runs/resnet
    hocket launch -n 4 resnet.py --strategy diloco parameters.0.every=10 parameters.0.buffers=mean

Images: those of Debian's package dataset-fashion-mnist, or a folder as torchvision has them, by --data.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset

import hocket
from hocket_tasks.fashion_mnist import FashionMNIST


class Block(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut."""

    def __init__(self, given: int, wide: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(given, wide, 3, stride, 1, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU(),
            nn.Conv2d(wide, wide, 3, 1, 1, bias=False),
            nn.BatchNorm2d(wide),
        )
        same = given == wide and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(given, wide, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.path(x) + self.shortcut(x))


def resnet(width: int) -> nn.Module:
    stages = (
        Block(given, wide, 2) for given, wide in ((width, width), (width, 2 * width), (2 * width, 4 * width))
    )
    stem = nn.Conv2d(1, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
    return nn.Sequential(*stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))


@torch.no_grad()
def accuracy(model: nn.Module, loader: DataLoader[tuple[Tensor, Tensor]]) -> float:
    model.eval()
    right = total = 0
    for x, y in loader:
        right += int((model(x).argmax(1) == y).sum())
        total += len(y)
    model.train()
    return right / total


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default=FashionMNIST().folder)
    parser.add_argument("--strategy", default="agd")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of the strategy")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--samples", type=int, help="take so many only")
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument(
        "--out", type=Path, help="a folder for checkpoints; the same command goes on from there"
    )
    options = parser.parse_args()

    torch.manual_seed(0)
    data = FashionMNIST(folder=options.data, train_samples=options.samples).data(seed=0)
    held_out = Subset(data.valid, range(2_000))
    model = resnet(options.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    loader = hocket.loader(data.train, 32, shuffle=True)
    strategy = hocket.compose(options.strategy, *options.overrides)
    with hocket.attach(model, optimizer, strategy) as session:
        first = 0
        if options.out is not None:
            first = session.load(options.out, missing="start").epoch
        for epoch in range(first, options.epochs):
            for x, y in session.data(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            with (
                session.consensus()
            ):  # each rank evaluates the same model; torchmetrics would share samples out
                reached = accuracy(model, DataLoader(held_out, 500))
            session.print(f"epoch {epoch + 1}: accuracy {100 * reached:.1f} %")
            if options.out is not None:
                session.save(options.out, keep=1)
        megabytes = session.counters.bytes_sent / 1e6
        session.print(f"{options.strategy}: {session.step} steps, each rank sent {megabytes:.1f} MB")


if __name__ == "__main__":
    main()
