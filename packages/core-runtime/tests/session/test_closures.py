"""`optimizer.step(closure)`: the numbers of one process, and NaN that is found where it arises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toys import Batch, batches, flat, mlp, on_ranks, sgd

import hocket
from hocket.errors import NonFiniteError

SEARCHES = {"fixed": None, "wolfe": "strong_wolfe"}


def lbfgs(model: nn.Module, search: str | None) -> torch.optim.LBFGS:
    return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=6, line_search_fn=search)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, data: Any, bad: Any = ()) -> list[float]:
    losses = []
    calls = 0
    for x, y in data:

        def closure(x: Tensor = x, y: Tensor = y) -> Any:  # a tensor, where torch's types have a float
            nonlocal calls
            calls += 1
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            (loss * torch.nan if calls in bad else loss).backward()
            return loss.detach()

        losses.append(float(optimizer.step(closure)))
    return losses


def whole(data: list[list[Batch]]) -> list[Batch]:
    return [
        (torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))
        for parts in zip(*data, strict=True)
    ]


@pytest.mark.one_of_each
@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("strategy", ["sgd", "agd", "hierarchical_sgd"])
def test_lbfgs_is_that_of_one_process(strategy: str, search: str) -> None:
    data = [batches(rank, 3) for rank in range(3)]
    model = mlp()
    expected = steps(model, lbfgs(model, SEARCHES[search]), whole(data))

    def run(rank: int) -> tuple[list[float], Tensor]:
        own = mlp()
        optimizer = lbfgs(own, SEARCHES[search])
        with hocket.attach(own, optimizer, strategy) as session:
            losses = steps(own, optimizer, session.data(data[rank]))
            assert session.step == 3
        return losses, flat(own)

    for losses, values in on_ranks(3, run):
        # Steps of a fixed length diverge, and with them what processors round otherwise.
        assert losses == pytest.approx(expected, abs=1e-9)
        assert torch.allclose(values, flat(model), rtol=0, atol=1e-9)


@pytest.mark.parametrize("overlap", ["none", "forward"])
def test_lbfgs_of_ones_own_with_exchanged_parameters(overlap: str) -> None:
    data = [batches(rank, 3) for rank in range(2)]
    models = [mlp() for _ in range(2)]
    optimizers = [lbfgs(model, "strong_wolfe") for model in models]
    for step in range(3):
        for model, optimizer, own in zip(models, optimizers, data, strict=True):
            steps(model, optimizer, own[step : step + 1])
        with torch.no_grad():
            for p, q in zip(*(model.parameters() for model in models), strict=True):
                p.copy_((p + q) / 2)
                q.copy_(p)

    def run(rank: int) -> Tensor:
        model = mlp()
        optimizer = lbfgs(model, "strong_wolfe")
        with hocket.attach(
            model, optimizer, hocket.compose("dpsgd", f"parameters.0.overlap={overlap}")
        ) as session:
            steps(model, optimizer, session.data(data[rank]))
        return flat(model)

    for values, model in zip(on_ranks(2, run), models, strict=True):
        assert torch.allclose(values, flat(model), rtol=0, atol=1e-12)


@pytest.mark.parametrize("strategy", ["sgd", "agd", "dpsgd", "periodic_average"])
def test_a_closure_changes_nothing_for_an_optimizer_that_calls_it_once(strategy: str) -> None:
    def run(rank: int, *, closure: bool) -> Tensor:
        model = mlp()
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, strategy) as session:
            # Rank 0 runs out of data first: its repetitions count nothing.
            data = session.data(batches(rank, 3 + 2 * rank))
            if closure:
                steps(model, optimizer, data)
            else:
                for x, y in data:
                    optimizer.zero_grad()
                    F.cross_entropy(model(x), y).backward()
                    optimizer.step()
        return flat(model)

    without = on_ranks(2, lambda rank: run(rank, closure=False))
    with_it = on_ranks(2, lambda rank: run(rank, closure=True))
    assert all(torch.equal(a, b) for a, b in zip(without, with_it, strict=True))


@pytest.mark.one_of_each
@pytest.mark.parametrize("call", [1, 2, 4])
@pytest.mark.parametrize("strategy", ["sgd", "agd"])
def test_nan_in_any_call_leaves_the_step_out(strategy: str, call: int) -> None:
    """As if the batch had not been there, for the optimizer too."""

    def run(rank: int, data: list[Batch], bad: tuple[int, ...]) -> Tensor:
        model = mlp()
        optimizer = lbfgs(model, None)
        with hocket.attach(model, optimizer, strategy, on_nonfinite="skip") as session:
            steps(model, optimizer, session.data(data), bad)
            assert session.skipped_steps == len(data) - 2
        return flat(model)

    skipped = on_ranks(2, lambda rank: run(rank, batches(rank, 3), (call,) if rank else ()))
    without = on_ranks(2, lambda rank: run(rank, batches(rank, 3)[1:], ()))
    assert all(torch.allclose(a, b, rtol=0, atol=1e-14) for a, b in zip(skipped, without, strict=True))


def test_nan_is_reported_in_its_step() -> None:
    def run(rank: int) -> None:
        model = mlp()
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, "sgd") as session:
            steps(model, optimizer, session.data(batches(rank, 3)), (2,) if rank == 1 else ())

    with pytest.raises(NonFiniteError, match=r"(at|of) step 1"):
        on_ranks(2, run)
