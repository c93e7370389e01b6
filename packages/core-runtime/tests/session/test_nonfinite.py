"""NaN and Inf in what is sent: an error that names parameter, rank and step, or a step that all leave out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toys import GRADIENT_STRATEGIES, Batch, batches, flat, mlp, on_ranks, reference, replicas, sgd, train

import hocket
from hocket.errors import NonFiniteError

CULPRIT, STEP = 2, 3


def loop(
    session: hocket.Session, model: nn.Module, optimizer: torch.optim.Optimizer, data: Sequence[Batch]
) -> None:
    for x, y in session.data(data):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def poisoned(rank: int, value: float = torch.nan) -> list[Batch]:
    """Return five batches; the culprit's at STEP has a `value` in it."""
    data = batches(rank, 5)
    if rank == CULPRIT:
        data[STEP][0][1, 1] = value
    return data


def synchronous_steps() -> list[list[tuple[Batch, float]]]:
    columns = zip(*(batches(rank, 5) for rank in range(4)), strict=True)
    return [[(batch, 1.0) for batch in column] for column in columns]


@pytest.mark.one_of_each
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("strategy", GRADIENT_STRATEGIES)
def test_error_names_parameter_rank_and_step(strategy: tuple[str, ...], value: float) -> None:
    def fails(rank: int) -> str:
        model = mlp()
        optimizer = sgd(model)

        def poison(gradient: Tensor) -> Tensor:
            return gradient + value if rank == CULPRIT and session.step == STEP else gradient

        model.get_parameter("0.bias").register_hook(poison)
        with hocket.attach(model, optimizer, hocket.compose(*strategy)) as session:
            with pytest.raises(NonFiniteError) as raised:
                loop(session, model, optimizer, batches(rank, 5))
            assert session.step == STEP
        return str(raised.value)

    told = on_ranks(4, fails)
    for rank, message in enumerate(told):
        if rank == CULPRIT:
            assert message.startswith(
                f"the gradients of rank {CULPRIT} at step {STEP} hold NaN or Inf, in 0.bias. "
                "hocket.attach(..., on_nonfinite="
            )
        else:
            assert message == (
                f"the gradients of step {STEP} hold NaN or Inf from another rank than {rank}, whose own message names "
                "the parameter. on_nonfinite='skip' leaves such steps out on all ranks"
            )


def test_parameters_are_as_before_the_step() -> None:
    def survive(rank: int) -> Tensor:
        model = mlp()
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, "agd") as session, pytest.raises(NonFiniteError):
            loop(session, model, optimizer, poisoned(rank))
        return flat(model)

    steps = synchronous_steps()
    for given in on_ranks(4, survive):
        torch.testing.assert_close(given, reference(steps[:STEP]))


@pytest.mark.parametrize("strategy", GRADIENT_STRATEGIES)
def test_skip_leaves_the_step_out_on_all_ranks(strategy: tuple[str, ...]) -> None:
    def skip(rank: int) -> tuple[Tensor, int, int]:
        model = mlp()
        optimizer = sgd(model)
        strategy_ = hocket.compose(*strategy)
        with hocket.attach(model, optimizer, strategy_, on_nonfinite="skip") as session:
            loop(session, model, optimizer, poisoned(rank))
            return flat(model), session.skipped_steps, session.step

    steps = synchronous_steps()
    del steps[STEP]
    for given, skipped, step in on_ranks(4, skip):
        torch.testing.assert_close(given, reference(steps), rtol=1e-12, atol=1e-13)
        assert (skipped, step) == (1, 5)


