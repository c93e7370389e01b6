"""Compressors as communication hooks of DistributedDataParallel, in two processes with Gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import ddp_rank
import pytest
import torch
from torch import Tensor

from hocket.compressor import Compressor, LocalClipping, MomentumCorrection, TopK
from hocket.compressor.ddp import ddp_comm_hook

RANKS = 2
JOB_TIMEOUT_S = 90


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    """Run all cases in one job; return what each rank told."""
    folder = tmp_path_factory.mktemp("ddp")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    results = [folder / f"{rank}.pt" for rank in range(RANKS)]
    ranks = [
        subprocess.Popen(
            [sys.executable, ddp_rank.__file__, str(rank), str(folder / "store"), str(results[rank])],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(RANKS)
    ]
    try:
        errors = [rank.communicate(timeout=JOB_TIMEOUT_S)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * RANKS, "\n".join(error[-3000:] for error in errors)
    return [torch.load(Path(result)) for result in results]


def contributions() -> Tensor:
    """Return every rank's gradients divided by the number of ranks, [ranks, steps, numel]."""
    of_ranks = [
        [
            torch.cat([part.reshape(-1) for part in ddp_rank.own_gradients(rank, step)])
            for step in range(ddp_rank.STEPS)
        ]
        for rank in range(RANKS)
    ]
    return torch.stack([torch.stack(steps) for steps in of_ranks]) / RANKS


@pytest.mark.parametrize("name", [*ddp_rank.CASES, "many buckets"])
def test_ranks_get_the_same(job: list[dict[str, Tensor]], name: str) -> None:
    assert torch.equal(job[0][name], job[1][name])


@pytest.mark.parametrize("name", ["none", "all", "many buckets"])
def test_what_loses_nothing_gives_the_mean(job: list[dict[str, Tensor]], name: str) -> None:
    torch.testing.assert_close(job[0][name], contributions().sum(0))


@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_casts_are_summed_in_float32(job: list[dict[str, Tensor]], name: str, dtype: torch.dtype) -> None:
    expected = contributions().to(dtype).float().sum(0)
    expected[0] = contributions()[:, 0].sum(0)  # the first step is not compressed
    torch.testing.assert_close(job[0][name], expected)


@pytest.mark.parametrize(("name", "eps"), [("none", 0.0), ("fp16", 2**-10)])
def test_it_agrees_with_the_hooks_of_torch(job: list[dict[str, Tensor]], name: str, eps: float) -> None:
    """Torch sums in 16 bits, too: a rounding for each rank, and one of the sum. Without a cast bits are equal."""
    own, of_torch = job[0][name], job[0][f"torch {name}"]
    torch.testing.assert_close(own, of_torch, rtol=0.0, atol=3 * eps * float(own.abs().max()))


def test_messages_of_different_lengths(job: list[dict[str, Tensor]]) -> None:
    expected = contributions().clamp(min=0).sum(0)
    expected[0] = contributions()[:, 0].sum(0)
    torch.testing.assert_close(job[0]["positive"], expected)


def test_top_k_with_error_feedback_by_hand(job: list[dict[str, Tensor]]) -> None:
    given = contributions()
    residuals = torch.zeros(RANKS, ddp_rank.NUMEL)
    for step in range(1, ddp_rank.STEPS):
        residuals += given[:, step]
        chosen = torch.topk(residuals.abs(), ddp_rank.NUMEL // 10, dim=1).indices
        mask = torch.zeros_like(residuals).scatter_(1, chosen, 1)
        torch.testing.assert_close(job[0]["topk"][step], (residuals * mask).sum(0))
        residuals *= 1 - mask


def test_shared_random_sends_the_same_coordinates_and_all_that_was_kept(job: list[dict[str, Tensor]]) -> None:
    given, got = contributions().sum(0), job[0]["shared_random"]
    kept = torch.zeros(ddp_rank.NUMEL)
    for step in range(1, ddp_rank.STEPS):
        kept += given[step]
        sent = got[step] != 0
        assert sent.sum() == ddp_rank.NUMEL // 4
        torch.testing.assert_close(got[step][sent], kept[sent])
        kept[sent] = 0


@pytest.mark.parametrize(
    ("compressor", "message"),
    [
        (LocalClipping(TopK(0.1), max_norm=1.0), "shows it one bucket at a time: use hocket.attach"),
        (
            MomentumCorrection(TopK(0.1)),
            "momentum and weight_decay, but DDP's optimizer would apply it a second time",
        ),
    ],
)
def test_what_a_hook_cannot_do_is_refused(compressor: Compressor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ddp_comm_hook(compressor)
