"""Push-sum on a graph on which plain averaging would lose the mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from toys import batches, flat, mlp, on_ranks, sgd, step_with, train

import hocket
from hocket.errors import AttachError
from hocket.testing.session import inner_of
from hocket.topology.drawn import IrregularDirected

SIZE, STEPS = 5, 6


def exchange(**fields: Any) -> dict[str, Any]:
    collective = {"name": "gossip", "push_sum": True}
    return {"collective": collective, "topology": "irregular_directed", **fields}


def weights_of(session: hocket.Session) -> list[float]:
    return [
        weight
        for each in inner_of(session).phase.parameters.exchanges
        for weight in each.push_sum.weights.values()
    ]


@pytest.mark.parametrize("hidden", [{"overlap": "none"}, {"overlap": "forward"}, {"delay": 1}])
def test_the_optimizer_steps_x_and_the_model_computes_with_x_over_w(hidden: dict[str, Any]) -> None:
    """Against the definition: gradients at z = x / w, weight decay and step at x, then x and w through W."""
    strategy = {"parameters": [exchange(segments="model", **hidden)]}
    ended = on_ranks(SIZE, lambda rank: train((strategy,), batches(rank, STEPS)))

    models = [mlp() for _ in range(SIZE)]
    optimizers = [sgd(model) for model in models]
    values = torch.stack([flat(model) for model in models])
    weights = torch.ones(SIZE, 1, dtype=torch.float64)
    under_way: tuple[Tensor, Tensor] | None = None
    for step in range(STEPS):
        for rank, model in enumerate(models):
            computes_with(model, values[rank] / weights[rank])
            gradients = gradients_of(model, batches(rank, STEPS)[step])
            computes_with(model, values[rank])
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            optimizers[rank].step()
            values[rank] = flat(model)
        if under_way is not None:
            values, weights = values + under_way[0], weights + under_way[1]
        matrix = torch.from_numpy(IrregularDirected().mixing_matrix(SIZE, step, 0))
        change = (matrix @ values - values, matrix @ weights - weights)
        if "delay" in hidden:
            under_way = change
        else:
            values, weights = values + change[0], weights + change[1]
    if under_way is not None:
        values, weights = values + under_way[0], weights + under_way[1]
    torch.testing.assert_close(torch.stack(ended), values / weights, rtol=1e-10, atol=1e-12)
    assert float(weights.max() - weights.min()) > 0.5


def computes_with(model: torch.nn.Module, values: Tensor) -> None:
    torch.nn.utils.vector_to_parameters(values.clone(), model.parameters())


def gradients_of(model: torch.nn.Module, batch: Any) -> list[Tensor]:
    x, y = batch
    loss = torch.nn.functional.cross_entropy(model(x), y)
    return list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.one_of_each
@pytest.mark.parametrize("hidden", [{"overlap": "none"}, {"overlap": "forward"}, {"delay": 1}])
@pytest.mark.parametrize("every", [1, 3])
def test_replicas_reach_the_mean_of_where_they_began(hidden: dict[str, Any], every: int) -> None:
    def run(rank: int) -> tuple[Tensor, Tensor, Tensor, list[float]]:
        model = mlp(rank)
        before = flat(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        strategy = {"parameters": [exchange(every=every, segments="layers", **hidden)]}
        with hocket.attach(model, optimizer, strategy, initial="keep") as session:
            for x, _ in session.data(batches(rank, 60 * every)):
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
            session.settle()
            after, weights = flat(model), weights_of(session)
            with session.consensus():
                consensus = flat(model)
            torch.testing.assert_close(flat(model), after, rtol=0, atol=0)
            assert weights_of(session) == weights
        return before, after, consensus, weights

    ended = on_ranks(SIZE, run)
    mean = torch.stack([before for before, *_ in ended]).mean(0)
    for _, after, consensus, _ in ended:
        torch.testing.assert_close(after, mean, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(consensus, mean, rtol=1e-12, atol=1e-13)
    for segment in range(2):
        total = sum(weights[segment] for *_, weights in ended)
        assert total == pytest.approx(SIZE, rel=1e-12)


def test_weights_of_a_doubly_stochastic_topology_cost_nothing() -> None:
    """SGP on the exponential graph sends what plain gossip sends."""

    def sent(strategy: Any) -> list[float]:
        def run(rank: int) -> float:
            model = mlp()
            optimizer = sgd(model)
            with hocket.attach(model, optimizer, strategy) as session:
                for batch in session.data(batches(rank, 3)):
                    step_with(model, optimizer, [(batch, 1.0)])
                assert weights_of(session) == []
                return session.counters.bytes_sent

        return on_ranks(4, run)

    plain = {"parameters": [{"collective": "gossip", "topology": "exponential"}]}
    assert sent("sgp") == sent(plain) == sent("overlap_sgp")


SHORT = (torch.float16, torch.bfloat16)


def short(dtype: torch.dtype, seed: int = 0) -> torch.nn.Linear:
    torch.manual_seed(seed)
    return torch.nn.Linear(16, 4).to(dtype)


def steps(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, count: int, seed: int = 0
) -> Iterator[int]:
    """Step with gradients that are drawn."""
    generator = torch.Generator().manual_seed(seed)
    for number in range(count):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()
        yield number


@pytest.mark.one_of_each
@pytest.mark.parametrize("hidden", [{"overlap": "none"}, {"overlap": "forward"}, {"delay": 1}])
@pytest.mark.parametrize("dtype", SHORT)
def test_equal_replicas_of_short_parameters_stay_where_they_are(
    dtype: torch.dtype, hidden: dict[str, Any]
) -> None:
    """With a learning rate of 0, in 100 rounds with weights that change: bit for bit, and their mean too."""

    def run(rank: int) -> tuple[Tensor, Tensor, Tensor, set[float]]:
        model = short(dtype)
        before = flat(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        seen: set[float] = set()
        with hocket.attach(model, optimizer, {"parameters": [exchange(**hidden)]}) as session:
            for _ in steps(model, optimizer, 100, rank):
                seen |= set(weights_of(session))
            session.settle()
            with session.consensus():
                consensus = flat(model)
            return before, flat(model), consensus, seen

    for before, after, consensus, seen in on_ranks(SIZE, run):
        assert torch.equal(after, before)
        assert torch.equal(consensus, before)
        assert max(seen) - min(seen) > 0.5


@pytest.mark.one_of_each
@pytest.mark.parametrize("hidden", [{"overlap": "none"}, {"overlap": "forward"}, {"delay": 1}])
@pytest.mark.parametrize("dtype", SHORT)
def test_short_parameters_are_those_of_the_definition_in_float32(
    dtype: torch.dtype, hidden: dict[str, Any]
) -> None:
    """The optimizer steps x rounded; what it adds is added to x."""

    def run(rank: int) -> Tensor:
        model = short(dtype, rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        strategy = {"parameters": [exchange(segments="model", **hidden)]}
        with hocket.attach(model, optimizer, strategy, initial="keep"):
            list(steps(model, optimizer, 40, rank))
        return flat(model)

    values = torch.stack([flat(short(dtype, rank)).float() for rank in range(SIZE)])
    drawn = [torch.Generator().manual_seed(rank) for rank in range(SIZE)]
    weights, under_way = torch.ones(SIZE, 1), torch.zeros(())
    for step in range(40):
        for rank in range(SIZE):
            gradient = torch.cat([torch.randn(n, generator=drawn[rank]) for n in (64, 4)]).to(dtype)
            rounded = values[rank].to(dtype)
            values[rank] += rounded.add(gradient, alpha=-0.01).float() - rounded.float()
        if step and "delay" in hidden:
            values, weights = values + under_way[:, :-1], weights + under_way[:, -1:]
        matrix = torch.from_numpy(IrregularDirected().mixing_matrix(SIZE, step, 0)).float()
        both = torch.cat([values, weights], 1)
        under_way = matrix @ both - both
        if "delay" not in hidden:
            values, weights = values + under_way[:, :-1], weights + under_way[:, -1:]
    if "delay" in hidden:
        values, weights = values + under_way[:, :-1], weights + under_way[:, -1:]
    # One unit in the last place, where sums in another order are rounded.
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(
        torch.stack(on_ranks(SIZE, run)).float(), values / weights, rtol=unit, atol=unit / 10
    )


@pytest.mark.parametrize("hidden", [{"overlap": "none"}, {"delay": 1}])
def test_what_is_written_into_short_parameters_after_a_step_is_what_it_is(hidden: dict[str, Any]) -> None:
    """A mask, the same on all ranks: what is zero stays zero, whatever rounding had left of it."""

    def run(rank: int) -> Tensor:
        model = short(torch.bfloat16, rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with hocket.attach(model, optimizer, {"parameters": [exchange(**hidden)]}, initial="keep") as session:
            for number in steps(model, optimizer, 20, rank):
                if number == 10:
                    session.settle()
                    with torch.no_grad():
                        model.weight[:, ::2] = 0
                if number >= 10:
                    optimizer.param_groups[0]["lr"] = 0.0
        return model.weight.detach()[:, ::2]

    for masked in on_ranks(SIZE, run):
        assert not masked.any()


@pytest.mark.parametrize("dtype", SHORT)
def test_a_look_at_the_mean_and_a_checkpoint_change_nothing_of_short_parameters(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    def run(rank: int, look: bool, load: bool) -> Tensor:
        model = short(dtype, rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with hocket.attach(model, optimizer, {"parameters": [exchange()]}, initial="keep") as session:
            if load:
                session.load(tmp_path)
                assert session.step == 5
            else:
                list(steps(model, optimizer, 5, rank))
                if look:
                    session.save(tmp_path)
                    with session.consensus():
                        pass
            list(steps(model, optimizer, 5, rank + SIZE))
        return flat(model)

    for how in ((True, False), (False, True)):
        for own, expected in zip(
            on_ranks(SIZE, partial(run, look=how[0], load=how[1])),
            on_ranks(SIZE, lambda rank: run(rank, False, False)),
            strict=True,
        ):
            assert torch.equal(own, expected)


def closing(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(torch.ones(1, 5, dtype=torch.float64)).square().sum()
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize("phases", [False, True])
def test_an_optimizer_that_needs_a_closure_is_refused_at_attach(phases: bool) -> None:
    """Also where push-sum comes later; the other strategies take it."""
    push_sum = {"parameters": [exchange()]}
    strategy = {"phases": {5: push_sum}} if phases else push_sum

    def run(rank: int) -> None:
        model = mlp()
        optimizer = torch.optim.LBFGS(model.parameters())
        with pytest.raises(
            AttachError, match=r"parameters\.0 is push-sum, and LBFGS steps with a closure.*ring"
        ):
            hocket.attach(model, optimizer, strategy)
        with hocket.attach(model, optimizer, "dpsgd"):
            optimizer.step(closing(model, optimizer))

    on_ranks(3, run)


@pytest.mark.parametrize("by_name", [False, True])
def test_a_step_with_a_closure_is_refused_before_anything_has_moved(by_name: bool) -> None:
    def run(rank: int) -> None:
        model = mlp()
        optimizer = sgd(model)
        strategy = {"parameters": [exchange()]}
        with hocket.attach(model, optimizer, strategy) as session:
            closing(model, optimizer)()
            optimizer.step()
            before = flat(model)
            closure = closing(model, optimizer)
            given = ([], {"closure": closure}) if by_name else ([closure], {})
            with pytest.raises(AttachError, match="SGD steps with a closure"):
                optimizer.step(*given[0], **given[1])
            assert torch.equal(flat(model), before)
            assert session.step == 1

    on_ranks(3, run)


class Failing(torch.optim.SGD):
    """Fails in its third step."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        if self.steps == 3:
            raise RuntimeError("out of memory")
        return super().step(closure)


def test_an_error_leaves_the_model_with_what_it_computes_with() -> None:
    def run(rank: int) -> tuple[Tensor, Tensor]:
        model = mlp()
        optimizer = Failing(model.parameters(), lr=0.1)
        before = []

        def train() -> None:
            with hocket.attach(model, optimizer, {"parameters": [exchange()]}) as session:
                for x, y in batches(rank, 3):
                    assert session.step < 2 or weights_of(session) != [1.0]
                    before.append(flat(model))
                    optimizer.zero_grad()
                    torch.nn.functional.cross_entropy(model(x), y).backward()
                    optimizer.step()

        with pytest.raises(RuntimeError, match="out of memory"):
            train()
        return before[-1], flat(model)

    for before, after in on_ranks(SIZE, run):
        torch.testing.assert_close(after, before, rtol=1e-14, atol=1e-15)
