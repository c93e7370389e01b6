"""Batches whose step is left out, or with which nothing is done: counted as without a pipeline, and no others' step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from toys import batch, chain, flat, sgd

import hocket
from hocket_eapipe import Pipeline, Policy

BATCHES = 8
POLICIES = (Policy.FLUSH, Policy.STASHING, Policy.VERTICAL_SYNC, Policy.SPECTRAIN, Policy.ELASTIC)
STRATEGIES = {"local": "local", "whole": "sgd"}

#: One that exchanges before each step, and one that does not; the others differ in versions alone.
FEW = (Policy.FLUSH, Policy.ELASTIC)

each_policy = pytest.mark.parametrize(
    "policy", [pytest.param(each, marks=[] if each in FEW else pytest.mark.full) for each in POLICIES]
)
each_strategy = pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)


def spoiled(output: Tensor, target: Tensor) -> Tensor:
    return mse_loss(output, target) * torch.nan


def plain(
    model: nn.Module, pipelines: int, strategy: str, bad: set[int], left_out: set[tuple[int, int]]
) -> Any:
    """Train whole models, one for each pipeline; return weights, steps, skipped steps and calls of the optimizer."""

    def body() -> tuple[Tensor, int, int, int]:
        rank = hocket.join().rank
        own = chain(3)
        own.load_state_dict(model.state_dict())
        optimizer = sgd(own, lr=0.05)
        calls = count_calls(optimizer)
        with hocket.attach(own, optimizer, strategy, on_nonfinite="skip") as session:
            for t, (x, y) in enumerate(session.data([batch(50 * rank + t) for t in range(BATCHES)])):
                if (rank, t) in left_out:
                    continue
                optimizer.zero_grad()
                (spoiled if t in bad and rank == 0 else mse_loss)(own(x), y).backward()
                optimizer.step()
        return flat(own), session.step, session.skipped_steps, len(calls)

    return hocket.virtual(pipelines).run(body)


def count_calls(optimizer: torch.optim.Optimizer) -> list[None]:
    calls: list[None] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(None))
    return calls


def piped(
    engine: Pipeline, ranks: int, strategy: str, bad: set[int], left_out: set[tuple[int, int]]
) -> list[tuple[Tensor, int, int, int]]:
    def body() -> tuple[Tensor, int, int, int]:
        model = chain(3)
        optimizer = sgd(model, lr=0.05)
        calls = count_calls(optimizer)
        with hocket.attach(model, optimizer, strategy, engine=engine, on_nonfinite="skip") as session:
            pipeline = session.data_rank
            for t, given in enumerate(session.data([batch(50 * pipeline + t) for t in range(BATCHES)])):
                if (pipeline, t) in left_out:
                    continue
                session.train_batch(given, spoiled if t in bad and pipeline == 0 else mse_loss)
            session.settle()
        return flat(model), session.step, session.skipped_steps, len(calls)

    return hocket.virtual(ranks).run(body)


@each_policy
@each_strategy
@pytest.mark.parametrize(("pipelines", "ranks"), [(1, 1), (1, 3), (2, 6)])
def test_a_step_with_nan_counts_as_without_a_pipeline(
    policy: Policy, strategy: str, pipelines: int, ranks: int
) -> None:
    expected = plain(chain(3), pipelines, strategy, {4}, set())
    given = piped(Pipeline(stages=3, pipelines=pipelines, policy=policy), ranks, strategy, {4}, set())
    for rank, (weights, steps, skipped, calls) in enumerate(given):
        whole, whole_steps, whole_skipped, _ = expected[rank * pipelines // ranks]
        assert (steps, skipped, calls) == (whole_steps, whole_skipped, BATCHES)
        assert weights.isfinite().all()
        if policy is Policy.FLUSH:
            torch.testing.assert_close(weights, whole)


@each_policy
@each_strategy
@pytest.mark.parametrize("left_out", [{(0, 0), (0, 7)}, {(0, 2), (1, 2)}, {(0, 1), (1, 5), (1, 6)}])
@pytest.mark.parametrize("ranks", [2, 6])
def test_a_batch_that_a_pipeline_leaves_out_is_a_step_with_the_others_gradients(
    policy: Policy, strategy: str, left_out: set[tuple[int, int]], ranks: int
) -> None:
    expected = plain(chain(3), 2, strategy, set(), left_out)
    given = piped(Pipeline(stages=3, pipelines=2, policy=policy), ranks, strategy, set(), left_out)
    for rank, (weights, steps, _, _) in enumerate(given):
        whole, whole_steps, _, _ = expected[rank * 2 // ranks]
        assert steps == whole_steps == BATCHES
        assert weights.isfinite().all()
        if policy is Policy.FLUSH:
            torch.testing.assert_close(weights, whole)


@each_policy
def test_a_loop_that_evaluates_counts_no_step(policy: Policy) -> None:
    def body() -> tuple[int, Tensor]:
        model = chain(3)
        with hocket.attach(model, sgd(model), "local", engine=Pipeline(stages=3, policy=policy)) as session:
            session.train_batch(batch(1), mse_loss)
            model.eval()
            for _ in session.data([batch(2), batch(3)]):
                pass
            model.train()
            return session.step, flat(model)

    assert [steps for steps, _ in hocket.virtual(3).run(body)] == [1, 1, 1]


class _Overflowing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, x: Tensor) -> Tensor:
        ctx.bad = bool(x[0, 0] == 7.0)
        return output.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * torch.inf if ctx.bad else gradient, None


class _Layer(nn.Linear):
    """A layer whose gradient overflows for an input that begins with 7; the layers after it have finite ones."""

    def forward(self, x: Tensor) -> Tensor:
        passed: Tensor = _Overflowing.apply(super().forward(x), x)  # type: ignore[no-untyped-call]
        return passed


@each_strategy
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_gradient_that_overflows_in_one_stage_is_left_out_of_all_where_they_clip_by_the_whole_norm(
    strategy: str, ranks: int
) -> None:
    def overflowing() -> nn.Sequential:
        model = chain(2)
        first = _Layer(5, 5).double()
        first.load_state_dict(model[0].state_dict())
        return nn.Sequential(first, *list(model)[1:])

    def data(pipeline: int) -> list[tuple[Tensor, Tensor]]:
        given = [batch(50 * pipeline + t) for t in range(5)]
        given[2][0][0, 0] = 7.0
        return given

    def body() -> tuple[Tensor, int]:
        model = overflowing()
        engine = Pipeline(stages=2, pipelines=2, policy=Policy.FLUSH, clip_grad_norm=0.1)
        with hocket.attach(model, sgd(model), strategy, engine=engine, on_nonfinite="skip") as session:
            for given in session.data(data(session.data_rank)):
                session.train_batch(given, mse_loss)
        return flat(model), session.skipped_steps

    def whole() -> Tensor:
        model = overflowing()
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, strategy, on_nonfinite="skip") as session:
            for x, y in session.data(data(session.rank)):
                optimizer.zero_grad()
                mse_loss(model(x), y).backward()
                session.clip_grad_norm_(0.1)
                optimizer.step()
        return flat(model)

    expected = hocket.virtual(2).run(whole)
    for rank, (weights, skipped) in enumerate(hocket.virtual(ranks).run(body)):
        assert skipped == 1
        torch.testing.assert_close(weights, expected[rank * 2 // ranks])
