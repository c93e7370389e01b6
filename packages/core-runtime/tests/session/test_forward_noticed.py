"""Overlap forward where nobody tells when a forward begins, or what it reads: overlap none, or a word."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toys import batches, flat, on_ranks, sgd

import hocket


class Net(nn.Module):
    """A model with a parameter of its own, that is read before any of its layers is called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.ones(5))
        self.body = nn.Sequential(nn.Linear(5, 7), nn.Tanh())
        self.head = nn.Linear(7, 3)
        self.reads_elsewhere = False
        self.double()

    def encode(self, x: Tensor) -> Tensor:
        hidden = self.body(x * self.scale)
        if self.reads_elsewhere:
            return F.linear(hidden, self.head.weight * 1.0, self.head.bias)
        out: Tensor = self.head(hidden)
        return out

    def by_hand(self, x: Tensor) -> Tensor:
        linear = self.get_submodule("body.0")
        assert isinstance(linear, nn.Linear)
        hidden = torch.tanh(F.linear(x * self.scale, linear.weight, linear.bias))
        return F.linear(hidden, self.head.weight, self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x)


def train(rank: int, overlap: str, how: str, steps: int = 6) -> Tensor:
    model = Net()
    optimizer = sgd(model)
    strategy = hocket.Strategy(
        parameters=(hocket.Exchange("gossip", topology="ring", segments="layers", overlap=overlap),)
    )
    with hocket.attach(model, optimizer, strategy) as session:
        if how == "compiled":
            torch._dynamo.reset()
            model.body.compile(backend="eager")
        for number, (x, y) in enumerate(batches(rank, steps)):
            model.reads_elsewhere = how == "elsewhere" and number >= 3
            call: Any = {"parts": model.encode, "by hand": model.by_hand}.get(how, model)
            optimizer.zero_grad()
            F.cross_entropy(call(x), y).backward()
            optimizer.step()
        session.settle()
        return flat(model)


# Of Dynamo, for what another part has given.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("how", ["called", "parts", "compiled"])
def test_the_numbers_are_those_of_overlap_none(how: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="hocket"):
        forward = on_ranks(3, lambda rank: train(rank, "forward", how))
    none = on_ranks(3, lambda rank: train(rank, "none", how))
    for one, other in zip(forward, none, strict=True):
        assert torch.equal(one, other)
    told = [record.getMessage() for record in caplog.records if record.name == "hocket"]
    assert len(told) == (how != "called")
    assert all("from now on `overlap: forward` has no effect" in each for each in told)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("by hand", "a step came without a forward of the model since the last step"),
        ("elsewhere", "read head.weight, head.bias without calling its module"),
    ],
)
def test_what_was_read_too_early_is_told_and_right_from_then_on(
    how: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="hocket"):
        forward = on_ranks(3, lambda rank: train(rank, "forward", how))
    told = [record.getMessage() for record in caplog.records if record.name == "hocket"]
    assert told
    assert all(words in each for each in told)
    for rank_values in forward:
        assert rank_values.isfinite().all()


def test_a_layer_that_is_left_out_now_and_then_is_no_such_read(caplog: pytest.LogCaptureFixture) -> None:
    class Dropping(Net):
        def encode(self, x: Tensor) -> Tensor:
            return super().encode(x) if self.training else x * self.scale

    def run(rank: int) -> None:
        model = Dropping()
        optimizer = sgd(model)
        strategy = hocket.compose("dpsgd", "parameters.0.overlap=forward", "parameters.0.segments=layers")
        with hocket.attach(model, optimizer, strategy) as session:
            for number, (x, _) in enumerate(batches(rank, 5)):
                model.train(number != 3)
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            session.settle()

    with caplog.at_level(logging.WARNING, logger="hocket"):
        on_ranks(2, run)
    assert not caplog.records


@pytest.mark.parametrize("strategy", ["dpsgd", "sgp", "periodic_average"])
def test_learning_rates_that_differ_by_rank_are_told_once(
    strategy: str, caplog: pytest.LogCaptureFixture
) -> None:
    def run(rank: int, *, differs: bool) -> None:
        model = Net()
        optimizer = sgd(model)
        overrides = ["parameters.0.every=2"] if strategy == "periodic_average" else []
        with hocket.attach(model, optimizer, hocket.compose(strategy, *overrides)) as session:
            for number, (x, y) in enumerate(batches(rank, 4)):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                if differs:
                    optimizer.param_groups[0]["lr"] = 0.1 / (1 + rank)
                if number % 2:
                    session.consensus()

    with caplog.at_level(logging.WARNING, logger="hocket"):
        on_ranks(2, lambda rank: run(rank, differs=False))
        assert not caplog.records
        on_ranks(2, lambda rank: run(rank, differs=True))
    [told] = [record.getMessage() for record in caplog.records]
    assert told.startswith("the ranks' optimizers differ at step 2")
    assert "lr" in told
