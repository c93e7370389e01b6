"""What others do around a model: optimizers that hold one, hooks on gradients, graphs of gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toys import GRADIENT_STRATEGIES, batches, flat, mlp, on_ranks, reference, sgd

import hocket
from hocket.errors import AttachError, HocketError, SessionError


class Holder(torch.optim.Optimizer):
    """An optimizer that only steps the one it holds, as Accelerate's, and never calls torch's __init__."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer = inner
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


class SlowWeights(Holder):
    """Lookahead with slow weights in a state of its own, which is saved beside that of the optimizer it holds."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner)
        held = [p for group in self.param_groups for p in group["params"]]
        self.state: Any = {p: {"slow": p.detach().clone()} for p in held}

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        if self.steps % 2 == 0:
            for parameter, state in self.state.items():
                state["slow"].add_(parameter.detach() - state["slow"], alpha=0.5)
                parameter.data.copy_(state["slow"])
        return result

    def state_dict(self) -> dict[str, Any]:
        slow = [state["slow"] for state in self.state.values()]
        return {"fast": self.optimizer.state_dict(), "slow": slow, "steps": self.steps}

    def load_state_dict(self, saved: Any) -> None:
        self.optimizer.load_state_dict(saved["fast"])
        for state, slow in zip(self.state.values(), saved["slow"], strict=True):
            state["slow"].copy_(slow)
        self.steps = saved["steps"]


def steps_of(count: int) -> list[list[tuple[Any, float]]]:
    columns = zip(*(batches(rank, count) for rank in range(2)), strict=True)
    return [[(batch, 1.0) for batch in column] for column in columns]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("strategy", GRADIENT_STRATEGIES)
def test_an_optimizer_that_holds_one_is_attached(strategy: tuple[str, ...], depth: int) -> None:
    def run(rank: int) -> tuple[Tensor, int, int]:
        model = mlp()
        optimizer = Holder(sgd(model))
        for _ in range(depth - 1):
            optimizer = Holder(optimizer)
        with hocket.attach(model, optimizer, hocket.compose(*strategy)) as session:
            assert session.optimizer is optimizer
            for number, (x, y) in enumerate(session.data(batches(rank, 4))):
                if number == 2 and rank == 1:
                    continue  # the session steps by what the user would have called
                session.optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                session.optimizer.step()
        return flat(model), session.step, optimizer.steps

    expected = steps_of(4)
    expected[2].pop()
    for parameters, steps, called in on_ranks(2, run):
        torch.testing.assert_close(parameters, reference(expected))
        assert steps == called == 4


def test_a_resumed_optimizer_that_holds_one_has_its_groups_and_state(tmp_path: Any) -> None:
    def run(rank: int, *, resumes: bool) -> Tensor:
        model = mlp()
        optimizer = Holder(sgd(model))
        with hocket.attach(model, optimizer, "sgd") as session:
            data = batches(rank, 4)
            if resumes:
                session.load(tmp_path)
                assert optimizer.state is optimizer.optimizer.state
                assert optimizer.param_groups is optimizer.optimizer.param_groups
            for x, y in data[2:] if resumes else data:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                if session.step == 2 and not resumes:
                    session.save(tmp_path)
        return flat(model)

    through = on_ranks(2, lambda rank: run(rank, resumes=False))
    resumed = on_ranks(2, lambda rank: run(rank, resumes=True))
    for one, other in zip(through, resumed, strict=True):
        assert torch.equal(one, other)


class Plain:
    """A class of somebody's own that holds an optimizer, and is no optimizer itself."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups = inner.param_groups

    def step(self) -> None:
        self.inner.step()


@pytest.mark.parametrize("kind", [Holder, Plain])
@pytest.mark.parametrize("strategy", ["sgd", "periodic_average"])
def test_a_step_that_a_scaler_leaves_out_of_what_holds_an_optimizer_is_one(strategy: str, kind: Any) -> None:
    def run(rank: int) -> tuple[int, int]:
        model = mlp()
        inner = sgd(model)
        optimizer = kind(inner)
        scaler: Any = torch.amp.GradScaler("cpu", init_scale=8.0)
        with hocket.attach(model, optimizer if kind is Holder else inner, strategy) as session:
            for number, (x, y) in enumerate(batches(rank, 4)):
                inner.zero_grad()
                loss = F.cross_entropy(model(x), y)
                scaler.scale(loss * (float("inf") if number == 1 else 1.0)).backward()
                scaler.step(optimizer)
                scaler.update()
        return session.step, int(scaler.get_scale())

    assert on_ranks(2, run) == [(4, 4)] * 2


def test_what_cannot_be_gathered_is_refused_with_its_cure() -> None:
    def run(rank: int) -> None:
        model = mlp()
        with hocket.attach(model, sgd(model), "sgd") as session:
            with pytest.raises(
                HocketError, match=r"session\.gather takes .*, not a Tensor: .*tensor\.tolist\(\)"
            ):
                session.gather(torch.ones(2))
            assert session.gather(rank) == [0, 1]

    on_ranks(2, run)


