"""Core's engine against the contract, and the contract against engines that break it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from hocket.session.api import Loss, StepResult, TrainStep
from hocket.session.engine import DataParallel, ReplicaEngine
from hocket.session.replica_session import ReplicaSession
from hocket.testing.engine import EngineConformance


class TestDataParallel(EngineConformance):
    engines = (DataParallel(),)


class InTwoHalves:
    """A batch in two micro-batches whose gradients are added up: another right way to make a step."""

    def __init__(self, session: ReplicaSession) -> None:
        self.session = session

    def __call__(self, batch: Any, loss: Loss) -> StepResult:
        session, (inputs, target) = self.session, batch
        session.optimizer.zero_grad()
        first = len(target) // 2
        with session.accumulate():
            begun = self.part(inputs[:first], target[:first], loss, first / len(target))
        ended = self.part(inputs[first:], target[first:], loss, 1 - first / len(target))
        session.optimizer.step()
        return StepResult(begun.loss + ended.loss, torch.cat([begun.output, ended.output]))

    def part(self, inputs: Tensor, target: Tensor, loss: Loss, share: float) -> StepResult:
        output = self.session.model(inputs)
        value = loss(output, target) * share
        value.backward()
        return StepResult(value.detach(), output.detach())


@dataclass(frozen=True)
class Custom(ReplicaEngine):
    """An engine from its step, so that each mistake below is a line or two."""

    train_step: Callable[[ReplicaSession], TrainStep]

    def open(self, session: ReplicaSession) -> TrainStep:
        return self.train_step(session)


class TestMicroBatches(EngineConformance):
    engines = (Custom(InTwoHalves),)

    # Its outputs are joined with torch.cat.
    test_an_output_may_be_of_several_tensors = None  # type: ignore[assignment]


class Plain:
    """What the engines below get wrong."""

    def __init__(self, session: ReplicaSession) -> None:
        self.session, self.model, self.optimizer = session, session.model, session.optimizer

    def __call__(self, batch: Any, loss: Loss) -> StepResult:
        self.optimizer.zero_grad()
        output = self.model(batch[0])
        value = loss(output, batch[1])
        value.backward()
        self.optimizer.step()
        return StepResult(value.detach(), output.detach())


class Forgetting(Plain):
    """Leaves out zero_grad, as if backward overwrote."""

    def __call__(self, batch: Any, loss: Loss) -> StepResult:
        output = self.model(batch[0])
        value = loss(output, batch[1])
        value.backward()
        self.optimizer.step()
        return StepResult(value.detach(), output.detach())


class WithGraph(Plain):
    def __call__(self, batch: Any, loss: Loss) -> StepResult:
        self.optimizer.zero_grad()
        output = self.model(batch[0])
        value = loss(output, batch[1])
        value.backward()
        self.optimizer.step()
        return StepResult(value, output.detach())


class Twice(Plain):
    def __call__(self, batch: Any, loss: Loss) -> StepResult:
        super().__call__(batch, loss)
        return super().__call__(batch, loss)


class Behind(Plain):
    """Trains on the batch before, as a pipeline might."""

    previous: Any = None

    def __call__(self, batch: Any, loss: Loss) -> StepResult:
        previous, self.previous = self.previous or batch, batch
        return super().__call__(previous, loss)


class Swallowing(Plain):
    def __call__(self, batch: Any, loss: Loss) -> StepResult:
        try:
            return super().__call__(batch, loss)
        except ArithmeticError:
            return super().__call__(batch, lambda output, target: output.sum())


class Alone(Plain):
    """Steps a copy of the model, without the session's hooks."""

    def __init__(self, session: ReplicaSession) -> None:
        super().__init__(session)
        self.model = copy.deepcopy(session.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)


class Cutting(Plain):
    """Drops the last sample of a batch."""

    def __call__(self, batch: Any, loss: Loss) -> StepResult:
        inputs, target = batch
        return super().__call__((inputs[:-1], target[:-1]), loss)


class Evaluating(Plain):
    def __call__(self, batch: Any, loss: Loss) -> StepResult:
        self.model.train()
        return super().__call__(batch, loss)


@pytest.mark.parametrize(
    ("train_step", "test"),
    [
        (Forgetting, "test_steps_are_those_of_one_process_on_the_joined_batches"),
        (Alone, "test_steps_are_those_of_one_process_on_the_joined_batches"),
        (Cutting, "test_every_sample_counts_once_where_ranks_have_uneven_batches"),
        (Behind, "test_the_result_is_of_this_ranks_batch"),
        (WithGraph, "test_the_result_is_of_this_ranks_batch"),
        (Twice, "test_a_call_is_a_step"),
        (Cutting, "test_the_loss_sees_every_sample_once_and_in_order"),
        (Swallowing, "test_an_error_in_the_loss_reaches_the_caller"),
        (Alone, "test_a_step_with_nan_on_one_rank_is_skipped_on_all"),
    ],
)
def test_the_suite_fails_for_what_breaks_the_contract(train_step: type[Plain], test: str) -> None:
    with pytest.raises(AssertionError):
        getattr(EngineConformance(), test)(Custom(train_step), 2)


@pytest.mark.parametrize(
    ("train_step", "error", "test"),
    [
        (Plain, AttributeError, "test_an_output_may_be_of_several_tensors"),
        (Evaluating, AssertionError, "test_modes_stay_as_they_are"),
    ],
)
def test_so_it_does_on_two_ranks(train_step: type[Plain], error: type[Exception], test: str) -> None:
    with pytest.raises(error):
        getattr(EngineConformance(), test)(Custom(train_step))
