"""What of a model has a mean in a consensus: parameters and running statistics; the rest is rank 0's, or one's own."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import on_ranks

import hocket
from hocket.errors import AttachError

RANKS = 3

OUTER = {"recipe": "periodic_average", "parameters.0.outer": {"name": "sgd", "lr": 0.7}}

#: Of which the last, 3 times in float32, is infinite: a sum of equal values is no way to their mean.
_ODD = torch.tensor([0.1, 1 / 3, 5e-39, 3e38])


class UntrainedTensors(nn.Module):
    """A layer, a frozen teacher, and buffers of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.teacher = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("vector", torch.zeros(4))
        self.register_buffer("queue", torch.zeros(2, 4))
        self.register_buffer("place", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(0))
        self.register_buffer("filled", None)
        self.register_buffer("odd", _ODD.clone())
        self.register_buffer("moving", torch.zeros(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.student(x))
        return y


def differing(rank: int) -> UntrainedTensors:
    """Return what a rank's model holds after a while."""
    model = UntrainedTensors()
    model.get_buffer("vector").copy_(nn.functional.one_hot(torch.tensor(rank), 4))
    model.get_buffer("queue").fill_(rank)
    model.get_buffer("place").fill_(10 * rank)
    model.cache = torch.full((rank + 1,), float(rank))
    model.get_buffer("moving").fill_(rank)
    model.norm.running_mean.fill_(rank)  # type: ignore[union-attr]
    model.norm.running_var.fill_(2 * rank + 1)  # type: ignore[union-attr]
    with torch.no_grad():
        model.teacher.weight.fill_(rank)
    return model


def consensus(
    rank: int, strategy: str = "dpsgd", **attach: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the model within a consensus, and after it."""
    model, now = UntrainedTensors(), differing(rank)
    optimizer = torch.optim.SGD([*model.student.parameters(), *model.norm.parameters()], lr=0.1)
    with hocket.attach(model, optimizer, strategy, **attach) as session:
        model.cache = now.get_buffer("cache").clone()
        if rank == 1:
            model.filled = torch.ones(1)
        for name, given in now.named_buffers():
            model.get_buffer(name).copy_(given)
        model.get_parameter("teacher.weight").data.copy_(now.get_parameter("teacher.weight"))
        with session.consensus():
            within = {name: value.clone() for name, value in model.state_dict().items()}
        return within, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("strategy", ["sgd", "dpsgd", "periodic_average", OUTER])
def test_only_parameters_and_statistics_have_a_mean(strategy: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "hocket"):
        got = on_ranks(RANKS, lambda rank: consensus(rank, strategy, statistics=["mov*"]))
    for rank, (within, after) in enumerate(got):
        assert within["norm.running_mean"].tolist() == [1.0] * 4
        assert within["norm.running_var"].tolist() == [3.0] * 4
        assert within["moving"].tolist() == [1.0] * 2
        assert within["teacher.weight"].unique().tolist() == [1.0]
        assert within["vector"].tolist() == [1.0, 0.0, 0.0, 0.0]
        assert within["queue"].unique().tolist() == [0.0]
        assert within["place"] == 0
        assert within["cache"].tolist() == [rank] * (rank + 1)
        assert torch.equal(within["odd"], _ODD)
        own = differing(rank).state_dict()
        assert all(torch.equal(after[name], own[name]) for name in own if not name.startswith("student"))
    told = [
        message for message in caplog.messages if message.startswith("these tensors") or "shape" in message
    ]
    assert len(told) == 2
    assert "place, queue, vector" in told[0]
    assert "each rank keeps its own: cache, filled. " in told[1]


def test_a_mean_of_statistics_counts_samples() -> None:
    def train(rank: int) -> Tensor:
        model = nn.Sequential(nn.BatchNorm1d(1, momentum=None, affine=False), nn.Linear(1, 1)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        loader = [
            torch.full((3 - rank, 1), float(batch + 10 * rank), dtype=torch.float64) for batch in range(4)
        ]
        with hocket.attach(model, optimizer, "dpsgd") as session:
            for x in session.data(loader, weight=len):
                optimizer.zero_grad()
                model.eval()(x).sum().backward()
                with torch.no_grad():
                    model[0].train()(torch.cat([x, x]))
                optimizer.step()
            session.consensus()
        mean = model.get_buffer("0.running_mean")
        return mean

    # Rank 0 has seen three samples of each of 0, 1, 2, 3, and rank 1 two of each of 10, 11, 12, 13.
    expected = (3 * 1.5 + 2 * 11.5) / 5
    for mean in on_ranks(2, train):
        assert mean.item() == pytest.approx(expected)


def test_spectral_norms_keep_unit_vectors() -> None:
    def train(rank: int) -> tuple[float, float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        generator = torch.Generator().manual_seed(rank)
        with hocket.attach(model, optimizer, "dpsgd") as session:
            for _ in range(20):
                optimizer.zero_grad()
                model(torch.randn(4, 8, generator=generator)).square().mean().backward()
                optimizer.step()
            session.consensus()
        return model.get_buffer("0.parametrizations.weight.0._u").norm().item(), model(
            torch.ones(1, 8)
        ).item()

    got = on_ranks(RANKS, train)
    assert all(norm == pytest.approx(1) for norm, _ in got)
    assert len({output for _, output in got}) == 1


def test_equal_values_stay_to_the_bit_in_a_mean_of_statistics() -> None:
    def train(rank: int) -> tuple[Tensor, float]:
        model = UntrainedTensors()
        optimizer = torch.optim.SGD([*model.student.parameters(), *model.norm.parameters()], lr=0.1)
        strategy = hocket.compose("periodic_average", "parameters.0.every=1", "parameters.0.buffers=mean")
        with hocket.attach(model, optimizer, strategy, statistics=["odd"]) as session:
            model(torch.randn(5, 4, generator=torch.Generator().manual_seed(rank))).sum().backward()
            optimizer.step()
            own = model.norm.running_mean.clone()  # type: ignore[union-attr]
            return model.get_buffer("odd").clone(), float(own.sum()) + 0 * session.step

    got = on_ranks(RANKS, train)
    assert all(torch.equal(odd, _ODD) for odd, _ in got)
    assert len({mean for _, mean in got}) == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_statistics_that_nothing_synchronises_are_warned_of(
    ranks: int, caplog: pytest.LogCaptureFixture
) -> None:
    def attach(rank: int) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
        hocket.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "sgd").close()

    with caplog.at_level(logging.WARNING, "hocket"):
        on_ranks(ranks, attach)
    assert [message[:25] for message in caplog.messages] == ["module 1: SyncBatchNorm n"] * (ranks > 1)


@pytest.mark.parametrize(
    ("given", "told"),
    [(["vektor"], r"'vektor' matches none.*: vector, queue"), ("vector", "a list of names")],
)
def test_names_of_no_statistic_are_refused(given: Any, told: str) -> None:
    model = UntrainedTensors()
    optimizer = torch.optim.SGD(model.student.parameters(), lr=0.1)
    with pytest.raises(AttachError, match=told):
        hocket.attach(model, optimizer, "sgd", peer=None, statistics=given)


class Second(torch.optim.SGD):
    """SGD that evaluates other weights than it trains, as schedule-free optimizers do."""

    def train(self) -> None:
        self.param_groups[0]["train_mode"] = True

    def eval(self) -> None:
        self.param_groups[0]["train_mode"] = False


@pytest.mark.parametrize("strategy", ["sgd", "dpsgd"])
@pytest.mark.parametrize("first", [False, True])
def test_an_order_of_eval_and_consensus_is_told_once(
    strategy: str, first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def train(rank: int) -> None:
        model = nn.Linear(2, 2)
        optimizer = Second(model.parameters(), lr=0.1)
        optimizer.train()
        with hocket.attach(model, optimizer, strategy) as session:
            if first:
                optimizer.eval()
            for _ in range(2):
                with session.consensus():
                    optimizer.eval()

    with caplog.at_level(logging.WARNING, "hocket"):
        on_ranks(2, train)
    told = [message for message in caplog.messages if "Call optimizer.eval() before" in message]
    assert len(told) == (strategy == "dpsgd" and not first)
