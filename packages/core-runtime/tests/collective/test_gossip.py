"""Gossip of parameters against the product of its mixing matrices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import hocket
from hocket.errors import CompositionError
from hocket.topology import Exponential, RandomMatching, Ring, Topology

TOPOLOGIES: dict[str, Topology] = {
    "ring": Ring(),
    "exponential": Exponential(),
    "random_matching": RandomMatching(),
}


def model_of(rank: int, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(rank)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(dtype)


def layers_of(model: nn.Module) -> list[np.ndarray]:
    """Each layer's parameters, flat, in float64."""
    return [
        torch.cat([p.detach().flatten() for p in layer.parameters()]).double().numpy().copy()
        for layer in model.children()
    ]


def gossiped(
    topology: str,
    size: int,
    rounds: int,
    hidden: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> list[list[np.ndarray]]:
    """Every rank's layers after so many steps with learning rate 0, by rank."""

    def train() -> list[np.ndarray]:
        model = model_of(hocket.join().rank, dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        exchange = {"collective": "gossip", "topology": topology, "segments": "layers", **(hidden or {})}
        with hocket.attach(model, optimizer, {"parameters": [exchange]}, initial="keep") as session:
            for x in session.data([torch.zeros(1, 3, dtype=dtype)] * rounds):
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
        return layers_of(model)

    return hocket.virtual(size, seed=seed).run(train)


def mixed(topology: str, size: int, rounds: int) -> list[np.ndarray]:
    """The stacked layers, [size, n] each, after the mixing matrices of so many rounds."""
    stacks = [
        np.stack(layers)
        for layers in zip(*(layers_of(model_of(r, torch.float64)) for r in range(size)), strict=True)
    ]
    for round in range(rounds):
        stacks = [TOPOLOGIES[topology].mixing_matrix(size, round, s) @ x for s, x in enumerate(stacks)]
    return stacks


@pytest.mark.parametrize("topology", TOPOLOGIES)
@settings(deadline=None, max_examples=12)
@given(size=st.integers(2, 17), rounds=st.integers(1, 5), seed=st.integers(0, 99))
def test_models_are_the_product_of_the_mixing_matrices(
    topology: str, size: int, rounds: int, seed: int
) -> None:
    given = gossiped(topology, size, rounds, seed=seed)
    for segment, expected in enumerate(mixed(topology, size, rounds)):
        stack = np.stack([layers[segment] for layers in given])
        np.testing.assert_allclose(stack, expected, rtol=1e-12, atol=1e-14)
        start = np.stack([layers_of(model_of(rank, torch.float64))[segment] for rank in range(size)])
        np.testing.assert_allclose(stack.mean(0), start.mean(0), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_overlap_forward_gives_the_same_bits(topology: str) -> None:
    plain, hidden = (gossiped(topology, 5, 4, {"overlap": overlap}) for overlap in ("none", "forward"))
    assert all(
        np.array_equal(a, b)
        for one, other in zip(plain, hidden, strict=True)
        for a, b in zip(one, other, strict=True)
    )


def test_a_delay_keeps_the_mean() -> None:
    given = gossiped("ring", 6, 5, {"delay": 1})
    for segment, start in enumerate(
        zip(*(layers_of(model_of(rank, torch.float64)) for rank in range(6)), strict=True)
    ):
        stack = np.stack([layers[segment] for layers in given])
        np.testing.assert_allclose(stack.mean(0), np.stack(start).mean(0), rtol=1e-12, atol=1e-14)
        assert np.linalg.norm(stack - stack.mean(0)) < 0.8 * np.linalg.norm(np.stack(start) - stack.mean(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes_are_mixed_in_float32(dtype: torch.dtype) -> None:
    given = gossiped("ring", 3, 1, dtype=dtype)
    stacks = [np.stack(s) for s in zip(*(layers_of(model_of(rank, dtype)) for rank in range(3)), strict=True)]
    for segment, stack in enumerate(stacks):
        expected = Ring().mixing_matrix(3, 0, segment) @ stack
        tolerance = 2**-8 if dtype == torch.bfloat16 else 1e-6
        for rank, layers in enumerate(given):
            np.testing.assert_allclose(layers[segment], expected[rank], rtol=tolerance, atol=tolerance / 8)


def test_gossip_needs_a_topology() -> None:
    with pytest.raises(CompositionError, match=r"parameters\.0\.topology: gossip needs one"):
        hocket.compose({"parameters": [{"collective": "gossip"}]})


def test_bytes_are_those_of_the_neighbours() -> None:
    def train() -> Any:
        model = model_of(0, torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with hocket.attach(model, optimizer, hocket.compose("dpsgd")) as session:
            optimizer.step()
            return session.counters.bytes_sent

    # 16 + 16 padded floats for the first layer, 16 + 16 for the second, to two neighbours.
    assert hocket.virtual(4).run(train) == [2 * 64 * 4] * 4
