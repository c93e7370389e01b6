"""MuLoCo, whole: a run of `hocket run` against replicas with Muon and AdamW, and the NumPy loop between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from oracle import Family, Vector, trained
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy

from hocket.cli.ranking import run_virtual
from hocket.task import Digits
from hocket.task.loading import loader
from hocket.training.run import load_run

RANKS, STEPS, EVERY, BATCH = 2, 8, 3, 16


class Replica:
    """A model with the recipe's optimizers, that trains on what a rank reads."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(0)
        self.model: Any = Digits().model()
        matrices = [p for name, p in self.model.named_parameters() if name == "1.weight"]
        others = [p for name, p in self.model.named_parameters() if name != "1.weight"]
        self.optimizers = [
            torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1),
            torch.optim.AdamW(others, lr=4e-4, weight_decay=0.1),
        ]
        # The ranks' batches are what one rank reads in batches as long as all of theirs, cut in a row.
        whole = loader(Digits().data(0).train, RANKS * BATCH, seed=0)
        self.batches = [
            [part[rank * BATCH : (rank + 1) * BATCH] for part in batch]
            for batch, _ in zip(whole, range(STEPS), strict=False)
        ]

    def step(self, number: int, values: np.ndarray) -> np.ndarray:
        nn.utils.vector_to_parameters(torch.from_numpy(values).float(), self.model.parameters())
        inputs, target = self.batches[number - 1]
        self.model.zero_grad()
        cross_entropy(self.model(inputs), target).backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return nn.utils.parameters_to_vector(self.model.parameters()).detach().double().numpy()


def test_a_run_of_the_recipe_is_the_loop_by_hand(tmp_path: Path) -> None:
    replicas = [Replica(rank) for rank in range(RANKS)]

    def inner_step(step: int, theta: dict[str, Vector]) -> None:
        for rank, replica in enumerate(replicas):
            theta["all"][rank] = replica.step(step, theta["all"][rank])

    begun = nn.utils.parameters_to_vector(replicas[0].model.parameters()).detach().double().numpy()
    family = Family(EVERY, lr=0.8, momentum=0.9, nesterov=True)
    _, phi = trained(family, {"all": np.stack([begun] * RANKS)}, STEPS, inner_step)
    run = load_run(
        "diloco.muloco",
        [f"ranks={RANKS}", f"steps={STEPS}", f"batch_size={BATCH}", f"parameters.0.every={EVERY}"],
    )
    run_virtual(run, tmp_path)
    given = load_file(tmp_path / "model.safetensors")
    names = [name for name, _ in replicas[0].model.named_parameters()]
    ended = torch.cat([given[name].reshape(-1) for name in names]).double().numpy()
    assert np.abs(phi[-1]["all"] - begun).max() > 0.01
    np.testing.assert_allclose(ended, phi[-1]["all"], rtol=1e-4, atol=1e-5)