def test_an_optimizer_without_hooks_or_another_one_is_named() -> None:
    class Bare(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            self.param_groups = [{"params": list(parameters)}]

    def run(rank: int) -> None:
        model = mlp()
        with pytest.raises(
            AttachError, match=r"\(Bare\) was made without .* attach the optimizer that it steps"
        ):
            hocket.attach(model, Bare(model.parameters()), "sgd")

    on_ranks(2, run)


def test_an_optimizer_that_shares_its_step_out_is_refused() -> None:
    kind = type("ZeroRedundancyOptimizer", (torch.optim.SGD,), {"__module__": "torch.distributed.optim.zero"})

    def run(rank: int) -> None:
        model = mlp()
        with pytest.raises(AttachError, match="ZeroRedundancyOptimizer divides its step"):
            hocket.attach(model, kind(model.parameters(), lr=0.1), "dpsgd")

    on_ranks(2, run)


@pytest.mark.one_of_each
@pytest.mark.parametrize("strategy", GRADIENT_STRATEGIES)
@pytest.mark.parametrize("when", ["before attach", "after attach", "in each step"])
def test_a_users_hook_sees_the_gradient_and_what_it_makes_of_it_is_sent(
    strategy: tuple[str, ...], when: str
) -> None:
    def run(rank: int) -> tuple[Tensor, int]:
        model = mlp()
        optimizer = sgd(model)
        seen = 0

        def halve(parameter: nn.Parameter) -> None:
            nonlocal seen
            seen += 1
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)

        def hook() -> list[Any]:
            return [p.register_post_accumulate_grad_hook(halve) for p in model.parameters()]

        if when == "before attach":
            hook()
        with hocket.attach(model, optimizer, hocket.compose(*strategy)) as session:
            if when == "after attach":
                hook()
            for x, y in session.data(batches(rank, 3)):
                handles = hook() if when == "in each step" else []
                optimizer.zero_grad()
                (F.cross_entropy(model(x), y) * 2).backward()
                optimizer.step()
                for handle in handles:
                    handle.remove()
        return flat(model), seen

    for parameters, seen in on_ranks(2, run):
        torch.testing.assert_close(parameters, reference(steps_of(3)))
        assert seen == 3 * 4


@pytest.mark.parametrize("strategy", GRADIENT_STRATEGIES)
def test_a_graph_of_gradients_that_are_exchanged_is_refused(strategy: tuple[str, ...]) -> None:
    def run(rank: int) -> None:
        model = mlp()
        optimizer = sgd(model)
        x, y = batches(rank, 1)[0]
        with hocket.attach(model, optimizer, hocket.compose(*strategy)):
            with pytest.raises(SessionError, match=r"create_graph=True.*dpsgd"):
                F.cross_entropy(model(x), y).backward(create_graph=True)
            # A penalty takes its graph this way, as in WGAN-GP.
            x.requires_grad_(True)
            loss = F.cross_entropy(model(x), y)
            (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
            optimizer.zero_grad()
            (loss + gradient.square().sum()).backward()
            optimizer.step()

    on_ranks(2, run)


def test_a_graph_of_gradients_that_stay_local_is_the_users() -> None:
    def run(rank: int) -> bool:
        model = mlp()
        optimizer = sgd(model)
        x, y = batches(rank, 1)[0]
        with hocket.attach(model, optimizer, "dpsgd"):
            F.cross_entropy(model(x), y).backward(create_graph=True)
            own = [p.grad for p in model.parameters()]
            second = torch.autograd.grad(
                [g.square().sum() for g in own if g is not None], list(model.parameters())
            )
            optimizer.zero_grad()
        return all(bool(each.isfinite().all()) for each in second)

    assert on_ranks(2, run) == [True, True]


@pytest.mark.parametrize("strategy", ["sgd", "dpsgd"])
def test_what_an_optimizer_that_holds_one_remembers_is_rank_0s_and_saved(
    strategy: str, tmp_path: Path
) -> None:
    """The slow weights are made before attach, which gives all ranks rank 0's; a resumed run has those it had."""

    def run(rank: int, seed: int, load: bool) -> list[Tensor]:
        torch.manual_seed(seed + rank)
        model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        optimizer = SlowWeights(sgd(model))
        with hocket.attach(model, optimizer, strategy) as session:
            if load:
                session.load(tmp_path / "saved")
            for x, y in session.data(batches(rank, 6)):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                if session.step == 3 and not load:
                    session.save(tmp_path / "saved")
            first = next(iter(optimizer.state.values()))["slow"].clone()
        return [flat(model), first]

    begun = on_ranks(2, lambda rank: run(rank, 0, False))
    resumed = on_ranks(2, lambda rank: run(rank, 7, True))
    for before, after in zip(begun, resumed, strict=True):
        assert all(map(torch.equal, before, after))
    if strategy == "sgd":
        assert all(map(torch.equal, *begun))
