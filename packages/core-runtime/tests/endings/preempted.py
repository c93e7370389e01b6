"""A user's script that saves when its job is asked to end: `preempted.py HOW FOLDER`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import hocket
from hocket.session.save import save_point
from hocket.training.startup import defer_dynamo
from hocket.transport.host import HostStatus

_READY_STEP = 3


def main(how: str, folder: Path) -> None:
    peer = hocket.join()
    (Path(os.environ["PIDS"]) / str(os.getpid())).write_text(str(peer.rank))
    if how in ("deaf", "slow"):
        save_point._PATIENCE_S = 2.0
    if how == "deaf" and peer.rank == 1:
        HostStatus.is_asked_to_end = lambda self: False  # type: ignore[method-assign]
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    recipe = "local" if how in ("alone", "deaf", "slow", "last step") else "sgd"
    with hocket.attach(model, optimizer, recipe) as session:
        session.save_on_signal(folder / "saved")
        batches: Iterable[int] = iter(range(_READY_STEP) if how == "last step" else iter(int, 1))
        if how == "workers":
            batches = DataLoader(Batches(), num_workers=2, batch_size=None)
        given = batches if how == "own loop" else session.data(batches, same_batches=True)
        for number, _ in enumerate(given, 1):
            pause(how, peer.rank, session.step, folder / "ready")
            with session.accumulate() if how == "accumulate" and number % 4 else nullcontext():
                model(torch.ones(3, 4)).sum().backward()
            if how != "accumulate" or number % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
            if session.step == _READY_STEP and how != "slow":
                (folder / "ready" / str(peer.rank)).touch()
        point = session.inner.save_point
        if how == "last step" and peer.rank == 1 and isinstance(point, save_point.SavePoint):
            wait_for(lambda: point.asked)


class Batches(Dataset[int]):
    """More than are ever read."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> int:
        return index


def pause(how: str, rank: int, step: int, ready: Path) -> None:
    """Let ranks be in different places when they are asked: one computes for long, the others wait for it."""
    if how == "waiting" and rank == 1 and step > _READY_STEP:
        time.sleep(1.0)
    elif how == "slow" and step == _READY_STEP:
        (ready / str(rank)).touch()
        while True:  # the step is over when the job is
            time.sleep(1.0)
    else:
        time.sleep(0.005)


def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.01)


if __name__ == "__main__":
    defer_dynamo()
    main(sys.argv[1], Path(sys.argv[2]))
