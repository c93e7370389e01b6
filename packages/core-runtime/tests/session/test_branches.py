"""What a session promises, in each way that gradients may go: exchanged, local, stale, towards outer parameters."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toys import batches, flat, mlp, on_ranks, sgd

import hocket
from hocket.errors import HocketError, ReplacedError

EXCHANGED: dict[str, tuple[Any, ...]] = {
    "whole": ("sgd",),
    "in layers": ("agd", "gradients.0.segments=layers"),
    "compressed": (
        {
            "gradients": [
                {
                    "collective": "sparse_allreduce",
                    "compressor": {
                        "name": "error_feedback",
                        "compressor": {"name": "topk", "density": 1.0},
                    },
                }
            ]
        },
    ),
}
LOCAL: dict[str, tuple[Any, ...]] = {
    "local": ("local",),
    "gossip": ("dpsgd",),
    "push-sum": ("sgp",),
    "late": ("overlap_sgp",),
    "before the next forward": ("dpsgd", "parameters.0.overlap=forward"),
    "average": ("periodic_average", "parameters.0.every=2"),
    "outer": (
        {
            "parameters": [
                {
                    "every": 2,
                    "collective": "allreduce",
                    "outer": {"name": "sgd", "lr": 0.7, "momentum": 0.9, "nesterov": True},
                }
            ]
        },
    ),
}
BRANCHES = {**EXCHANGED, **LOCAL}

each_branch = pytest.mark.parametrize("branch", BRANCHES)
each_local_branch = pytest.mark.parametrize("branch", LOCAL)


def composed(branch: str) -> hocket.Strategy:
    return hocket.compose(*BRANCHES[branch])


@pytest.mark.one_of_each
@each_branch
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_step_with_nan_is_left_out_and_counted(branch: str, value: float) -> None:
    def run(rank: int) -> tuple[bool, int, int, bool]:
        model = mlp()
        optimizer = sgd(model)
        still = True
        with hocket.attach(model, optimizer, composed(branch), on_nonfinite="skip") as session:
            for number, (x, y) in enumerate(session.data(batches(rank, 7))):
                spoiled = rank == 1 and number == 3
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                before = flat(model)
                (loss * value if spoiled else loss).backward()
                optimizer.step()
                if spoiled and branch == "local":
                    still = torch.equal(before, flat(model))
            session.consensus()
            return bool(flat(model).isfinite().all()), session.skipped_steps, session.step, still

    ranks = on_ranks(2, run)
    skipped = [1, 1] if branch in EXCHANGED else [0, 1]
    assert ranks == [(True, each, 7, True) for each in skipped]


def test_a_step_that_is_left_out_alone_counts_no_distance_from_outer_parameters() -> None:
    # The culprit leaves out all steps of a period: the others' mean distance is the outer parameters' step.
    outer = {
        "parameters": [
            {"every": 2, "collective": "allreduce", "outer": {"name": "sgd", "lr": 1.0, "momentum": 0.0}}
        ]
    }

    def run(rank: int) -> Tensor:
        model = mlp()
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, hocket.compose(outer), on_nonfinite="skip") as session:
            for x, y in session.data(batches(rank, 2)):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                (loss * torch.nan if rank == 2 else loss).backward()
                optimizer.step()
        return flat(model)

    def alone(rank: int) -> Tensor:
        model = mlp()
        optimizer = sgd(model)
        for x, y in batches(rank, 2):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        return flat(model)

    torch.testing.assert_close(on_ranks(3, run)[0], (alone(0) + alone(1)) / 2)


@each_branch
def test_an_inner_accumulation_does_not_end_the_outer_one(branch: str) -> None:
    def run(rank: int) -> tuple[bool, float]:
        model = mlp()
        data = batches(rank, 3)
        summed = torch.zeros_like(flat(model))
        with hocket.attach(model, sgd(model), composed(branch)) as session:
            before = session.counters.bytes_sent
            with session.accumulate():
                for number, (x, y) in enumerate(data):
                    gradient = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
                    summed += torch.cat([each.reshape(-1) for each in gradient])
                    if number == 1:
                        with session.accumulate():
                            F.cross_entropy(model(x), y).backward()
                    else:
                        F.cross_entropy(model(x), y).backward()
            own = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
            sent = session.counters.bytes_sent - before
            session.optimizer.step()
        return torch.allclose(own, summed), sent

    assert on_ranks(2, run) == [(True, 0.0)] * 2


def thaw(model: nn.Module) -> None:
    model.get_parameter("0.bias").requires_grad_(True)


def add_layer(model: nn.Module) -> None:
    model.append(nn.Linear(3, 3).double())  # type: ignore[operator]


@pytest.mark.one_of_each
@each_branch
@pytest.mark.parametrize("change", [thaw, add_layer])
@pytest.mark.parametrize("when", ["after the error", "at once"])
def test_a_changed_model_is_closed_and_attached_again(branch: str, change: Any, when: str) -> None:
    def run(rank: int) -> tuple[Tensor, Tensor]:
        model = mlp()
        model.get_parameter("0.bias").requires_grad_(False)
        optimizer = sgd(model)
        session = hocket.attach(model, optimizer, composed(branch))
        step(model, optimizer, rank)
        change(model)
        if when == "after the error":
            with pytest.raises(ReplacedError):
                step(model, optimizer, rank)
        session.close()
        at_close = flat(model)
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, composed(branch), initial="keep"):
            step(model, optimizer, rank)
        with pytest.raises(HocketError, match="attach again"):
            session.settle()
        return at_close, flat(model)

    for before, after in on_ranks(2, run):
        assert before.isfinite().all()
        assert not torch.equal(before, after)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    x, y = batches(rank, 1)[0]
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


@pytest.mark.parametrize("branch", ["average", "gossip", "before the next forward"])
def test_close_merges_what_is_under_way_of_a_model_that_was_changed_since(branch: str) -> None:
    def run(rank: int, *, changes: bool) -> Tensor:
        model = mlp()
        model.get_parameter("0.bias").requires_grad_(False)
        optimizer = sgd(model)
        session = hocket.attach(model, optimizer, composed(branch))
        step(model, optimizer, rank)
        step(model, optimizer, rank)
        if changes:
            thaw(model)
        session.close()
        return flat(model)

    changed, plain = (on_ranks(2, partial(run, changes=changes)) for changes in (True, False))
    for one, other in zip(changed, plain, strict=True):
        assert torch.equal(one, other)


@pytest.mark.one_of_each
@each_branch
@pytest.mark.parametrize("how", ["eval mode", "no gradients"])
def test_an_evaluation_through_session_data_changes_no_training(branch: str, how: str) -> None:
    def run(rank: int, *, evaluates: bool) -> tuple[Tensor, int, int, float]:
        model = mlp()
        optimizer = sgd(model)
        counted = 0.0
        with hocket.attach(model, optimizer, composed(branch)) as session:
            for _ in range(2):
                train_pass(session, model, optimizer, batches(rank, 5))
                if evaluates:
                    model.train(how != "eval mode")
                    with torch.no_grad() if how == "no gradients" else contextlib.nullcontext():
                        for x, _y in session.data(batches(rank, 3 - rank)):
                            counted += session.weight
                            model(x)
                    model.train()
            passes = session.inner.epochs.ended
        return flat(model), session.step, passes, counted

    looked, plain = (on_ranks(2, partial(run, evaluates=each)) for each in (True, False))
    for rank, (one, other) in enumerate(zip(looked, plain, strict=True)):
        assert torch.equal(one[0], other[0])
        assert one[1:3] == other[1:3] == (10, 2)
        assert one[3] == 2 * (3 - rank)  # repeated ones count nothing


def train_pass(
    session: hocket.Session, model: nn.Module, optimizer: torch.optim.Optimizer, data: Any
) -> None:
    for x, y in session.data(data):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@each_branch
def test_a_model_that_is_trained_in_eval_mode_is_trained(branch: str) -> None:
    # Fine-tuning with BatchNorm as it is; rank 1 leaves a batch out, and has fewer.
    def run(rank: int, *, evaluating: bool) -> tuple[Tensor, int, int]:
        model = mlp().train(not evaluating)
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, composed(branch)) as session:
            for _ in range(2):
                for number, (x, y) in enumerate(session.data(batches(rank, 5 - rank))):
                    if (rank, number) == (1, 2):
                        continue
                    optimizer.zero_grad()
                    F.cross_entropy(model(x), y).backward()
                    optimizer.step()
            passes = session.inner.epochs.ended
        return flat(model), session.step, passes

    one, other = (on_ranks(2, partial(run, evaluating=each)) for each in (True, False))
    for (mine, *counts), (plain, *others) in zip(one, other, strict=True):
        assert torch.equal(mine, plain)
        assert counts == others == [10, 2]


@each_branch
def test_a_second_session_in_the_loop_of_the_first_counts_no_repeated_batch(branch: str) -> None:
    def run(rank: int, *, shares: bool) -> Tensor:
        first, second = mlp(1), mlp(2)
        data = batches(rank, 6 - 2 * rank)
        one, other = sgd(first), sgd(second)
        with (
            hocket.attach(first, one, composed(branch)) as session,
            hocket.attach(second, other, composed(branch)) as follower,
        ):
            if not shares:
                train_pass(follower, second, other, data)
            for x, y in session.data(data if shares else []):
                for model, optimizer in ((first, one), (second, other)):
                    optimizer.zero_grad()
                    F.cross_entropy(model(x), y).backward()
                    optimizer.step()
            follower.settle()
        return flat(second)

    shared, own = (on_ranks(2, partial(run, shares=each)) for each in (True, False))
    for mine, alone in zip(shared, own, strict=True):
        torch.testing.assert_close(mine, alone)


def test_close_after_the_error_of_one_rank_waits_for_nobody() -> None:
    def run(rank: int) -> bool:
        model = mlp()
        optimizer = sgd(model)
        session = hocket.attach(model, optimizer, "dpsgd")
        if rank == 0:
            session.inner.abandon()
            return True
        add_layer(model)
        with pytest.raises(ReplacedError):
            session.settle()
        session.close()
        return True

    assert on_ranks(2, run) == [True, True]
