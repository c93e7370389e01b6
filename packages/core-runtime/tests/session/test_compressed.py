"""Compressors within a session, against plain computations in one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toys import batches, flat, gradient_of, mlp, on_ranks, reference, sgd, train

import hocket

RANKS, STEPS = 3, 6


def sparse(compressor: Any, **fields: Any) -> dict[str, Any]:
    return {"gradients": [{"collective": "sparse_allreduce", "compressor": compressor, **fields}]}


def corrected(density: float, masking: bool) -> dict[str, Any]:
    feedback = {"name": "error_feedback", "compressor": {"name": "topk", "density": density}}
    return {"name": "momentum_correction", "masking": masking, "compressor": feedback}


def trained(strategy: Any, momentum: float = 0.9) -> list[Tensor]:
    ended = on_ranks(RANKS, lambda rank: train((strategy,), batches(rank, STEPS), momentum=momentum))
    for own in ended:
        torch.testing.assert_close(own, ended[0], rtol=0, atol=0)
    return ended


def dense(momentum: float = 0.9) -> Tensor:
    data = [batches(rank, STEPS) for rank in range(RANKS)]
    return reference([[(own[step], 1.0) for own in data] for step in range(STEPS)], momentum)


@pytest.mark.one_of_each
@pytest.mark.parametrize("overlap", ["none", "backward"])
@pytest.mark.parametrize("segments", ["layers", "model"])
@pytest.mark.parametrize(
    "compressor",
    [
        "none",
        {"name": "topk", "density": 1.0},
        {"name": "error_feedback", "compressor": {"name": "topk", "density": 1.0}},
        corrected(1.0, masking=False),
    ],
)
def test_all_that_is_sent_is_what_plain_sgd_gets(compressor: Any, segments: str, overlap: str) -> None:
    [own, *_] = trained(sparse(compressor, segments=segments, overlap=overlap))
    torch.testing.assert_close(own, dense(), rtol=1e-12, atol=1e-14)


def test_with_masking_and_all_sent_momentum_is_gone() -> None:
    [own, *_] = trained(sparse(corrected(1.0, masking=True)))
    torch.testing.assert_close(own, dense(momentum=0.0), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("compressor", "digits"), [("fp16", 5e-4), ("bf16", 5e-3)])
def test_casts_are_summed_in_the_segments_own_dtype(compressor: str, digits: float) -> None:
    [own, *_] = trained(sparse(compressor))
    assert 0 < float((own - dense()).abs().max()) < digits


def test_shared_coordinates_are_summed_in_flight() -> None:
    exchange = {"collective": "allreduce", "compressor": {"name": "shared_random", "density": 1.0}}
    [own, *_] = trained({"gradients": [exchange]})
    torch.testing.assert_close(own, dense(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("density", [0.05, 0.3])
def test_error_feedback_is_that_of_its_definition(density: float) -> None:
    """V += G / p; send the k largest of |V|, clear them in V, and step with the sum of what all ranks sent."""
    feedback = {"name": "error_feedback", "compressor": {"name": "topk", "density": density}}
    [own, *_] = trained(sparse(feedback, segments="model"))

    model = mlp()
    optimizer = sgd(model)
    data = [batches(rank, STEPS) for rank in range(RANKS)]
    k = max(1, round(density * flat(model).numel()))
    residuals = np.zeros((RANKS, flat(model).numel()))
    for step in range(STEPS):
        sent = np.zeros(residuals.shape[1])
        for rank, of_rank in enumerate(data):
            gradient = torch.cat([g.reshape(-1) for g in gradient_of(model, of_rank[step])])
            residuals[rank] += gradient.numpy() / RANKS
            chosen = np.argsort(-np.abs(residuals[rank]), kind="stable")[:k]
            sent[chosen] += residuals[rank, chosen]
            residuals[rank, chosen] = 0
        nn.utils.vector_to_parameters(torch.from_numpy(flat(model).numpy()), model.parameters())
        start = 0
        for parameter in model.parameters():
            parameter.grad = torch.from_numpy(sent[start : start + parameter.numel()].copy()).view_as(
                parameter
            )
            start += parameter.numel()
        optimizer.step()
    torch.testing.assert_close(own, flat(model), rtol=1e-10, atol=1e-12)


def test_local_clipping_sees_all_segments() -> None:
    """One rank: torch's own clipping."""
    clipping = {"name": "local_clipping", "max_norm": 0.05, "compressor": "none"}

    def run(rank: int) -> Tensor:
        return train((sparse(clipping, segments="layers"),), batches(0, STEPS))

    ended = on_ranks(2, run)
    model = mlp()
    optimizer = sgd(model)
    for x, y in batches(0, STEPS):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        # Two ranks with equal gradients: each may have sqrt(2) of the norm.
        nn.utils.clip_grad_norm_(model.parameters(), 0.05 * 2**0.5)
        optimizer.step()
    torch.testing.assert_close(ended[0], flat(model), rtol=1e-6, atol=1e-8)


