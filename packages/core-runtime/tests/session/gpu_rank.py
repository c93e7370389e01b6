"""A rank that trains on a GPU that it shares with others, where a wait for the device is an error: see test_gpu.py.

hocket launch -n 2 --transport torch gpu_rank.py DEVICE FOLDER STRATEGY [STRATEGY ...]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import hocket

STEPS = 5


def train(strategy: str, device: torch.device) -> list[float]:
    """Return the parameters after `STEPS` steps, of which none but the first may wait for the device.

    Raises:
        RuntimeError: one did.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    recipe, *overrides = strategy.split(",")
    with hocket.attach(model, optimizer, hocket.compose(recipe, *overrides)) as session:
        batches: Tensor = torch.randn(STEPS, 4, 5, generator=torch.Generator().manual_seed(session.rank))
        try:
            for step, batch in enumerate(batches.to(device)):
                if device.type == "cuda" and step:
                    torch.cuda.set_sync_debug_mode("error")
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        session.settle()
    return [each for p in model.parameters() for each in p.detach().cpu().flatten().tolist()]


def main() -> None:
    device, folder, *strategies = sys.argv[1:]
    torch.backends.cuda.matmul.allow_tf32 = False
    pairs = {name: [train(name, torch.device(where)) for where in (device, "cpu")] for name in strategies}
    Path(folder, f"{hocket.join().rank}.json").write_text(json.dumps(pairs))


if __name__ == "__main__":
    main()
