"""The contract of `hocket.session.engine` as tests, on 1, 2 and 4 virtual ranks.

An engine's tests are a subclass of `EngineConformance` with one line:

    class TestDataParallel(EngineConformance):
        engines = (DataParallel(),)

Shapes: B samples of a batch, 6 inputs, 3 classes. Everything is float64, so that another order of summation shows in
the 15th digit, and a mistake in the first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import hocket
from hocket.plain import Tree
from hocket.session.api import StepResult, TrainStep
from hocket.session.engine import ReplicaEngine
from hocket.session.replica_session import ReplicaSession
from hocket.session.session import Session

if TYPE_CHECKING:
    import pytest

__all__ = ["EngineConformance"]

T = TypeVar("T")
_Batch = tuple[Tensor, Tensor]

_STEPS = 4


class EngineConformance:
    """The conformance tests of engines, for subclasses named `Test...` that list them.

    Every test runs for every engine. An engine's step uses the given batch for forward and backward, and has stepped
    the session's optimizer when it returns, so that with recipe sgd it is plain SGD. Batches have 4 samples and
    more for each rank.

    Attributes:
        engines: the engines to test, with different fields.
    """

    engines: ClassVar[tuple[ReplicaEngine, ...]]

    sizes: ClassVar[tuple[int, ...]] = (1, 2, 4)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "engine" in metafunc.fixturenames:
            metafunc.parametrize("engine", self.engines, ids=repr)
        if "size" in metafunc.fixturenames:
            metafunc.parametrize("size", self.sizes)

    def test_it_is_a_configuration(self, engine: ReplicaEngine) -> None:
        assert dataclasses.is_dataclass(engine)
        assert dataclasses.replace(engine) == engine
        assert hash(dataclasses.replace(engine)) == hash(engine)

    def test_steps_are_those_of_one_process_on_the_joined_batches(
        self, engine: ReplicaEngine, size: int
    ) -> None:
        data = [[_batch(rank, step) for step in range(_STEPS)] for rank in range(size)]

        def rank_body(session: Session, train_step: TrainStep) -> None:
            for batch in session.data(data[session.rank]):
                train_step(batch, cross_entropy)

        expected = _reference([_joined([of_rank[step] for of_rank in data]) for step in range(_STEPS)])
        for _, parameters in _on_ranks(engine, size, rank_body):
            torch.testing.assert_close(parameters, expected, rtol=1e-12, atol=1e-13)

    def test_every_sample_counts_once_where_ranks_have_uneven_batches(
        self, engine: ReplicaEngine, size: int
    ) -> None:
        """Rank r has r steps less than rank 0, and r samples more in each of its batches."""
        counts = [max(0, _STEPS - rank) for rank in range(size)]
        data = [[_batch(rank, step, 4 + rank) for step in range(count)] for rank, count in enumerate(counts)]

        def rank_body(session: Session, train_step: TrainStep) -> int:
            for batch in session.data(data[session.rank], weight=lambda batch: len(batch[1])):
                train_step(batch, cross_entropy)
            return session.step

        steps = [[of_rank[step] for of_rank in data if step < len(of_rank)] for step in range(_STEPS)]
        expected = _reference([_joined(batches) for batches in steps])
        for num_steps, parameters in _on_ranks(engine, size, rank_body):
            assert num_steps == _STEPS
            torch.testing.assert_close(parameters, expected, rtol=1e-12, atol=1e-13)

    def test_the_result_is_of_this_ranks_batch(self, engine: ReplicaEngine, size: int) -> None:
        def rank_body(session: Session, train_step: TrainStep) -> None:
            for step in range(_STEPS):
                batch = _batch(session.rank, step)
                with torch.no_grad():
                    output = session.model(batch[0])
                    loss = cross_entropy(output, batch[1])
                result = train_step(batch, cross_entropy)
                assert isinstance(result, StepResult)
                assert result.loss.shape == ()
                assert not result.loss.requires_grad, "a loss with a graph keeps the batch's memory"
                assert not result.output.requires_grad, "an output with a graph keeps the batch's memory"
                torch.testing.assert_close(result.loss, loss, rtol=1e-12, atol=1e-13)
                torch.testing.assert_close(result.output, output, rtol=1e-12, atol=1e-13)

        _on_ranks(engine, size, rank_body)

    def test_a_call_is_a_step(self, engine: ReplicaEngine, size: int) -> None:
        def rank_body(session: Session, train_step: TrainStep) -> None:
            stepped = []
            handle = session.optimizer.register_step_post_hook(lambda *_: stepped.append(session.step))
            for step in range(_STEPS):
                train_step(_batch(session.rank, step), cross_entropy)
                assert session.step == step + 1
                assert len(stepped) == step + 1
            handle.remove()

        _on_ranks(engine, size, rank_body)

    def test_the_loss_sees_every_sample_once_and_in_order(self, engine: ReplicaEngine, size: int) -> None:
        def rank_body(session: Session, train_step: TrainStep) -> None:
            seen: list[_Batch] = []

            def loss(output: Tensor, target: Tensor) -> Tensor:
                seen.append((output.detach(), target))
                return cross_entropy(output, target)

            for step in range(_STEPS):
                seen.clear()
                batch = _batch(session.rank, step)
                result = train_step(batch, loss)
                assert result is not None
                outputs, targets = _joined(seen)
                assert torch.equal(targets, batch[1])
                torch.testing.assert_close(outputs, result.output, rtol=1e-12, atol=1e-13)

        _on_ranks(engine, size, rank_body)

    def test_an_error_in_the_loss_reaches_the_caller(self, engine: ReplicaEngine, size: int) -> None:
        mistake = ArithmeticError("the loss of rank 0 fails")

        def rank_body(session: Session, train_step: TrainStep) -> BaseException | None:
            def loss(output: Tensor, target: Tensor) -> Tensor:
                if session.rank == 0 and session.step == 1:
                    raise mistake
                return cross_entropy(output, target)

            for step in range(_STEPS):
                train_step(_batch(session.rank, step), loss)
            return None

        raised = None
        try:
            _on_ranks(engine, size, rank_body)
        except ArithmeticError as error:
            raised = error
        assert raised is mistake

    def test_a_step_with_nan_on_one_rank_is_skipped_on_all(self, engine: ReplicaEngine, size: int) -> None:
        def rank_body(session: Session, train_step: TrainStep) -> int:
            def loss(output: Tensor, target: Tensor) -> Tensor:
                bad = session.rank == size - 1 and session.step == 1
                return cross_entropy(output, target) * (float("nan") if bad else 1.0)

            for step in range(_STEPS):
                train_step(_batch(session.rank, step), loss)
            return session.skipped_steps

        steps = [step for step in range(_STEPS) if step != 1]
        expected = _reference([_joined([_batch(rank, step) for rank in range(size)]) for step in steps])
        for num_skipped, parameters in _on_ranks(engine, size, rank_body, on_nonfinite="skip"):
            assert num_skipped == 1
            torch.testing.assert_close(parameters, expected, rtol=1e-12, atol=1e-13)

    def test_an_output_may_be_of_several_tensors(self, engine: ReplicaEngine) -> None:
        def rank_body(session: Session, train_step: TrainStep) -> None:
            def loss(output: Tree, target: Tensor) -> Tensor:
                hidden: Tensor = output["hidden"][0].square().mean()
                return cross_entropy(output["logits"], target) + hidden

            result = train_step(_batch(session.rank, 0), loss)
            assert result is not None
            assert result.output.keys() == {"logits", "hidden"}
            assert not result.output["logits"].requires_grad
            assert not result.output["hidden"][0].requires_grad

        _on_ranks(engine, 2, rank_body, model=_Dictionary)

    def test_modes_stay_as_they_are(self, engine: ReplicaEngine) -> None:
        def rank_body(session: Session, train_step: TrainStep) -> None:
            for training in (False, True):
                session.model.train(training)
                train_step(_batch(session.rank, 0), cross_entropy)
                assert all(module.training is training for module in session.model.modules())
                assert torch.is_grad_enabled()

        _on_ranks(engine, 2, rank_body)


class _Dictionary(nn.Module):
    """A model whose output is a dictionary, as those of language models are."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.second = nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Tree:
        hidden = torch.tanh(self.first(inputs))
        return {"logits": self.second(hidden), "hidden": (hidden,)}


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    # With momentum and decay: a gradient that was not cleared, or a step too many, shows in all steps after it.
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def _batch(rank: int, step: int, samples: int = 4) -> _Batch:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    inputs = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, 3, (samples,), generator=generator)


def _joined(batches: Sequence[_Batch]) -> _Batch:
    return torch.cat([inputs for inputs, _ in batches]), torch.cat([targets for _, targets in batches])


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def _seeded(model: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return model().double()


def _reference(batches: Sequence[_Batch]) -> Tensor:
    """Train in one process, without Hocket; return the parameters."""
    model = _seeded(_mlp)
    optimizer = _sgd(model)
    for inputs, targets in batches:
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return _flat(model)


def _on_ranks(
    engine: ReplicaEngine,
    size: int,
    body: Callable[[Session, TrainStep], T],
    *,
    model: Callable[[], nn.Module] = _mlp,
    on_nonfinite: Literal["error", "skip"] = "error",
) -> list[tuple[T, Tensor]]:
    """Run `body` on virtual ranks with recipe sgd; return what it returned and the parameters, by rank."""

    def run() -> tuple[T, Tensor]:
        net = _seeded(model)
        with hocket.attach(net, _sgd(net), "sgd", on_nonfinite=on_nonfinite) as session:
            assert isinstance(session.inner, ReplicaSession)
            result = body(session, engine.open(session.inner))
        return result, _flat(net)

    return hocket.virtual(size).run(run)
