"""Segments of growing size: the mean of all ranks' gradients, in as many messages as planned, the same on all ranks."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from toys import on_ranks

import hocket
from hocket.plan.plan import plan
from hocket.transport.network import NetworkModel

RANKS = 3
BUCKETS = "gradients.0.segments={name: bytes, size_mb: 0.002, first_mb: 0.0003}"


class Parameters(nn.Module):
    """Parameters of given sizes, read in order, whose gradients are given arrays."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.zeros(size) for size in sizes)

    def forward(self, gradients: list[np.ndarray]) -> torch.Tensor:
        value = torch.zeros(())
        for part, gradient in zip(self.parts, gradients, strict=True):
            value = value + part @ torch.from_numpy(gradient)
        return value


def gradients_of(rank: int, sizes: list[int]) -> list[np.ndarray]:
    draw = np.random.default_rng(rank)
    return [draw.standard_normal(size).astype(np.float32) for size in sizes]


@given(st.lists(st.integers(1, 700), min_size=1, max_size=8), st.sampled_from([(), (BUCKETS,)]))
def test_numpys_mean_on_all_ranks(sizes: list[int], overrides: tuple[str, ...]) -> None:
    strategy = hocket.compose("agd", *overrides)

    def step(rank: int) -> tuple[list[np.ndarray], int]:
        model = Parameters(sizes)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with hocket.attach(model, optimizer, strategy) as session:
            model(gradients_of(rank, sizes)).backward()
            means = [part.grad.numpy().copy() for part in model.parts if part.grad is not None]
            optimizer.step()
            return means, session.counters.exchanges

    ranks = on_ranks(RANKS, step)
    every = zip(*(gradients_of(rank, sizes) for rank in range(RANKS)), strict=True)
    for mean, of_parameter in zip(ranks[0][0], every, strict=True):
        np.testing.assert_allclose(mean, np.mean(of_parameter, axis=0), rtol=1e-5, atol=1e-6)
    planned = plan(strategy, Parameters(sizes), RANKS, NetworkModel()).exchanges[0]
    for means, exchanges in ranks:
        assert [mean.tobytes() for mean in means] == [mean.tobytes() for mean in ranks[0][0]]
        assert exchanges == len(planned.layouts)


def test_a_small_first_bucket_leaves_while_backward_goes_on() -> None:
    """Of segments of 1, 2 and 2 layers, from the last layer on, each is sent before the next layer's gradient comes."""
    sizes = [64] * 5

    def step() -> list[int]:
        model, sent = Parameters(sizes), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        layers = f"gradients.0.segments={{name: bytes, size_mb: 1, first_mb: {256 / 2**20}}}"
        with hocket.attach(model, optimizer, hocket.compose("agd", layers)) as session:
            for part in model.parts:
                part.register_hook(lambda gradient: sent.append(session.counters.exchanges))
            model(gradients_of(0, sizes)).backward()
            optimizer.step()
        return sent

    assert hocket.virtual(2).run(step) == [[0, 1, 1, 2, 2]] * 2