def test_the_optimizers_terms_are_its_own_between_steps_and_at_the_end() -> None:
    strategy = sparse(corrected(1.0, masking=False))

    def run(rank: int) -> tuple[list[Tensor], list[Tensor]]:
        model, plain = mlp(), mlp()
        optimizer, other = sgd(model), sgd(plain)
        with hocket.attach(model, optimizer, strategy) as session:
            for x, y in session.data(batches(0, STEPS)):
                for each, its in ((model, optimizer), (plain, other)):
                    its.zero_grad()
                    F.cross_entropy(each(x), y).backward()
                    its.step()
                group = optimizer.param_groups[0]
                assert (group["momentum"], group["weight_decay"]) == (0.9, 0.01)
                buffers = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
                assert all(buffer.any() for buffer in buffers)
        own, expected = (
            [o.state[p]["momentum_buffer"] for p in m.parameters()]
            for m, o in ((model, optimizer), (plain, other))
        )
        return own, expected

    for buffers, expected in on_ranks(2, run):
        torch.testing.assert_close(buffers, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.one_of_each
@pytest.mark.parametrize("compressor", [{"name": "shared_random", "density": 0.3}, "fp16", "bf16"])
@pytest.mark.parametrize("topology", ["ring", "exponential", "random_matching"])
def test_compressed_gossip_keeps_the_mean(topology: str, compressor: Any) -> None:
    exchange = {"collective": "gossip", "topology": topology, "compressor": compressor, "segments": "layers"}

    def run(rank: int) -> tuple[Tensor, Tensor]:
        model = mlp(rank)
        before = flat(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with hocket.attach(model, optimizer, {"parameters": [exchange]}, initial="keep") as session:
            for _ in session.data(range(40)):
                F.mse_loss(
                    model(torch.zeros(1, 5, dtype=torch.float64)), torch.zeros(1, 3, dtype=torch.float64)
                ).backward()
                optimizer.step()
        return before, flat(model)

    ended = on_ranks(4, run)
    before, after = (torch.stack([pair[i] for pair in ended]) for i in (0, 1))
    torch.testing.assert_close(after.mean(0), before.mean(0), rtol=1e-12, atol=1e-13)
    spread = (after - after.mean(0)).norm() / (before - before.mean(0)).norm()
    assert spread < 0.02


def test_counted_bytes_are_those_of_the_messages() -> None:
    def run(rank: int) -> float:
        model = nn.Linear(100, 10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with hocket.attach(model, optimizer, sparse({"name": "topk", "density": 0.01})) as session:
            model(torch.ones(1, 100)).sum().backward()
            optimizer.step()
            return session.counters.bytes_sent

    # 1,016 numbers with padding: 10 of 8 bytes; 8 bytes of length; 4 trailing numbers of 4. To each of two others.
    assert on_ranks(3, run) == [2 * (10 * 8 + 8 + 4 * 4)] * 3


def test_what_is_sent_late_weighs_as_when_it_was_kept() -> None:
    """Of two ranks one has a single batch: its residual, and the other's, are worth half a gradient at any time."""

    def run(rank: int, compressor: Any) -> Tensor:
        model = nn.Linear(16, 1, bias=False).double()
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        first = torch.arange(1.0, 17.0, dtype=torch.float64)[None]
        with hocket.attach(model, optimizer, sparse(compressor)) as session:
            for x in session.data([first, *[first * 0] * 11] if rank == 0 else [first]):
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
        return model.weight.detach().clone()

    feedback = {"name": "error_feedback", "compressor": {"name": "topk", "density": 0.25}}
    plain, late = (on_ranks(2, partial(run, compressor=compressor)) for compressor in ("none", feedback))
    torch.testing.assert_close(late, plain, rtol=1e-12, atol=1e-14)
