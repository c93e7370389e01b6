"""Train by Ray: `python ray_train.py --strategy diloco parameters.0.every=10`.

Do not call `ray.train.torch.prepare_model`, which wraps the model in DistributedDataParallel, or `prepare_data_loader`.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import ray.train
import torch
from ray.train.torch import TorchTrainer
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import hocket

FEATURES, CLASSES = 20, 4


def samples(count: int) -> TensorDataset:
    """Return points in a cloud around the center of their class."""
    generator = torch.Generator().manual_seed(0)
    centers = 2 * torch.randn(CLASSES, FEATURES, generator=generator)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    return TensorDataset(centers[labels] + torch.randn(count, FEATURES, generator=generator), labels)


def train(config: dict[str, Any]) -> None:
    """Train on one worker of Ray's."""
    model = torch.nn.Linear(FEATURES, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = hocket.loader(samples(2048), 32)
    with hocket.attach(model, optimizer, hocket.compose(*config["strategy"])) as session:
        # A worker that Ray has started again goes on where it was, if the folder outlives it.
        first = 0 if config["out"] is None else session.load(config["out"], missing="start").epoch
        for _ in range(first, config["epochs"]):
            for x, y in session.data(loader):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
            if config["out"] is not None:
                session.save(config["out"], keep=1)
            # All workers report, as Ray asks; rank 0 alone has a checkpoint, of the replicas' mean.
            with session.consensus(), tempfile.TemporaryDirectory() as folder:
                checkpoint = None
                if session.is_main:
                    torch.save(model.state_dict(), f"{folder}/model.pt")
                    checkpoint = ray.train.Checkpoint.from_directory(folder)
                ray.train.report({"loss": loss.item(), "step": session.step}, checkpoint=checkpoint)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", nargs="+", default=["diloco"], help="a recipe and overrides")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--out", help="a folder that all workers share, for their checkpoints")
    options = parser.parse_args()

    config = {"strategy": options.strategy, "epochs": options.epochs, "out": options.out}
    failures = ray.train.FailureConfig(max_failures=0 if options.out is None else 1)
    result = TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=ray.train.ScalingConfig(num_workers=options.workers),
        run_config=ray.train.RunConfig(failure_config=failures),
    ).fit()
    print(f"loss {result.metrics['loss']:.4f} after {result.metrics['step']} steps")


if __name__ == "__main__":
    main()
