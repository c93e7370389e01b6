"""Steps that fail, that come within others, that only some optimizers make, and gradients that no backward sends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from test_optimizers import SAM, apart
from test_residuals import FEEDBACK
from torch import Tensor
from toys import batches, flat, mlp, on_ranks, sgd

import hocket
from hocket.errors import NonFiniteError
from hocket.testing.session import inner_of

SPARSE = {"gradients": [{"collective": "sparse_allreduce", "compressor": FEEDBACK}]}


def test_an_optimizer_that_steps_alone_uses_gradients_that_were_sent_once() -> None:
    def run(rank: int) -> list[int]:
        model = mlp()
        first, second = apart(model)
        sent = []
        with hocket.attach(model, [first, second], SPARSE) as session:
            for x, y in batches(rank, 3):
                model.zero_grad()
                F.cross_entropy(model(x), y).backward()
                sent.append(session.counters.exchanges)
                first.step()
                sent.append(session.counters.exchanges)
            first.step()  # what it has used already, as torch does
            session.close()
            return sent

    assert on_ranks(2, run) == [[1, 1, 2, 2, 3, 3]] * 2


def test_a_step_that_failed_hides_no_other_optimizers() -> None:
    def run(rank: int) -> bool:
        model = mlp()
        first, second = apart(model)
        session = hocket.attach(model, [first, second], "sgd")
        ((x, y),) = batches(rank, 1)
        (F.cross_entropy(model(x), y) * torch.nan).backward()
        for optimizer in (first, second):
            with pytest.raises(NonFiniteError):
                optimizer.step()
        session.inner.abandon()
        return bool(torch.isfinite(flat(model)).all())

    assert on_ranks(2, run) == [True, True]


def test_a_step_after_one_that_failed_with_nan_is_not_left_out() -> None:
    def run(rank: int) -> tuple[int, bool]:
        model = mlp()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        ((x, y),) = batches(rank, 1)

        def closure(factor: float, told: Any) -> Any:
            optimizer.zero_grad()
            (F.cross_entropy(model(x), y) * factor).backward()
            return told

        with hocket.attach(model, optimizer, "sgd", on_nonfinite="skip") as session:
            with pytest.raises(ValueError, match="no number"):
                optimizer.step(lambda: closure(torch.nan, "no number"))
            before = flat(model)
            optimizer.step(lambda: closure(1.0, 0.5))
            return session.step, torch.equal(flat(model), before)

    assert on_ranks(2, run) == [(1, False)] * 2


class Ahead(torch.optim.Optimizer):
    """Steps with the gradient of where a first step would lead to, and sets `p.data`."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as users write it
        (group,) = self.param_groups
        before = [p.data for p in group["params"]]
        for _ in range(2):
            torch.enable_grad()(closure)()
            for p, was in zip(group["params"], before, strict=True):
                if p.grad is not None:
                    p.data = was - group["lr"] * p.grad


def test_a_step_that_is_left_out_takes_back_parameters_that_it_has_set() -> None:
    def run(rank: int) -> bool:
        model = mlp()
        optimizer = Ahead(model.parameters(), lr=0.1)
        ((x, y),) = batches(rank, 1)
        calls: list[int] = []
        with hocket.attach(model, optimizer, "sgd", on_nonfinite="skip"):
            before = flat(model)

            def closure() -> Any:
                calls.append(len(calls))
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                (loss * torch.nan if len(calls) == 2 and rank == 0 else loss).backward()
                return loss

            optimizer.step(closure)
        return torch.equal(flat(model), before)

    assert on_ranks(2, run) == [True, True]


