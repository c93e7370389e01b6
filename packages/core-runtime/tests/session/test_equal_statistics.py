"""Statistics are compared with the parameters where ranks should hold the same, and left alone elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toys import batches, on_ranks

import hocket
from hocket.errors import DisagreementError

#: Statistics are averaged after each step, which keeps them equal as it does the parameters.
AVERAGED = {
    "gradients": [{"collective": "allreduce"}],
    "parameters": [{"collective": "allreduce", "buffers": "mean"}],
}
CALLS: dict[str, Callable[[hocket.Session, Path], object]] = {
    "consensus": lambda session, folder: session.consensus(),
    "distance": lambda session, folder: session.consensus_distance(),
    "save": lambda session, folder: session.save(folder),
    "close": lambda session, folder: session.close(),
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3)).double()


def push(model: nn.Module) -> None:
    model.get_buffer("1.running_mean")[2] += 0.5


def after(
    use: Callable[[hocket.Session, int], Any],
    strategy: Any = "sgd",
    *,
    frozen: bool = False,
    **attach: Any,
) -> list[Any]:
    """Train two ranks, and return what `use` makes of the session; `frozen`: BatchNorm is in eval mode."""

    def run(rank: int) -> Any:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session = hocket.attach(model, optimizer, strategy, **attach)
        model[1].train(not frozen)
        for x, y in batches(rank, 2):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        used = use(session, rank)
        session.close()
        return used

    return on_ranks(2, run)


@pytest.mark.one_of_each
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(
    ("strategy", "frozen"), [("sgd", True), (AVERAGED, False)], ids=["eval mode", "mean"]
)
def test_one_that_differs_is_told_and_an_error_where_the_user_says_so(
    call: Callable[[hocket.Session, Path], object],
    strategy: Any,
    frozen: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def use(session: hocket.Session, rank: int) -> None:
        if rank == 1:
            push(session.model)
        call(session, tmp_path)

    after(use, strategy, frozen=frozen)
    told = next(message for message in caplog.messages if "replicas differ" in message)
    differ = "those of rank 1 in 1 of 8 parameters and statistics (the first is '1.running_mean');"
    assert differ in told

    def refused(session: hocket.Session, rank: int) -> None:
        if rank == 1:
            push(session.model)
        with pytest.raises(DisagreementError, match=r"first is '1\.running_mean'"):
            call(session, tmp_path / "other")
        session.inner.abandon()

    after(refused, strategy, frozen=frozen, on_difference="error")


@pytest.mark.parametrize("way", ["save", "close"])
def test_what_differs_is_measured_and_becomes_the_mean(way: str, tmp_path: Path) -> None:
    def use(session: hocket.Session, rank: int) -> tuple[float, Tensor, nn.Module]:
        if rank == 1:
            push(session.model)
        before = session.model.get_buffer("1.running_mean").clone()
        distance = session.consensus_distance()
        assert torch.equal(session.model.get_buffer("1.running_mean"), before)
        CALLS[way](session, tmp_path)
        return distance, before, session.model

    told = after(use, frozen=True)
    replicas = torch.stack([before for _, before, _ in told])
    expected = float((replicas - replicas.mean(0)).square().sum(1).mean().sqrt())
    assert expected == pytest.approx(0.25)
    for distance, _, model in told:
        assert distance == pytest.approx(expected)
        torch.testing.assert_close(model.get_buffer("1.running_mean"), replicas.mean(0))


def batch_of_its_own(session: hocket.Session, rank: int) -> None:
    if rank == 1:
        session.model(torch.ones(4, 5, dtype=torch.float64))


def load_own(session: hocket.Session, folder: Path) -> None:
    session.save(folder)
    session.load(folder)


@pytest.mark.one_of_each
@pytest.mark.parametrize("strategy", ["sgd", "dpsgd", AVERAGED], ids=["sgd", "dpsgd", "mean"])
@pytest.mark.parametrize("between", ["nothing", "a batch of its own", "load"])
def test_ranks_own_statistics_are_no_difference(
    strategy: Any, between: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def use(session: hocket.Session, rank: int) -> Tensor:
        if between == "a batch of its own":
            batch_of_its_own(session, rank)
        elif between == "load":
            load_own(session, tmp_path)
        before = session.model.get_buffer("1.running_mean").clone()
        session.consensus_distance()
        CALLS["save"](session, tmp_path / "more")
        assert torch.equal(session.model.get_buffer("1.running_mean"), before)
        return before

    with caplog.at_level(logging.WARNING, "hocket"):
        one, other = after(use, strategy)
    assert not caplog.records
    assert torch.equal(one, other) == (strategy is AVERAGED and between != "a batch of its own")


def test_what_was_equal_when_it_was_saved_is_compared_after_a_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def use(session: hocket.Session, rank: int) -> float:
        load_own(session, tmp_path)
        assert session.consensus_distance() == 0.0
        if rank == 1:
            push(session.model)
        return session.consensus_distance()

    assert after(use, frozen=True) == pytest.approx([0.25, 0.25])
    assert "rank 0's values differ from those of rank 1 in" in caplog.text
    assert "(the first is '1.running_mean')" in caplog.text


class Synchronised(nn.SyncBatchNorm):
    """A SyncBatchNorm on the CPU: it takes statistics that all ranks have alike."""

    def forward(self, x: Tensor) -> Tensor:
        mean, count = self.get_buffer("running_mean"), self.get_buffer("num_batches_tracked")
        count += 1
        mean.fill_(1 / float(count))
        return x - mean


@pytest.mark.parametrize("size", [2, 3])
def test_those_of_batches_of_all_ranks_are_compared(
    size: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # A process group of two ranks: that of a session of two, and of a part of one of three.
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "fake")

    def run(rank: int) -> float:
        model = nn.Sequential(nn.Linear(5, 7), Synchronised(7), nn.Tanh(), nn.Linear(7, 3)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with hocket.attach(model, optimizer, "sgd") as session:
            for x, y in batches(rank, 3):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            assert session.consensus_distance() == 0.0
            if rank == 1:
                push(model)
            return session.consensus_distance()

    apart = on_ranks(size, run)
    assert apart == pytest.approx([0.25] * 2 if size == 2 else [0.0] * 3)
    assert ("first is '1.running_mean'" in caplog.text) == (size == 2)
