"""Replicas that a strategy keeps equal are compared: what a rank does to its own weights is found, told, and mended."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toys import batches, flat, gradient_of, mlp, on_ranks, sgd

import hocket
from hocket.errors import DisagreementError
from hocket.session.exchange import equal_replicas
from hocket.session.exchange.checksums import checksum

Change = Callable[[int, nn.Module], object]


def push(rank: int, model: nn.Module, amount: float = 0.25) -> None:
    """Change one number on rank 1 alone."""
    if rank == 1:
        with torch.no_grad():
            model.get_parameter("2.bias")[1] += amount


def train(session: hocket.Session, rank: int, count: int = 2) -> None:
    for x, y in batches(rank, count):
        session.optimizer.zero_grad()
        F.cross_entropy(session.model(x), y).backward()
        session.optimizer.step()


def after(change: Change, use: Callable[[hocket.Session], Any], size: int = 2, **attach: Any) -> list[Any]:
    """Train, change the replicas, and return what `use` makes of the session, by rank."""

    def run(rank: int) -> Any:
        model = mlp()
        session = hocket.attach(model, sgd(model), "sgd", **attach)
        train(session, rank)
        change(rank, model)
        used = use(session)
        session.close()
        return used

    return on_ranks(size, run)


def test_distance_is_measured_and_changes_nothing() -> None:
    def use(session: hocket.Session) -> tuple[float, Tensor, Tensor]:
        before = flat(session.model)
        return session.consensus_distance(), before, flat(session.model)

    told = after(push, use)
    replicas = torch.stack([before for _, before, _ in told])
    expected = float((replicas - replicas.mean(0)).square().sum(1).mean().sqrt())
    assert expected == pytest.approx(0.125)
    for distance, before, now in told:
        assert distance == pytest.approx(expected)
        assert torch.equal(before, now)


def test_equal_replicas_are_silent(caplog: pytest.LogCaptureFixture) -> None:
    assert after(lambda *_: None, lambda session: session.consensus_distance()) == [0.0, 0.0]
    assert not caplog.records


@pytest.mark.parametrize("size", [2, 3])
def test_consensus_leaves_one_model(size: int, caplog: pytest.LogCaptureFixture) -> None:
    def use(session: hocket.Session) -> tuple[Tensor, Tensor]:
        before = flat(session.model)
        session.consensus()
        return before, flat(session.model)

    told = after(push, use, size)
    mean = torch.stack([before for before, _ in told]).mean(0)
    for _, now in told:
        torch.testing.assert_close(now, mean, rtol=0, atol=1e-15)
        assert torch.equal(now, told[0][1])
    [record] = caplog.records
    message = record.getMessage()
    assert message.startswith(
        "after step 2 (session.consensus) the ranks' replicas differ, although strategy sgd keeps them equal: rank 0's "
        "values differ from those of rank 1 in 1 of 4 parameters (the first is '2.bias');"
    )


def test_consensus_in_a_with_statement_gives_each_its_own_back() -> None:
    def use(session: hocket.Session) -> tuple[Tensor, Tensor, Tensor]:
        before = flat(session.model)
        with session.consensus():
            within = flat(session.model)
        return before, within, flat(session.model)

    told = after(push, use)
    assert torch.equal(told[0][1], told[1][1])
    assert all(torch.equal(before, back) for before, _, back in told)


@pytest.mark.parametrize("way", ["save", "close"])
def test_saving_and_closing_leave_one_model(way: str, tmp_path: Path) -> None:
    def use(session: hocket.Session) -> nn.Module:
        if way == "save":
            session.save(tmp_path)
            assert session.consensus_distance() == 0.0
        return session.model

    one, other = after(push, use)
    assert torch.equal(flat(one), flat(other))


@pytest.mark.parametrize("call", ["consensus", "consensus_distance", "close"])
def test_a_difference_is_an_error_where_the_user_says_so(call: str) -> None:
    def use(session: hocket.Session) -> None:
        with pytest.raises(
            DisagreementError, match=r"first is '2\.bias'\); .* Likely causes: weights loaded"
        ):
            getattr(session, call)()
        session.inner.abandon()

    after(push, use, on_difference="error")


def test_zeros_of_either_sign_are_equal(caplog: pytest.LogCaptureFixture) -> None:
    def set_zero(rank: int, model: nn.Module) -> None:
        with torch.no_grad():
            model.get_parameter("2.bias")[1] = -0.0 if rank else 0.0

    assert after(set_zero, lambda session: session.consensus_distance()) == [0.0, 0.0]
    assert not caplog.records


@pytest.mark.parametrize(("strategy", "expected"), [("sgd", 1.0), ("dpsgd", 0.0)])
def test_frozen_parameters_are_looked_at_where_replicas_are_equal(strategy: str, expected: float) -> None:
    def run(rank: int) -> tuple[float, Tensor]:
        model = mlp()
        model.get_parameter("0.weight").requires_grad_(False)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
        with hocket.attach(model, optimizer, strategy) as session:
            with torch.no_grad():
                model.get_parameter("0.weight")[0, 0] += 2.0 * rank
            distance = session.consensus_distance()
            session.consensus()
            return distance, flat(model)

    (distance, one), (_, other) = on_ranks(2, run)
    assert distance == pytest.approx(expected)
    assert torch.equal(one, other)


def test_rows_that_each_rank_rescales_are_named(caplog: pytest.LogCaptureFixture) -> None:
    def run(rank: int) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(9, 4, max_norm=0.1), nn.Flatten(), nn.Linear(4, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with hocket.attach(model, optimizer, "sgd") as session:
            F.cross_entropy(model(torch.tensor([[rank], [rank + 2]])), torch.tensor([0, 1])).backward()
            optimizer.step()
            session.consensus()
            return flat(model)

    one, other = on_ranks(2, run)
    assert torch.equal(one, other)
    assert "module 0 has max_norm, by which each rank rescales the rows of its own batch" in caplog.text


def test_an_optimizer_that_remembers_otherwise_is_named(caplog: pytest.LogCaptureFixture) -> None:
    def run(rank: int) -> None:
        model = mlp(dtype=torch.float32)
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, "sgd") as session:
            for number, (x, y) in enumerate(batches(rank, 3, dtype=torch.float32)):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                if number == 0 and rank == 1:
                    for state in optimizer.state.values():
                        state["momentum_buffer"] = state["momentum_buffer"].bfloat16()
            assert session.consensus_distance() > 0

    on_ranks(2, run)
    assert "optimizers hold different state" in caplog.text
    assert '"torch.bfloat16 (7, 5)" on rank 1' in caplog.text


@pytest.mark.parametrize("by_data", [False, True])
@pytest.mark.parametrize("strategy", ["sgd", "agd"])
def test_ranks_look_while_they_train(
    strategy: str, by_data: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The rounds' look finds a difference, and from then on replicas are one model again."""
    monkeypatch.setattr(equal_replicas, "ROUNDS", 3)

    def run(rank: int) -> list[Tensor]:
        model = mlp()
        optimizer = sgd(model)
        seen = []
        with hocket.attach(model, optimizer, strategy) as session:
            given = batches(rank, 12)
            for number, (x, y) in enumerate(session.data(given) if by_data else given):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                seen.append(flat(model))
                if number == 6:
                    push(rank, model)
            return seen

    one, other = on_ranks(2, run)
    equal = [torch.equal(*pair) for pair in zip(one, other, strict=True)]
    assert equal[:7] == [True] * 7
    assert not equal[7]
    assert equal[-1]
    assert len(caplog.records) == 1
    assert re.search(
        rf"after step \d+ \(training\) the ranks' replicas differ, although strategy {strategy} keeps",
        caplog.text,
    )


