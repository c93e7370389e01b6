"""Gossip of parameters against the product of its mixing matrices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import hocket
from hocket.errors import CompositionError, UserError
from hocket.topology import Exponential, Neighbours, RandomMatching, Ring, Topology

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
    topology: str | Topology,
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
        exchange = hocket.Exchange("gossip", topology=topology, segments="layers", **(hidden or {}))
        strategy = hocket.Strategy(parameters=(exchange,))
        with hocket.attach(model, optimizer, strategy, initial="keep") as session:
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
    with pytest.raises(CompositionError, match=r"parameters\.0\.topology: gossip needs a topology"):
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


def drawn(rank: int, size: int, round: int) -> tuple[int, int, float, float]:
    step = int(np.random.randint(1, size))
    return (rank + step) % size, (rank - step) % size, 0.5, 0.5


def later(rank: int, size: int, round: int) -> tuple[int, int, float, float]:
    return (rank + 1) % size, (rank - 1) % size, 0.5, 0.5 + 0.1 * (round == 3)


# To whom a rank gives, from whom it takes, the weights of what is given and kept; and what is said of it.
BAD: dict[str, tuple[Callable[[int, int, int], tuple[int, int, float, float]], str]] = {
    "asymmetric": (
        lambda rank, size, round: ((rank + 1) % size, (rank + 1) % size, 0.5, 0.5),
        r"0: rank \d of 5 has \d in receive_from, and rank \d has send_to=\(\d,\)",
    ),
    "weights": (
        lambda rank, size, round: ((rank + 1) % size, (rank - 1) % size, 0.6, 0.6),
        r"0: .*keeps and gives away has weights \[0.6, 0.6\] of sum 1.2, and columns_sum_to_one is True",
    ),
    "itself": (
        lambda rank, size, round: (rank, rank, 0.5, 0.5),
        r"0: .*has send_to=\(\d,\): it must name other ranks, 0 to 4",
    ),
    "odd": (
        lambda rank, size, round: (rank ^ 1, rank ^ 1, 0.5, 0.5),
        r"0: rank 4 of 5 has send_to=\(5,\): .* if 5 ranks are not possible, check_size must refuse them",
    ),
    "impure": (drawn, r"0: rank \d of 5 has"),
    "later": (later, "3: .* of sum 1.1, and columns_sum_to_one is True"),
}


@dataclass(frozen=True)
class Bad(Topology):
    """One of `BAD`."""

    what: str

    def neighbours(self, rank: int, size: int, round: int, segment: int) -> Neighbours:
        to, source, given, kept = BAD[self.what][0](rank, size, round)
        return Neighbours((to,), (given,), (source,), kept)


@pytest.mark.parametrize("bad", BAD)
def test_a_topology_that_contradicts_itself_ends_the_run(bad: str) -> None:
    told = r"parameters\.0\[\d\]: topology .*Bad in round " + BAD[bad][1] + ".*TopologyConformance"
    with pytest.raises(UserError, match=told):
        gossiped(Bad(bad), 5, 4)
