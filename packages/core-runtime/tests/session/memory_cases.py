"""A body for real ranks: the memory that a session takes, as the system counts it, and as a plan does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import hocket
from hocket.plan.plan import plan
from hocket.transport.host import SMALLEST_BYTES
from hocket.transport.network import NetworkModel
from hocket.transport.peer import Peer

WIDTH, LAYERS, STEPS = 1024, 8, 6


def used_bytes() -> int:
    """Return this process's share of the memory that processes have."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def added_and_planned(peer: Peer, exchanges: dict[str, Any]) -> tuple[int, int]:
    """Return the most that was added before or after a step of the optimizer, and gradients and buffers as planned."""
    torch.set_num_threads(1)
    strategy = hocket.compose(exchanges)
    added = 0
    for _ in range(2):  # the first session loads and compiles what both need
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        before, added = used_bytes(), 0
        with hocket.attach(model, optimizer, strategy, peer=peer):
            for _ in range(STEPS):
                optimizer.zero_grad()
                model(torch.ones(2, WIDTH)).square().mean().backward()
                added = max(added, used_bytes() - before)
                optimizer.step()
                added = max(added, used_bytes() - before)
    planned = plan(strategy, model, peer.size, NetworkModel(), shared_bytes=SMALLEST_BYTES)
    return added, planned.memory_bytes + (0 if strategy.gradients else planned.model_bytes)
