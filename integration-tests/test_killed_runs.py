"""Seeded runs with delays, reordered messages and a rank that dies: none hangs, and none trains wrongly.

Each run draws a strategy, 2 to 8 ranks, what its messages suffer, and when one rank dies: at any use of the transport,
so also while it attaches, within a checkpoint or in closing. Survivors name the dead rank. A run without faults
continues from the newest complete checkpoint, and ends with the bits of one that nothing has befallen.

HOCKET_KILLED_RUNS says how many; 2,000 take some minutes.
"""

from __future__ import annotations

import os
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hocket
from hocket.checkpoint.folder import latest_complete
from hocket.errors import CheckpointError, PeerLostError
from hocket.transport.faults import Faults, KillAt

STEPS, SAVE_EVERY = 6, 2
NUM_RUNS = int(os.environ.get("HOCKET_KILLED_RUNS", "200"))
PER_TEST = 50

GROUP, LEADERS = {"name": "group", "size": 2}, {"name": "leaders", "size": 2}
FEEDBACK = {"name": "error_feedback", "compressor": {"name": "topk", "density": 0.1}}
STRATEGIES: dict[str, dict[str, Any]] = {
    "sgd": {"recipe": "sgd"},
    "agd": {"recipe": "agd"},
    "dpsgd": {"recipe": "dpsgd"},
    "overlap_sgp": {"recipe": "overlap_sgp"},
    "forward": {"recipe": "sgp", "strategy": {"parameters": [
        {"collective": "gossip", "topology": "random_matching", "segments": "layers", "overlap": "forward"}]}},
    "push_sum": {"parameters": [
        {"collective": {"name": "gossip", "push_sum": True}, "topology": "irregular_directed"}]},
    "residuals": {"gradients": [
        {"collective": "sparse_allreduce", "compressor": {"name": "momentum_correction", "compressor": FEEDBACK}}]},
    "groups": {
        "gradients": [{"collective": "allreduce", "over": GROUP}],
        "parameters": [
            {"collective": "gossip", "over": LEADERS, "topology": "exponential"},
            {"collective": "broadcast", "over": GROUP}]},
    "phases": {"recipe": "sgd", "phases": {3: {"gradients": [], "parameters": [
        {"collective": "gossip", "topology": "ring"}]}}},
    "schedules": {"gradients": [{"collective": {"name": "allreduce", "algorithm": "recursive_doubling"}}]},
}  # fmt: skip


def trained(strategy: str, folder: Path | None, resumes: bool = False) -> torch.Tensor:
    """Train on this rank; return its parameters."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with hocket.attach(model, optimizer, STRATEGIES[strategy]) as session:
        if resumes:
            assert folder is not None
            session.load(folder)
        for step in range(session.step, STEPS):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * step + session.rank))
            optimizer.zero_grad()
            F.mse_loss(model(x), x[:, :2]).backward()
            optimizer.step()
            if folder is not None and session.step % SAVE_EVERY == 0 and session.step < STEPS and not resumes:
                session.save(folder, keep=2)
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@cache
def undisturbed(strategy: str, size: int) -> list[torch.Tensor]:
    return hocket.virtual(size).run(trained, strategy, None)


def befallen(seed: int, folder: Path) -> tuple[str, int, int, list[Any]]:
    """Run once with faults; return the strategy, the rank that was to die, how many ranks did, and what each told."""
    drawn = random.Random(seed)
    strategy = drawn.choice(sorted(STRATEGIES))
    size = drawn.randint(2, 8)
    victim = drawn.randrange(size)
    kill = KillAt(victim, step=drawn.randint(0, STEPS), call=int(drawn.expovariate(1 / 12)))
    faults = Faults(
        seed=seed, delay_s=(0.0, drawn.choice([0.0, 1e-4, 1e-2])), reorder=drawn.random() / 2, kill=kill
    )
    world = hocket.virtual(size, seed=seed, wrap=faults.wrap)

    def of_rank() -> torch.Tensor | PeerLostError:
        try:
            return trained(strategy, folder)
        except PeerLostError as error:
            return error

    told = world.run(of_rank)
    return strategy, victim, len(world.killed), told


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(0, NUM_RUNS, PER_TEST))
def test_runs_in_which_a_rank_dies(first: int, tmp_path: Path) -> None:
    deaths = resumed = 0
    for seed in range(first, min(first + PER_TEST, NUM_RUNS)):
        folder = tmp_path / str(seed)
        strategy, victim, num_killed, told = befallen(seed, folder)
        what = f"seed {seed}: {strategy} on {len(told)} ranks, of which rank {victim} was to die"
        deaths += num_killed
        expected = undisturbed(strategy, len(told))
        for rank, ended in enumerate(told):
            if isinstance(ended, PeerLostError):
                assert num_killed, what
                assert f"rank {victim} " in str(ended), f"{what}: rank {rank} says: {ended}"
            elif ended is not None:
                assert torch.equal(ended, expected[rank]), f"{what}: rank {rank} trained wrongly"
            else:
                assert (rank, num_killed) == (victim, 1), f"{what}: rank {rank} told nothing"
        if not num_killed:
            assert not any(isinstance(ended, PeerLostError) for ended in told), what
            continue
        try:
            latest_complete(folder)
        except CheckpointError:
            continue
        resumed += 1
        again = hocket.virtual(len(told)).run(trained, strategy, folder, True)
        for rank, (ended, wanted) in enumerate(zip(again, expected, strict=True)):
            assert torch.equal(ended, wanted), f"{what}: rank {rank}, resumed, ended elsewhere"
    # A kill that comes too late leaves a run whole, and one that comes early leaves no checkpoint; many do neither.
    assert deaths > PER_TEST // 4
    assert resumed > PER_TEST // 10