def test_large_gradients_are_no_error() -> None:
    """Their sum overflows, none of them does."""

    def large(rank: int) -> Tensor:
        model = torch.nn.Linear(4, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with hocket.attach(model, optimizer, "sgd") as session:
            for x in session.data([torch.full((1, 4), 2e38)]):
                model(x).sum().backward()
                optimizer.step()
        assert model.weight.grad is not None
        return model.weight.grad

    for gradient in on_ranks(2, large):
        assert torch.equal(gradient, torch.full((1, 4), 2e38))


def test_parameters_that_are_about_to_be_sent() -> None:
    with pytest.raises(
        NonFiniteError, match=rf"parameter 0\.weight, .* of rank {CULPRIT} is NaN or Inf after step 4"
    ):
        on_ranks(4, lambda rank: train(("periodic_average", "parameters.0.every=1"), poisoned(rank)))


def scaled(rank: int, strategy: Sequence[str], data: Sequence[Batch], **options: Any) -> tuple[Tensor, float]:
    model = mlp()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with hocket.attach(model, optimizer, hocket.compose(*strategy), **options) as session:
        for x, y in session.data(data):
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
        assert session.step == 5
        assert session.skipped_steps == 0
    return flat(model), scaler.get_scale()


@pytest.mark.one_of_each
@pytest.mark.parametrize("on_nonfinite", ["error", "skip"])
@pytest.mark.parametrize("strategy", GRADIENT_STRATEGIES)
def test_grad_scaler_sees_the_inf_on_all_ranks(strategy: tuple[str, ...], on_nonfinite: str) -> None:
    steps = synchronous_steps()
    del steps[STEP]
    given = on_ranks(
        4, lambda rank: scaled(rank, strategy, poisoned(rank, torch.inf), on_nonfinite=on_nonfinite)
    )
    for of_rank, scale in given:
        torch.testing.assert_close(of_rank, reference(steps), rtol=1e-12, atol=1e-13)
        assert scale == 2.0


def test_grad_scaler_after_an_accumulation_within_the_batch() -> None:
    """A step that no optimizer made is a step all the same."""

    def run(rank: int) -> Tensor:
        model = mlp()
        optimizer = sgd(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        with hocket.attach(model, optimizer, "agd") as session:
            for x, y in session.data(poisoned(rank, torch.inf)):
                optimizer.zero_grad()
                with session.accumulate():
                    scaler.scale(F.cross_entropy(model(x[:2]), y[:2]) / 2).backward()
                scaler.scale(F.cross_entropy(model(x[2:]), y[2:]) / 2).backward()
                scaler.step(optimizer)
                scaler.update()
            assert session.step == 5
        return flat(model)

    steps = synchronous_steps()
    del steps[STEP]
    for of_rank in on_ranks(4, run):
        torch.testing.assert_close(of_rank, reference(steps), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("every", [1, 2, 4])
def test_grad_scaler_with_periodic_average(every: int) -> None:
    """Only the rank that found Inf makes no step; it is there when the replicas are averaged."""
    data: list[list[Batch | None]] = [[*batches(rank, 5)] for rank in range(4)]
    data[CULPRIT][STEP] = None
    strategy = ("periodic_average", f"parameters.0.every={every}")
    given = on_ranks(4, lambda rank: scaled(rank, strategy, poisoned(rank, torch.inf)))
    for rank, ((of_rank, scale), expected) in enumerate(zip(given, replicas(data, every), strict=True)):
        torch.testing.assert_close(of_rank, expected, rtol=1e-12, atol=1e-13)
        assert scale == (2.0 if rank == CULPRIT else 4.0)


def test_grad_scaler_where_local_data_end_in_an_accumulation() -> None:
    """What the rank had got by then is unscaled like everything else."""

    def run(rank: int) -> Tensor:
        model = mlp()
        optimizer = sgd(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        with hocket.attach(model, optimizer, "local") as session:
            for number, (x, y) in enumerate(session.data(batches(rank, 2 - rank))):
                loss = scaler.scale(F.cross_entropy(model(x), y))
                if number == 0:
                    with session.accumulate():
                        loss.backward()
                else:
                    loss.backward()
                    scaler.step(optimizer)
                    scaler.update()
        return flat(model)

    expected = reference([[(batches(1, 1)[0], 1.0)]])
    torch.testing.assert_close(on_ranks(2, run)[1], expected, rtol=1e-12, atol=1e-13)


def test_a_single_rank_skips_too() -> None:
    def run(rank: int) -> tuple[int, bool]:
        model = mlp()
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, "sgd", on_nonfinite="skip") as session:
            for number, (x, y) in enumerate(session.data(batches(rank, 4))):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                (loss * float("nan") if number == 1 else loss).backward()
                optimizer.step()
            return session.skipped_steps, bool(torch.isfinite(flat(model)).all())

    assert on_ranks(1, run) == [(1, True)]


def test_a_single_rank_takes_large_gradients_of_short_dtypes() -> None:
    """Their sum overflows, and none of them does."""

    def run(rank: int) -> int:
        model = torch.nn.Linear(2000, 1).half()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with hocket.attach(model, optimizer, "sgd", on_nonfinite="skip") as session:
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 100.0)
            optimizer.step()
            return session.skipped_steps

    assert on_ranks(1, run) == [0]


def test_nan_of_a_single_rank_is_an_error_too() -> None:
    def run(rank: int) -> None:
        model = mlp()
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, "sgd"):
            (model(torch.ones(1, 5, dtype=torch.float64)).sum() * torch.nan).backward()
            optimizer.step()

    with pytest.raises(NonFiniteError, match=r"gradients of rank 0 at step 0 hold NaN or Inf, in 0\.weight"):
        on_ranks(1, run)
