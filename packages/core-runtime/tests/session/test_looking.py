"""Looking changes nothing: what is trained is the same, to the bit, however often somebody looks at the replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from toys import batches, flat, mlp, on_ranks, sgd

import hocket

Composed = Callable[[], hocket.Strategy]


def composed(*given: Any) -> Composed:
    """Compose within a test: while tests are collected, plugins are not hidden."""
    return lambda: hocket.compose(*given)


STRATEGIES: dict[str, Composed] = {
    "overlap_sgp": composed("overlap_sgp"),
    "overlap_sgp, whose weights are not 1": composed(
        "overlap_sgp", "parameters.0.topology={name: exponential}"
    ),
    "dpsgd, late": composed("dpsgd", "parameters.0.delay=1", "parameters.0.merge=add"),
    "periodic_average, late": composed(
        "periodic_average", "parameters.0.every=4", "parameters.0.delay=3", "parameters.0.merge=add"
    ),
    "streaming": composed(
        {
            "parameters": [
                {
                    "collective": "allreduce",
                    "segments": "layers",
                    "every": 6,
                    "stagger": True,
                    "delay": 2,
                    "merge": {"name": "blend", "local": 0.5},
                    "outer": {"name": "sgd", "lr": 0.4, "momentum": 0.9, "nesterov": True},
                }
            ]
        }
    ),
    "dpsgd, forward": composed("dpsgd", "parameters.0.overlap=forward"),
    "sgp": composed("sgp"),
    "sgd": composed("sgd"),
}


def consensus(session: hocket.Session) -> None:
    with session.consensus():
        mean = flat(session.model)
        told = session.gather(mean.tolist())
        assert all(of_rank == told[0] for of_rank in told)


def replica(session: hocket.Session) -> None:
    with session.replica():
        pass


LOOKS: dict[str, Callable[[hocket.Session], object]] = {
    "consensus": consensus,
    "distance": lambda session: session.consensus_distance(),
    "replica": replica,
    "all": lambda session: [
        look(session) for look in (consensus, replica, hocket.Session.consensus_distance)
    ],
}


def train(
    strategy: Any, look: Callable[[hocket.Session], object] | None, dtype: torch.dtype, every: int
) -> Any:
    def run(rank: int) -> tuple[Tensor, Tensor, float]:
        model = mlp(dtype=dtype)
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, strategy) as session:
            for number, (x, y) in enumerate(batches(rank, 13, dtype=dtype)):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                # Not after the last: with overlap forward a look sends what the next forward would.
                if look is not None and number % every == 0 and number < 12:
                    look(session)
            trained = flat(model)
            distance = session.consensus_distance()
            session.consensus()
            return trained, flat(model), distance

    return on_ranks(3, run)


@pytest.mark.one_of_each
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", STRATEGIES)
def test_training_is_the_same(name: str, dtype: torch.dtype) -> None:
    expected = train(STRATEGIES[name](), None, dtype, 1)
    for look, every in (("consensus", 3), ("distance", 1), ("replica", 2), ("all", 1)):
        got = train(STRATEGIES[name](), LOOKS[look], dtype, every)
        for rank, (one, other) in enumerate(zip(expected, got, strict=True)):
            assert torch.equal(one[0], other[0]), (look, rank)
            assert torch.equal(one[1], other[1]), (look, rank)
            assert one[2] == other[2], (look, rank)


@pytest.mark.parametrize("name", ["overlap_sgp", "dpsgd, late"])
def test_the_mean_holds_what_is_under_way(name: str) -> None:
    """Gossip keeps the replicas' mean, whatever of it has come: a look after each step sees what was trained."""

    def run(rank: int) -> list[tuple[Tensor, Tensor]]:
        model = mlp()
        optimizer = sgd(model, momentum=0.0)
        seen = []
        with hocket.attach(model, optimizer, STRATEGIES[name]()) as session:
            for x, y in batches(rank, 6):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                own = flat(model)
                with session.consensus():
                    seen.append((own, flat(model)))
                assert torch.equal(flat(model), own)
        return seen

    told = on_ranks(3, run)
    for of_step in zip(*told, strict=True):
        mean = torch.stack([own for own, _ in of_step]).mean(0)
        for _, shown in of_step:
            torch.testing.assert_close(shown, mean, rtol=0, atol=1e-14)


def test_a_consensus_for_good_goes_on_from_the_mean() -> None:
    def run(rank: int) -> Tensor:
        model = mlp()
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, "overlap_sgp") as session:
            for x, y in batches(rank, 3):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            session.consensus()
            shown = flat(model)
            assert session.consensus_distance() == 0.0
            session.settle()
            assert torch.equal(flat(model), shown)
            return shown

    one, other = on_ranks(2, run)
    assert torch.equal(one, other)
