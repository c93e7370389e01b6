"""Ranks that torch.multiprocessing.spawn starts, of which the second fails: python spawned.py RANKS WHERE."""

from __future__ import annotations

import os
import socket
import sys

import torch
from torch import multiprocessing

import hocket


class UnreadableError(Exception):
    """What a data set of the user's raises."""


def train(rank: int, ranks: int, port: int, where: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = hocket.attach(model, optimizer, "sgd")
    if where == "within with":
        with session:
            steps(session, rank, where)
    else:
        steps(session, rank, where)
        session.close()
    fail(where == "after" and rank == 1)
    hocket.attach(model, optimizer, "sgd").close()


def steps(session: hocket.Session, rank: int, where: str) -> None:
    for number in range(6):
        fail(where.startswith("within") and rank == 1 and number == 3)
        session.optimizer.zero_grad()
        session.model(torch.randn(3, 4)).sum().backward()
        session.optimizer.step()
    fail(where == "between" and rank == 1)
    session.consensus()


def fail(now: bool) -> None:
    if now:
        raise UnreadableError("Error(s) in reading:\n\tno record 17")


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    ranks = int(sys.argv[1])
    multiprocessing.spawn(train, args=(ranks, free, sys.argv[2]), nprocs=ranks)  # type: ignore[attr-defined,no-untyped-call]
