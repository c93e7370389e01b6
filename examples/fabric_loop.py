"""A loop of Lightning Fabric's whose ranks communicate by Hocket: a Strategy of Fabric's in some fifty lines.

    pip install lightning-fabric
    hocket launch -n 4 fabric_loop.py --strategy diloco parameters.0.every=10

Fabric keeps what is its own: device and precision, `fabric.backward`, loggers, callbacks. `session.save` keeps all that
training goes on from, of every rank; `fabric.save` within `session.consensus()` keeps the model for others to read.
Hocket starts the ranks, makes replicas equal, shares out samples (`hocket.loader`) and exchanges in `backward` and
`step`. So Fabric starts no ranks: leave `devices` and `num_nodes` at 1.
"""

from __future__ import annotations

import argparse
import pickle
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import hocket


class HocketStrategy(SingleDeviceStrategy):
    """Fabric's strategy for one device a rank, and Hocket's for what ranks tell each other.

    Args:
        strategy, overrides: as `hocket.compose` takes them.
        device: where this rank trains.

    Attributes:
        session: from `fabric.setup(model, optimizer)` on.
    """

    session: hocket.Session

    def __init__(self, strategy: str = "agd", *overrides: str, device: str = "cpu") -> None:
        super().__init__(device=device)
        self._strategy = hocket.compose(strategy, *overrides)
        self._peer = hocket.join()
        self.global_rank, self.world_size = self._peer.rank, self._peer.size
        self.local_rank = self.global_rank  # rank 0 alone prints, of all hosts

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[torch.optim.Optimizer], scheduler: Any = None
    ) -> Any:
        told = super().setup_module_and_optimizers(module, optimizers, scheduler)
        self.session = hocket.attach(module, optimizers, self._strategy, peer=self._peer)
        return told

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self._gather(None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return self._gather(obj if self.global_rank == src else None)[src]

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if group is not None or sync_grads:
            raise ValueError("metrics are gathered among all ranks, and without gradients")
        return torch.stack(self._gather(tensor.detach().cpu())).to(tensor.device)

    def all_reduce(self, tensor: Tensor, group: Any = None, reduce_op: Any = "mean") -> Tensor:
        every = self.all_gather(tensor, group)
        if reduce_op in ("mean", "avg"):
            return every.mean(0)
        if reduce_op in ("sum", torch.distributed.ReduceOp.SUM):
            return every.sum(0)
        raise ValueError(f"reduce_op: got {reduce_op}; allowed: mean, sum")

    def _gather(self, value: Any) -> list[Any]:
        """Return every rank's value: for metrics and decisions; what a step sends is the session's."""
        return [pickle.loads(each) for each in self._peer.allgather_bytes(pickle.dumps(value))]


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
