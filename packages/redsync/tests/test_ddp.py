"""RedSync's compressors as communication hooks of DistributedDataParallel, in two processes with Gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import ddp_rank
import pytest
import torch
from torch import Tensor

from hocket.compressor.ddp import ddp_comm_hook
from hocket_redsync.hybrid import Hybrid

RANKS = 2


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    """Run all cases in one job; return what each rank got, [steps, numel] by case."""
    folder = tmp_path_factory.mktemp("ddp")
    results = [folder / f"{rank}.pt" for rank in range(RANKS)]
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                ddp_rank.__file__,
                str(rank),
                str(RANKS),
                str(folder / "store"),
                str(results[rank]),
            ],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(RANKS)
    ]
    try:
        errors = [rank.communicate(timeout=90)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * RANKS, "\n".join(error[-3000:] for error in errors)
    return [torch.load(Path(result)) for result in results]


def given() -> Tensor:
    """Return every rank's gradients divided by the number of ranks, [ranks, steps, numel]."""
    of_ranks = [
        [ddp_rank.own_gradient(rank, step).reshape(-1) for step in range(ddp_rank.STEPS)]
        for rank in range(RANKS)
    ]
    return torch.stack([torch.stack(steps) for steps in of_ranks]) / RANKS


@pytest.mark.parametrize("name", list(ddp_rank.CASES))
def test_ranks_get_the_same(job: list[dict[str, Tensor]], name: str) -> None:
    assert torch.equal(job[0][name], job[1][name])


@pytest.mark.parametrize("name", ["all", "dense"])
def test_what_sends_all_gives_the_mean(job: list[dict[str, Tensor]], name: str) -> None:
    torch.testing.assert_close(job[0][name], given().sum(0))


def test_trimmed_by_hand(job: list[dict[str, Tensor]]) -> None:
    """The first step is not compressed: DistributedDataParallel cuts its buckets anew after it."""
    contributions = given()
    residuals = torch.zeros_like(contributions[:, 0])
    for step in range(1, ddp_rank.STEPS):
        residuals += contributions[:, step]
        chosen = torch.topk(residuals.abs(), residuals.shape[1] // 20, dim=1).indices
        mask = torch.zeros_like(residuals).scatter_(1, chosen, 1)
        torch.testing.assert_close(job[0]["trimmed"][step], (residuals * mask).sum(0))
        residuals *= 1 - mask


@pytest.mark.parametrize("name", ["sampled", "asq"])
def test_only_some_arrive(job: list[dict[str, Tensor]], name: str) -> None:
    for step in job[0][name][1:]:
        assert 0 < torch.count_nonzero(step) <= RANKS * 4 * 100


def test_momentum_in_a_hook_is_refused() -> None:
    with pytest.raises(ValueError, match="takes over the optimizer's momentum and weight_decay"):
        ddp_comm_hook(Hybrid())