class Own(torch.optim.SGD):
    """Adds something of its own to what it inherits."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("strategy", ["sgd", "dpsgd"])
def test_a_step_that_calls_the_one_it_inherits_is_one(strategy: str) -> None:
    def run(rank: int, kind: type[torch.optim.SGD]) -> torch.Tensor:
        model = mlp()
        sgd(model)  # torch wraps the step of each class of which there is an object
        optimizer = kind(model.parameters(), lr=0.1, momentum=0.9)
        with hocket.attach(model, optimizer, strategy) as session:
            for x, y in session.data(batches(rank, 3)):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            assert session.step == 3
        return flat(model)

    expected = on_ranks(2, lambda rank: run(rank, torch.optim.SGD))
    told = on_ranks(2, lambda rank: run(rank, Own))
    assert all(torch.equal(a, b) for a, b in zip(told, expected, strict=True))


@pytest.mark.parametrize("on_nonfinite", ["error", "skip"])
@pytest.mark.parametrize("order", [1, -1])
def test_a_scaler_leaves_out_the_step_of_the_optimizer_that_overflows(order: int, on_nonfinite: Any) -> None:
    def run(rank: int) -> list[bool]:
        model = mlp(0, torch.float32)
        optimizers = apart(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        with hocket.attach(model, optimizers, "sgd", on_nonfinite=on_nonfinite) as session:
            before = [p.detach().clone() for p in model.parameters()]
            ((x, y),) = batches(rank, 1, dtype=torch.float32)
            overflow = model.get_parameter("0.weight").register_hook(lambda gradient: gradient * torch.inf)
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            overflow.remove()
            for optimizer in optimizers[::order]:
                scaler.step(optimizer)
            scaler.update()
            assert (session.step, scaler.get_scale()) == (1, 2.0)
            return [torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True)]

    assert on_ranks(2, run) == [[True, True, False, False]] * 2


def test_a_scaler_that_leaves_out_an_accumulated_step_ends_it(tmp_path: Any) -> None:
    """On one rank only: the ranks save together all the same."""

    def run(rank: int) -> int:
        model = mlp(0, torch.float32)
        optimizer = sgd(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        with hocket.attach(model, optimizer, "dpsgd") as session:
            (x, y), (last_x, last_y) = batches(rank, 2, dtype=torch.float32)
            with session.accumulate():
                scaler.scale(F.cross_entropy(model(x), y)).backward()
            loss = F.cross_entropy(model(last_x), last_y)
            scaler.scale(loss if rank else loss * torch.inf).backward()
            scaler.step(optimizer)
            session.save(tmp_path)
            return session.step

    assert on_ranks(2, run) == [1, 1]


def test_gradients_that_a_closure_puts_there_by_hand_are_sent() -> None:
    def run(rank: int, *, by_hand: bool) -> torch.Tensor:
        model = mlp()
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, SPARSE):
            for x, y in batches(rank, 3):

                def closure(x: Any = x, y: Any = y) -> Any:
                    optimizer.zero_grad()
                    loss = F.cross_entropy(model(x), y)
                    if by_hand:
                        gradients = torch.autograd.grad(loss, list(model.parameters()))
                        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                            parameter.grad = gradient
                    else:
                        loss.backward()
                    return loss

                optimizer.step(closure)
        return flat(model)

    expected = on_ranks(2, lambda rank: run(rank, by_hand=False))
    told = on_ranks(2, lambda rank: run(rank, by_hand=True))
    assert all(torch.equal(values, expected[0]) for values in (*told, *expected))


def test_a_closure_whose_backward_reaches_nothing_on_one_rank() -> None:
    def run(rank: int) -> torch.Tensor:
        model = mlp()
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, "sgd"):
            ((x, y),) = batches(rank, 1)

            def closure() -> Any:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y) if rank else torch.zeros((), requires_grad=True)
                loss.backward()
                return loss

            optimizer.step(closure)
        return flat(model)

    first, second = on_ranks(2, run)
    assert torch.equal(first, second)
    assert not torch.equal(first, flat(mlp()))


def test_late_gradients_join_once_though_another_optimizers_part_of_the_step_is_left_out() -> None:
    def run(rank: int) -> set[str]:
        model = mlp()
        optimizers = apart(model)
        with hocket.attach(model, optimizers, "sgd", on_nonfinite="skip") as session:
            for name, parameter in model.named_parameters():
                inner_of(session).stale.add(name, torch.ones_like(parameter))
            ((x, y),) = batches(rank, 1)
            for optimizer, factor in zip(optimizers, (1.0, torch.nan), strict=True):
                model.zero_grad()
                (F.cross_entropy(model(x), y) * factor).backward()
                optimizer.step()
            assert session.skipped_steps == 1
            return set(inner_of(session).stale.state_dict())

    assert on_ranks(2, run) == [{"2.weight", "2.bias"}] * 2


def sam_steps(model: torch.nn.Module, optimizer: SAM, data: Any) -> None:
    for x, y in data:

        def closure(x: Any = x, y: Any = y) -> Any:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        closure()
        optimizer.step(closure)


def test_a_checkpoint_holds_what_an_optimizer_within_another_remembers(tmp_path: Any) -> None:
    def run(rank: int, data: slice, *, resume: bool) -> torch.Tensor:
        model = mlp()
        optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
        with hocket.attach(model, optimizer, "sgd") as session:
            if resume:
                session.load(tmp_path)
            assert optimizer.param_groups is optimizer.base_optimizer.param_groups
            sam_steps(model, optimizer, batches(rank, 4)[data])
            if data.stop == 2:
                session.save(tmp_path)
        return flat(model)

    straight = on_ranks(2, lambda rank: run(rank, slice(0, 4), resume=False))
    on_ranks(2, lambda rank: run(rank, slice(0, 2), resume=False))
    resumed = on_ranks(2, lambda rank: run(rank, slice(2, 4), resume=True))
    assert all(torch.equal(a, b) for a, b in zip(resumed, straight, strict=True))


def test_what_optimizers_within_others_remember_is_averaged_before_replicas_stay_equal() -> None:
    def run(rank: int) -> torch.Tensor:
        model = mlp()
        optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
        strategy = {
            "parameters": [{"collective": "gossip", "topology": "ring"}],
            "phases": {2: {"gradients": [{"collective": "allreduce"}], "parameters": []}},
        }
        with hocket.attach(model, optimizer, strategy) as session:
            sam_steps(model, optimizer, batches(rank, 4))
            assert session.inner.replicas_equal
        return flat(model)

    first, second, third = on_ranks(3, run)
    assert torch.equal(first, second)
    assert torch.equal(first, third)


def test_groups_may_hold_functions() -> None:
    def run(rank: int) -> None:
        model = mlp()
        groups = [{"params": list(model.parameters()), "scale": lambda step: step}]
        hocket.attach(model, torch.optim.SGD(groups, lr=0.1), "sgd").close()

    on_ranks(2, run)


@pytest.mark.parametrize("by_hand", [True, False])
@pytest.mark.parametrize("strategy", ["sgd", "dpsgd", "periodic_average"])
def test_steps_by_hand_that_exchange_nothing_are_told(
    strategy: str, by_hand: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Gradients are exchanged in backward all the same; parameters only after a step of the optimizer."""

    def run(rank: int) -> tuple[Tensor, int]:
        model = mlp()
        with hocket.attach(model, optimizer := sgd(model), strategy) as session:
            for x, y in batches(rank, 3):
                model.zero_grad()
                F.cross_entropy(model(x), y).backward()
                if not by_hand:
                    optimizer.step()
                    continue
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.sub_(0.1 * cast(Tensor, parameter.grad))
            session.settle()
            return flat(model), session.counters.exchanges

    (first, sent), (second, _) = on_ranks(2, run)
    assert torch.equal(first, second) == (strategy == "sgd" or sent > 0)
    assert (sent > 0) == (strategy == "sgd" or (strategy == "dpsgd" and not by_hand))
    told = [line for line in caplog.messages if "the attached optimizer never stepped" in line]
    assert len(told) == (by_hand and strategy != "sgd")
