"""A script that goes on from its last checkpoint: `restarted.py FOLDER KILL`; rank 1 of the first attempt is killed."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hocket
from hocket.training.startup import defer_dynamo

_SAVED_EVERY, _KILLED_AT, _EPOCHS = 3, 8, 2


def main(folder: Path, kill: bool) -> None:
    torch.manual_seed(1)
    samples: Any = [(torch.randn(5), torch.randn(2)) for _ in range(48)]
    model = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.2), nn.Linear(7, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    checkpoints = folder / "checkpoints"
    first_attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    with hocket.attach(model, optimizer, "agd") as session:
        loader = hocket.loader(samples, 4)
        begin = session.load(checkpoints, missing="start").epoch
        for _ in range(begin, _EPOCHS):
            for x, y in session.data(loader):
                optimizer.zero_grad()
                (model(x) - y).square().mean().backward()
                optimizer.step()
                if session.step % _SAVED_EVERY == 0:
                    session.save(checkpoints)
                if kill and first_attempt and session.step == _KILLED_AT and session.rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
        torch.save(
            [session.step, *(p.detach().clone() for p in model.parameters())], folder / f"{session.rank}.pt"
        )


if __name__ == "__main__":
    defer_dynamo()
    main(Path(sys.argv[1]), kill=sys.argv[2] == "kill")
