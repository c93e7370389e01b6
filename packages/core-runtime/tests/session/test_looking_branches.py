"""What looks at replicas, and saves them, however gradients go: it tells the truth, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_branches import BRANCHES, EXCHANGED
from test_looking import STRATEGIES, Composed, composed
from torch import Tensor, nn
from toys import batches, flat, mlp, on_ranks, sgd

import hocket

COMPRESSED: dict[str, Any] = {
    "gradients": [
        {
            "collective": "sparse_allreduce",
            "compressor": {"name": "error_feedback", "compressor": {"name": "topk", "density": 0.25}},
        }
    ]
}
ALL: dict[str, Composed] = {
    **{name: composed(*given) for name, given in BRANCHES.items()},
    "residuals": composed(COMPRESSED),
    "streaming": STRATEGIES["streaming"],
    "average, late": STRATEGIES["periodic_average, late"],
}
EQUAL = (*EXCHANGED, "residuals")

each = pytest.mark.parametrize("branch", ALL)

Look = Callable[[hocket.Session], object]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()


def enter(session: hocket.Session) -> None:
    with session.consensus():
        pass


@pytest.mark.one_of_each
@each
@pytest.mark.parametrize("what", ["consensus", "distance", "gather", "save", "receive"])
def test_it_changes_nothing(branch: str, what: str, tmp_path: Path) -> None:
    looks: dict[str, Look] = {
        "consensus": enter,
        "distance": lambda session: session.consensus_distance(),
        "gather": lambda session: session.gather(session.rank),
        "save": lambda session: session.save(tmp_path),
        "receive": lambda session: session.inner.receive(),
    }

    for one, other in zip(trained(branch, looks[what]), without_looking(branch), strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


def trained(branch: str, look: Look) -> list[tuple[Tensor, Tensor]]:
    """Return each rank's parameters after a training in which ranks look after every other batch, and their mean."""

    def run(rank: int) -> tuple[Tensor, Tensor]:
        model = mlp(rank)
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, ALL[branch]()) as session:
            for number, batch in enumerate(session.data(batches(rank, 9 - rank))):
                step(model, optimizer, batch)
                if number % 2:
                    look(session)
            session.settle()
            own = flat(model)
            session.consensus()
        return own, flat(model)

    return on_ranks(3, run)


@cache
def without_looking(branch: str) -> list[tuple[Tensor, Tensor]]:
    return trained(branch, lambda _: None)


@pytest.mark.one_of_each
@each
@pytest.mark.parametrize("steps", [1, 4, 5])
def test_consensus_leaves_one_model_the_mean_of_all(branch: str, steps: int) -> None:
    def run(rank: int) -> tuple[Tensor, Tensor, float, float, list[int]]:
        model = mlp()
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, ALL[branch]()) as session:
            for batch in batches(rank, steps):
                step(model, optimizer, batch)
            session.settle()
            own = flat(model)
            distance = session.consensus_distance()
            assert torch.equal(own, flat(model))
            session.consensus()
            merged = flat(model)
            after = session.consensus_distance()
            return own, merged, distance, after, session.gather(rank)

    ranks = on_ranks(3, run)
    owns = torch.stack([own for own, *_ in ranks])
    expected = float(((owns - owns.mean(0)) ** 2).sum(1).mean().sqrt())
    for _, merged, distance, after, told in ranks:
        assert torch.equal(merged, ranks[0][1])
        assert distance == pytest.approx(expected, abs=1e-12)
        assert after == pytest.approx(0, abs=1e-12)
        assert told == [0, 1, 2]
        if ALL[branch]().outer is None:
            torch.testing.assert_close(merged, owns.mean(0))
    if branch in EQUAL:
        assert all(torch.equal(own, owns[0]) and distance == 0 for own, _, distance, *_ in ranks)
    elif branch == "local":
        assert expected > 1e-3


@each
def test_what_is_settled_is_what_the_next_forward_reads(branch: str) -> None:
    def run(rank: int) -> bool:
        model = mlp()
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, ALL[branch]()) as session:
            for batch in batches(rank, 5):
                step(model, optimizer, batch)
            session.settle()
            settled = flat(model)
            read: list[Tensor] = []
            handle = model.register_forward_hook(lambda *_: read.append(flat(model)))
            step(model, optimizer, batches(rank, 6)[5])
            handle.remove()
        return torch.equal(settled, read[0])

    assert on_ranks(3, run) == [True] * 3


@pytest.mark.one_of_each
@each
@pytest.mark.parametrize("at", [3, 4])
def test_a_resumed_run_goes_on_bit_for_bit(branch: str, at: int, tmp_path: Path) -> None:
    def begin(rank: int) -> Tensor:
        model = mlp()
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, ALL[branch]()) as session:
            for batch in session.data(batches(rank, 8 - rank)):
                step(model, optimizer, batch)
                if session.step == at:
                    session.save(tmp_path)
            session.settle()
        return flat(model)

    def resume(rank: int) -> Tensor:
        model = mlp(7)
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, ALL[branch]()) as session:
            session.load(tmp_path)
            assert session.step == at
            for batch in session.data(batches(rank, 8 - rank)):
                step(model, optimizer, batch)
            session.settle()
        return flat(model)

    for whole, resumed in zip(on_ranks(3, begin), on_ranks(3, resume), strict=True):
        assert torch.equal(whole, resumed)
