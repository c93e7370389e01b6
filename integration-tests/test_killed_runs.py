"""Seeded runs with delays, reordered messages and a rank that dies: none hangs, and none trains wrongly.

Each run draws a strategy, 2 to 8 ranks, what its messages suffer, and when one rank dies: at any use of the transport,
so also while it attaches, within a checkpoint or in closing. Survivors name the dead rank. A run without faults
continues from the newest complete checkpoint, which is none before the last that any rank was told of, and ends with
the bits of one that nothing has befallen.

HOCKET_KILLED_RUNS says how many; 10,000 take some ten minutes on two cores.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hocket
from hocket.checkpoint.folder import newest_first
from hocket.checkpoint.manifest import Manifest
from hocket.errors import CheckpointError, PeerLostError
from hocket.transport.faults import Faults, KillAt

STEPS, SAVE_EVERY = 6, 2
NUM_RUNS = int(os.environ.get("HOCKET_KILLED_RUNS", "20"))
PER_TEST = 50

GROUP, LEADERS = {"name": "group", "size": 2}, {"name": "leaders", "size": 2}
FEEDBACK = {"name": "error_feedback", "compressor": {"name": "topk", "density": 0.1}}
OUTER = {"name": "sgd", "lr": 0.7, "momentum": 0.9, "nesterov": True}
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
    "outer": {"parameters": [{"collective": "allreduce", "every": 2, "outer": OUTER}]},
    "fragments": {"parameters": [
        {"collective": "allreduce", "every": 3, "segments": "layers", "stagger": True, "delay": 1,
         "merge": {"name": "blend", "local": 0.5}, "outer": OUTER}]},
    "pairs": {"parameters": [
        {"collective": "gossip", "topology": "random_matching", "every": 2, "outer": "diloco.noloco"}]},
    "some_elements": {"parameters": [
        {"collective": "allreduce", "compressor": {"name": "shared_random", "density": 0.3}}]},
    "schedules": {"gradients": [{"collective": {"name": "allreduce", "algorithm": "recursive_doubling"}}]},
}  # fmt: skip


def trained(
    strategy: str, folder: Path | None, resumes: bool = False, told: list[int] | None = None
) -> torch.Tensor:
    """Train on this rank, of which odd ones have a batch less; return its parameters.

    Args:
        folder: of checkpoints; None for none.
        resumes: whether to go on from the newest one in place of saving.
        told: is given the step of each checkpoint that `save` has told this rank is complete.
    """
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with hocket.attach(model, optimizer, STRATEGIES[strategy]) as session:
        if resumes:
            assert folder is not None
            session.load(folder)
        for x in session.data(batches(session.rank)):
            optimizer.zero_grad()
            F.mse_loss(model(x), x[:, :2]).backward()
            optimizer.step()
            if folder is not None and session.step % SAVE_EVERY == 0 and session.step < STEPS and not resumes:
                session.save(folder, keep=2)
                if told is not None:
                    told.append(session.step)
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def batches(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(3, 4, generator=generator) for _ in range(STEPS - rank % 2)]


@cache
def undisturbed(strategy: str, size: int) -> list[torch.Tensor]:
    return hocket.virtual(size).run(trained, strategy, None)


@dataclass
class Befallen:
    """A run with faults.

    Attributes:
        strategy: which one.
        victim: the rank that was to die.
        deaths: how many ranks did.
        ended: what each rank told at its end.
        saved: the last step of which any rank was told that its checkpoint is complete, 0 for none.
    """

    strategy: str
    victim: int
    deaths: int
    ended: list[Any]
    saved: int


def befallen(seed: int, folder: Path) -> Befallen:
    """Run once with faults."""
    drawn = random.Random(seed)
    strategy = drawn.choice(sorted(STRATEGIES))
    size = drawn.randint(2, 8)
    victim = drawn.randrange(size)
    kill = KillAt(victim, step=drawn.randint(0, STEPS), call=int(drawn.expovariate(1 / 12)))
    faults = Faults(
        seed=seed, delay_s=(0.0, drawn.choice([0.0, 1e-4, 1e-2])), reorder=drawn.random() / 2, kill=kill
    )
    world = hocket.virtual(size, seed=seed, wrap=faults.wrap)

    saved = [0]

    def of_rank() -> torch.Tensor | PeerLostError:
        try:
            return trained(strategy, folder, told=saved)
        except PeerLostError as error:
            return error

    ended = world.run(of_rank)
    return Befallen(strategy, victim, len(world.killed), ended, max(saved))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(0, NUM_RUNS, PER_TEST))
def test_runs_in_which_a_rank_dies(first: int, tmp_path: Path) -> None:
    deaths = resumed = 0
    for seed in range(first, min(first + PER_TEST, NUM_RUNS)):
        folder = tmp_path / str(seed)
        run = befallen(seed, folder)
        what = f"seed {seed}: {run.strategy} on {len(run.ended)} ranks, of which rank {run.victim} was to die"
        deaths += run.deaths
        expected = undisturbed(run.strategy, len(run.ended))
        check_ends(run, expected, what)
        if not run.deaths:
            continue
        try:
            newest = Manifest.read(newest_first(folder)[0]).step
        except CheckpointError:
            newest = 0
        assert newest >= run.saved, f"{what}: the checkpoint of step {run.saved} is lost"
        if not newest:
            continue
        resumed += 1
        again = hocket.virtual(len(run.ended)).run(trained, run.strategy, folder, True)
        for rank, (ended, wanted) in enumerate(zip(again, expected, strict=True)):
            assert torch.equal(ended, wanted), f"{what}: rank {rank}, resumed, ended elsewhere"
    # A kill that comes too late leaves a run whole, and one that comes early leaves no checkpoint; many do neither.
    assert deaths > min(PER_TEST, NUM_RUNS) // 4
    assert resumed > min(PER_TEST, NUM_RUNS) // 10


def check_ends(run: Befallen, expected: list[torch.Tensor], what: str) -> None:
    """Check that each rank has trained to the right end, or names the dead one."""
    for rank, ended in enumerate(run.ended):
        if isinstance(ended, PeerLostError):
            assert run.deaths, what
            assert f"rank {run.victim} " in str(ended), f"{what}: rank {rank} says: {ended}"
        elif ended is not None:
            assert torch.equal(ended, expected[rank]), f"{what}: rank {rank} trained wrongly"
        else:
            assert (rank, run.deaths) == (run.victim, 1), f"{what}: rank {rank} told nothing"
