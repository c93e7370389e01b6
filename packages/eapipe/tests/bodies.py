"""The work of ranks in these tests, on virtual ranks and under mpiexec: functions of a peer, by name."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import hocket
from hocket.transport.peer import Peer
from hocket_eapipe import Balance, Pipeline, Policy


class Convnet(nn.Sequential):
    """Convolutions with BatchNorm and dropout, an in-place activation at the beginning of what may be a stage."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.Conv2d(4, 4, 3, stride=2, padding=1),
            nn.ReLU(inplace=True),
            nn.Dropout(0.2),
            nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True)),
            nn.Flatten(),
            nn.Linear(6 * 4 * 4, 10),
            nn.Dropout(0.1),
            nn.Linear(10, 3),
        )


def image_batch(t: int, samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(t)
    return torch.randn(samples, 1, 8, 8, generator=generator), torch.randint(
        0, 3, (samples,), generator=generator
    )


def digest(tensors: dict[str, Tensor]) -> str:
    """Return what is the same for the same bits under the same names."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode() + tensors[name].detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def train_convnet(
    peer: Peer, policy: str, stages: int, count: int, micro_batches: int = 1
) -> tuple[str, list[float]]:
    """Train on batches of changing sizes; return the model's bits, and the losses that this rank was told."""
    torch.set_num_threads(1)
    torch.manual_seed(7)
    model = Convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, count)
    losses = []
    engine = Pipeline(
        stages=stages, policy=Policy(policy), micro_batches=micro_batches, balance=Balance.LAYERS, alpha=0.4
    )
    with hocket.attach(model, optimizer, {}, engine=engine, peer=peer) as session:
        for t in range(1, count + 1):
            result = session.train_batch(image_batch(t, 2 + t % 5), cross_entropy)
            scheduler.step()
            if result is not None:
                losses.append(float(result.loss))
    return digest(dict(model.state_dict())), losses


def train_mesh(
    peer: Peer, pipelines: int, strategy: Any, policy: str, stages: int, count: int
) -> tuple[str, list[float]]:
    """Train pipelines next to each other; return the bits of the consensus, and this rank's losses."""
    torch.set_num_threads(1)
    torch.manual_seed(peer.rank)
    model = nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
    )
    torch.manual_seed(3)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    engine = Pipeline(stages=stages, pipelines=pipelines, policy=Policy(policy))
    with hocket.attach(model, optimizer, strategy, engine=engine, peer=peer) as session:
        for t in range(1, count + 1):
            generator = torch.Generator().manual_seed(100 * session.data_rank + t)
            batch = torch.randn(4, 6, generator=generator), torch.randint(0, 3, (4,), generator=generator)
            result = session.train_batch(batch, cross_entropy)
            if result is not None:
                losses.append(float(result.loss))
        with session.consensus():
            found = digest(dict(model.state_dict()))
    return found, losses


class Nested(nn.Module):
    """Passes on tuples, lists and dictionaries, with numbers, integers, booleans and an empty tensor among them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            value = {"x": value, "rest": [value.argmax(1), ("text", 3), value > 0]}
        x = value["x"]
        mask = value["rest"][2]
        out = torch.tanh(self.linear(x)) * mask[:, :1] + x
        more = {
            "x": out,
            "rest": [value["rest"][0], ("text", value["rest"][1][1] + 1), ~mask, x.new_empty(0, 4)],
        }
        # A second tensor with a gradient, of another dtype and without samples' axis, at every other stage.
        if value["rest"][1][1] % 2:
            more["scale"] = (out.mean().to(torch.bfloat16), out.double().sum(0))
        return more


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, value: Any) -> Tensor:
        logits: Tensor = self.linear(value["x"])
        if "scale" in value:
            logits = logits * (1 + value["scale"][0].float()) + value["scale"][1].float().sum() * 0.01
        return logits


def train_shapes(peer: Peer, stages: int, count: int) -> tuple[str, list[float]]:
    """Pass nested values on whose shapes change from batch to batch."""
    torch.set_num_threads(1)
    torch.manual_seed(11)
    model = nn.Sequential(Nested(), Nested(), Nested(), Head())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    engine = Pipeline(stages=stages, policy=Policy.STASHING, balance=Balance.LAYERS)
    with hocket.attach(model, optimizer, {}, engine=engine, peer=peer) as session:
        for t in range(1, count + 1):
            generator = torch.Generator().manual_seed(t)
            samples = 1 + t % 4
            inputs = torch.randn(samples, 6, generator=generator)
            target = torch.randint(0, 3, (samples,), generator=generator)
            result = session.train_batch((inputs, target), cross_entropy)
            if result is not None:
                losses.append(float(result.loss))
    return digest(dict(model.state_dict())), losses
