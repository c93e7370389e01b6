"""Ranks that give their number to `init_process_group` alone, as torch's tutorials do: grouped.py FOLDER INIT."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import torch
from torch import distributed, multiprocessing

import hocket


def train(rank: int, port: int, folder: str, init: str) -> None:
    if init == "env":
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    methods = {"env": None, "tcp": f"tcp://127.0.0.1:{port}", "file": f"file://{folder}/store"}
    distributed.init_process_group("gloo", methods[init], rank=rank, world_size=2)
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with hocket.attach(model, optimizer, "sgd") as session:
            model(torch.randn(3, 4)).sum().backward()
            optimizer.step()
            Path(folder, str(session.rank)).write_text(f"{session.size} {model.weight.tolist()}")
    except hocket.errors.UserError as error:
        print(error)
    distributed.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    multiprocessing.spawn(train, args=(free, *sys.argv[1:]), nprocs=2)  # type: ignore[attr-defined,no-untyped-call]
