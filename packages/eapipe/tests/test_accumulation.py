"""Batches in several calls of `train_batch`, and gradients clipped by the whole model's norm: as one process."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from toys import batch, chain, flat, sgd, trained

import hocket
from hocket.errors import CheckpointError
from hocket_eapipe import Pipeline, Policy

STAGES, PARTS, STEPS = 3, 2, 5


def share_of_loss(output: Tensor, target: Tensor) -> Tensor:
    return mse_loss(output, target) / PARTS


def whole(t: int) -> tuple[Tensor, Tensor]:
    """Return the batch of step t, from 1, of which each part is one of `batch`."""
    inputs, targets = zip(*(batch(part) for part in range((t - 1) * PARTS + 1, t * PARTS + 1)), strict=True)
    return torch.cat(inputs), torch.cat(targets)


def in_parts(engine: Pipeline, ranks: int, strategy: Any = None) -> list[Tensor]:
    """Return each rank's weights after `STEPS` steps, each of `PARTS` calls."""

    def body() -> Tensor:
        net = chain(STAGES)
        with hocket.attach(net, sgd(net), strategy or {}, engine=engine) as session:
            for part in range(1, STEPS * PARTS + 1):
                with session.accumulate() if part % PARTS else contextlib.nullcontext():
                    session.train_batch(batch(part), share_of_loss)
            assert session.step == STEPS
        return flat(net)

    return hocket.virtual(ranks).run(body)


@pytest.mark.one_of_each
@pytest.mark.parametrize("ranks", [1, STAGES])
@pytest.mark.parametrize("policy", list(Policy))
def test_parts_of_a_batch_are_that_batch(policy: Policy, ranks: int) -> None:
    """Under every policy, whose versions and replicas count batches, not calls."""
    engine = Pipeline(stages=STAGES, policy=policy)
    expected = trained(engine, STEPS, ranks=ranks, model=lambda: chain(STAGES), batches=whole)
    for found, (weights, _, _) in zip(in_parts(engine, ranks), expected, strict=True):
        torch.testing.assert_close(found, weights, rtol=1e-9, atol=1e-11)


def test_an_inner_accumulation_does_not_end_the_outer_one() -> None:
    def body(*, nested: bool) -> Tensor:
        net = chain(STAGES)
        with hocket.attach(net, sgd(net), {}, engine=Pipeline(stages=STAGES)) as session:
            for step in range(3):
                with session.accumulate():
                    with session.accumulate() if nested else contextlib.nullcontext():
                        session.train_batch(batch(3 * step + 1), share_of_loss)
                    session.train_batch(batch(3 * step + 2), share_of_loss)
                session.train_batch(batch(3 * step + 3), share_of_loss)
            assert session.step == 3
        return flat(net)

    [nested] = hocket.virtual(1).run(partial(body, nested=True))
    [plain] = hocket.virtual(1).run(partial(body, nested=False))
    assert torch.equal(nested, plain)


def test_parts_that_are_cut_into_micro_batches() -> None:
    expected = trained(
        Pipeline(stages=STAGES, policy=Policy.FLUSH), STEPS, model=lambda: chain(STAGES), batches=whole
    )
    for found in in_parts(Pipeline(stages=STAGES, policy=Policy.FLUSH, micro_batches=3), STAGES):
        torch.testing.assert_close(found, expected[0][0], rtol=1e-9, atol=1e-11)


def clipped(steps: Sequence[tuple[Tensor, Tensor]], norm: float) -> Tensor:
    """Train in one process."""
    net = chain(STAGES)
    optimizer = sgd(net)
    for inputs, target in steps:
        optimizer.zero_grad()
        mse_loss(net(inputs), target).backward()
        nn.utils.clip_grad_norm_(net.parameters(), norm)
        optimizer.step()
    return flat(net)


@pytest.mark.one_of_each
@pytest.mark.parametrize("ranks", [1, STAGES])
@pytest.mark.parametrize("norm", [0.05, 1e6])
def test_clipping_is_by_the_norm_of_all_stages(norm: float, ranks: int) -> None:
    engine = Pipeline(stages=STAGES, policy=Policy.FLUSH, clip_grad_norm=norm)
    expected = clipped([whole(t) for t in range(1, STEPS + 1)], norm)
    for found in in_parts(engine, ranks):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


#: Batches of three pipelines, one of which runs out of data in the middle of an accumulation, one with two of a step.
COUNTS = (4, 3, 2)


@pytest.mark.parametrize("norm", [None, 0.05])
def test_pipelines_with_uneven_parts(norm: float | None) -> None:
    """Each step is that of the mean over all parts that any pipeline has, by their weights; clipped as that."""
    sizes = {(pipeline, number): 2 + pipeline + number for pipeline in range(3) for number in range(4)}

    def part(pipeline: int, number: int) -> tuple[Tensor, Tensor]:
        return batch(10 * pipeline + number, samples=sizes[pipeline, number])

    def body() -> Tensor:
        net = chain(STAGES)
        engine = Pipeline(stages=STAGES, pipelines=3, policy=Policy.FLUSH, clip_grad_norm=norm)
        with hocket.attach(net, sgd(net), "sgd", engine=engine) as session:
            own = [part(session.data_rank, number) for number in range(COUNTS[session.data_rank])]
            data = session.data(own, weight=lambda each: len(each[0]) / 4)
            for number, each in enumerate(data, start=1):
                with session.accumulate() if number % PARTS else contextlib.nullcontext():
                    session.train_batch(each, share_of_loss)
            session.consensus()
        return flat(net)

    steps = []
    for first in (0, PARTS):
        real = [part(p, n) for p in range(3) for n in range(first, first + PARTS) if n < COUNTS[p]]
        steps.append((torch.cat([inputs for inputs, _ in real]), torch.cat([target for _, target in real])))
    for found in hocket.virtual(3 * STAGES).run(body):
        torch.testing.assert_close(found, clipped(steps, norm or 1e9), rtol=1e-9, atol=1e-11)


def test_no_checkpoint_in_the_middle_of_a_batch(tmp_path: Path) -> None:
    def body() -> None:
        net = chain(2)
        with hocket.attach(net, sgd(net), {}, engine=Pipeline(stages=2)) as session:
            with session.accumulate():
                session.train_batch(batch(1), share_of_loss)
                with pytest.raises(
                    CheckpointError, match=r"save after a batch outside of session\.accumulate"
                ):
                    session.save(tmp_path)
            session.train_batch(batch(2), share_of_loss)
            session.save(tmp_path)

    hocket.virtual(2).run(body)
