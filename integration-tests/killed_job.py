"""A rank of a job, of which test_killed_jobs.py kills one: `killed_job.py FOLDER STRATEGY`.

It goes on from the newest checkpoint in FOLDER, if there is one, and leaves there each rank's parameters in the end.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

import hocket
from hocket.checkpoint.folder import complete
from hocket.training.startup import defer_dynamo

RANKS = 4
STEPS, SAVE_EVERY = 40, 3

#: What moves by shared memory, by messages, with residuals, and with push-sum's weights, one step late.
STRATEGIES: dict[str, dict[str, Any]] = {
    "agd": {"recipe": "agd"},
    "dpsgd": {"recipe": "dpsgd"},
    "feedback": {"gradients": [{"collective": "sparse_allreduce", "compressor": {
        "name": "error_feedback", "compressor": {"name": "topk", "density": 0.01}}}]},
    "push_sum": {"parameters": [{"collective": {"name": "gossip", "push_sum": True},
        "topology": "irregular_directed", "delay": 1}]},
}  # fmt: skip


def trained(strategy: str, folder: Path | None) -> NDArray[np.float64]:
    """Train on this rank; return its parameters.

    Args:
        folder: of checkpoints, to go on from and to save into; None for none.
    """
    torch.manual_seed(7)
    # One layer of 1.4 MB, which ranks of a host exchange in the memory that they share, and small ones.
    model = nn.Sequential(nn.Linear(300, 600), nn.Tanh(), nn.Linear(600, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with hocket.attach(model, optimizer, STRATEGIES[strategy]) as session:
        if folder is not None and complete(folder):
            session.load(folder)
        for x in session.data(batches(session.rank)):
            optimizer.zero_grad()
            F.mse_loss(model(x), x[:, :2]).backward()
            optimizer.step()
            if folder is not None and session.step % SAVE_EVERY == 0:
                (folder.parent / f"told-{session.save(folder, keep=2).name}").touch()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy()


def batches(rank: int) -> list[torch.Tensor]:
    """Return a rank's batches; odd ranks have one less."""
    generator = torch.Generator().manual_seed(rank)
    count = STEPS - rank % 2
    return [torch.randn(3, 300, generator=generator, dtype=torch.float64) for _ in range(count)]


def _main(folder: Path, strategy: str) -> None:
    defer_dynamo()
    torch.set_num_threads(1)
    peer = hocket.join()
    (folder / f"joined-{peer.rank}").touch()
    np.save(folder / f"{peer.rank}.npy", trained(strategy, folder / "checkpoints"))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2])
