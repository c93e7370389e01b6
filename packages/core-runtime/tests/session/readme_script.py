"""The script of README.md, completed: what each rank has read and computed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import hocket
from hocket.transport.peer import Peer

README = Path(__file__).parents[4] / "README.md"


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Remembers which samples were read."""

    def __init__(self, num: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(num, 5, generator=generator, dtype=torch.float64)
        self.y = torch.randint(0, 3, (num,), generator=generator)
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.read.append(index)
        return self.x[index], self.y[index]


def run(peer: Peer, num: int, global_batch: int, strategy: list[str]) -> dict[str, Any]:
    """Run the script with another strategy and batch size; return samples read, and each step's losses and weights."""
    lines = README.read_text().split("```diff\n", 1)[1].split("```", 1)[0].splitlines()
    script = "\n".join(line[1:] for line in lines if not line.startswith("-"))
    script = script.replace("dataset, 32)", f"dataset, {global_batch // peer.size})")
    composed = f"hocket.compose({json.dumps(strategy)[1:-1]})"
    script = re.sub(r"hocket\.compose\(.*\)", composed, script)
    assert f"{global_batch // peer.size})" in script
    assert composed in script
    torch.manual_seed(peer.rank)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    losses: list[tuple[float, float]] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        value = nn.functional.cross_entropy(output, target)
        losses.append((value.item(), variables["session"].weight))
        return value

    variables: dict[str, Any] = {
        "hocket": hocket,
        "dataset": Samples(num),
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "loss": loss,
    }
    # Every rank begins as rank 0 does, whichever model it has made.
    exec(script, variables)
    # The loader first reads one sample twice, to compare it between ranks.
    compared = 2 if peer.size > 1 else 0
    return {
        "read": variables["dataset"].read[compared:],
        "losses": losses,
        "parameters": [value for p in model.parameters() for value in p.detach().reshape(-1).tolist()],
    }
