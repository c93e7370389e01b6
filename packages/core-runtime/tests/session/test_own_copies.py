"""Optimizers that keep copies of the weights, which averaging does not reach, and those that only remember moments."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from toys import batches, mlp, on_ranks

import hocket
from hocket.errors import AttachError


class Masters(torch.optim.SGD):
    """Steps float32 copies, made in the first step, and rounds them into the parameters."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                state = self.state[parameter]
                master = state.setdefault("master", parameter.detach().float().clone())
                if parameter.grad is not None:
                    master -= 0.05 * parameter.grad.float()
                parameter.copy_(master)


class Outside(torch.optim.SGD):
    """The same, with the copies in a list of its own."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.fp32_groups = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for parameter, master in zip(self.param_groups[0]["params"], self.fp32_groups[0], strict=True):
                master.sub_(0.05 * parameter.grad)
                parameter.copy_(master)


class Lookahead(torch.optim.Optimizer):
    """Holds one, and blends slow weights in after every so many of its steps."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer, self.param_groups, self.state = inner, inner.param_groups, inner.state
        self.defaults: dict[str, Any] = {}
        for parameter in inner.param_groups[0]["params"]:
            inner.state[parameter]["slow"] = parameter.detach().clone()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step(closure)
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                slow = self.state[parameter]["slow"]
                slow += 0.5 * (parameter - slow)
                parameter.copy_(slow)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


class OthersAdamW(torch.optim.AdamW):
    """Moments that nobody knows by name, as they are no optimizer's of torch."""


class OthersSGD(torch.optim.SGD):
    """The same with one moment."""


Make = Callable[[nn.Module], torch.optim.Optimizer]

COPIES: dict[str, tuple[Make, str]] = {
    "masters": (
        lambda m: Masters(m.parameters(), lr=0.05),
        "Masters keeps its own copy of the weights (state 'master')",
    ),
    "in a list": (
        lambda m: Outside(m.parameters(), 0.05),
        "Outside keeps its own copy of the weights ('fp32_groups')",
    ),
    "slow weights": (
        lambda m: Lookahead(torch.optim.SGD(m.parameters(), lr=0.05)),
        "Lookahead keeps its own copy of the weights (state 'slow')",
    ),
    "averages": (
        lambda m: torch.optim.ASGD(m.parameters(), lr=0.05),
        "ASGD keeps its own copy of the weights (state 'ax')",
    ),
}
MOMENTS: dict[str, Make] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, amsgrad=True),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.05),
    "rprop": lambda m: torch.optim.Rprop(m.parameters(), lr=0.01),
    "adadelta": lambda m: torch.optim.Adadelta(m.parameters()),
    "radam": lambda m: torch.optim.RAdam(m.parameters()),
    "another library's adamw": lambda m: OthersAdamW(m.parameters(), lr=0.01, amsgrad=True),
    "another library's sgd": lambda m: OthersSGD(m.parameters(), lr=0.05, momentum=0.9),
}


def train(rank: int, make: Make, strategy: str) -> None:
    model = mlp()
    optimizer = make(model)
    with hocket.attach(model, optimizer, strategy):
        for x, y in batches(rank, 12):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


@pytest.mark.parametrize("kind", COPIES)
@pytest.mark.parametrize("strategy", ["dpsgd", "sgp"])
def test_a_copy_is_told_of_once(kind: str, strategy: str, caplog: pytest.LogCaptureFixture) -> None:
    make, words = COPIES[kind]
    with caplog.at_level(logging.WARNING, logger="hocket"):
        on_ranks(2, lambda rank: train(rank, make, strategy))
    [told] = [record.getMessage() for record in caplog.records]
    assert told.startswith(words)


@pytest.mark.parametrize("kind", COPIES)
def test_where_gradients_are_exchanged_a_copy_follows_and_nothing_is_told(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="hocket"):
        on_ranks(2, lambda rank: train(rank, COPIES[kind][0], "sgd"))
    assert not caplog.records


@pytest.mark.parametrize("kind", MOMENTS)
def test_moments_are_no_copies(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="hocket"):
        on_ranks(2, lambda rank: train(rank, MOMENTS[kind], "dpsgd"))
    assert not caplog.records


# Torch's own word on scripts.
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_torchscript_is_refused_by_name() -> None:
    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = torch.jit.script(nn.Linear(5, 3))

    def run(rank: int) -> None:
        model = Holding()
        with pytest.raises(AttachError, match="module 'part' is TorchScript"):
            hocket.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "dpsgd")

    on_ranks(2, run)


def test_gradients_of_another_dtype_are_refused_where_they_are_exchanged() -> None:
    def model_of() -> nn.Module:
        model = nn.Linear(5, 3).bfloat16()
        model.weight.grad_dtype = torch.float32
        return model

    def run(rank: int) -> None:
        model = model_of()
        with pytest.raises(
            AttachError, match=r"parameter weight is torch.bfloat16, but its grad_dtype is torch.float32"
        ):
            hocket.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "sgd")
        hocket.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "dpsgd").close()

    if hasattr(nn.Linear(1, 1).weight, "grad_dtype"):
        on_ranks(2, run)


class Named(list[Any]):
    """A loader that has the names of a state, and none."""

    state_dict = None

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError


class Refusing(Named):
    """A loader whose state is another library's."""

    def state_dict(self) -> Any:  # type: ignore[override]
        raise NotImplementedError


@pytest.mark.parametrize("kind", [Named, Refusing])
def test_a_loader_that_only_has_the_names_of_a_state(kind: type[list[Any]], tmp_path: Any) -> None:
    def run(rank: int, *, resumes: bool) -> list[float]:
        model = mlp()
        seen = []
        with hocket.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "sgd") as session:
            if resumes:
                session.load(tmp_path)
            for x, y in session.data(kind(batches(rank, 5))):
                seen.append(float(x[0, 0]))
                F.cross_entropy(model(x), y).backward()
                session.optimizer.step()
                session.optimizer.zero_grad()
                if session.step == 2 and not resumes:
                    session.save(tmp_path)
        return seen

    through = on_ranks(2, lambda rank: run(rank, resumes=False))
    resumed = on_ranks(2, lambda rank: run(rank, resumes=True))
    assert resumed == [seen[2:] for seen in through]