def test_what_differs_within_a_step_alone_is_no_difference(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank's own perturbation, taken back before the optimizer steps, as sharpness-aware methods do."""
    monkeypatch.setattr(equal_replicas, "ROUNDS", 1)

    def run(rank: int) -> Tensor:
        model = mlp()
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, "sgd", on_difference="error"):
            for x, y in batches(rank, 6):
                directions = gradient_of(model, (x, y))
                with torch.no_grad():
                    for p, direction in zip(model.parameters(), directions, strict=True):
                        p.add_(direction, alpha=0.05)
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                with torch.no_grad():
                    for p, direction in zip(model.parameters(), directions, strict=True):
                        p.sub_(direction, alpha=0.05)
                # As far as the rounding of both allows.
                for p in model.parameters():
                    p.data = (p.data * 2**30).round() / 2**30
                optimizer.step()
            return flat(model)

    one, other = on_ranks(2, run)
    assert torch.equal(one, other)
    assert not caplog.records


def test_a_rank_that_steps_less_often_stops_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 1 drops gradients that the others step with: the rounds' look is not out of step with that."""
    monkeypatch.setattr(equal_replicas, "ROUNDS", 3)
    caplog.set_level(logging.ERROR)

    def run(rank: int) -> None:
        model = mlp()
        optimizer = sgd(model)
        session = hocket.attach(model, optimizer, "sgd")
        for number, (x, y) in enumerate(batches(rank, 12)):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            if rank == 0 or number % 2:
                optimizer.step()
        with pytest.raises(DisagreementError, match="optimizers differ"):
            session.close()
        session.inner.abandon()

    on_ranks(2, run)


def test_checksum_tells_order_and_any_bit() -> None:
    values = torch.arange(4096, dtype=torch.float32)
    moved = values.clone()
    moved[[3, 2000]] = moved[[2000, 3]]
    flipped = values.clone()
    flipped.view(torch.int32)[77] ^= 1
    assert len({checksum(values), checksum(moved), checksum(flipped)}) == 3
    assert checksum(values) == checksum(values.clone())
