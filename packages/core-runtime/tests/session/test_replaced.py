"""Replaced modules and parameters of an attached session are noticed before the next step, and repaired or named."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toys import batches, flat, mlp, on_ranks, sgd, train

import hocket
from hocket.errors import ReplacedError
from hocket.segment.storage import ParameterStorage
from hocket.testing.session import inner_of
from hocket.transport.single import SinglePeer


def change_and_train(change: Callable[[nn.Module], object], strategy: str) -> Callable[[int], Tensor]:
    """Return what trains three steps and calls `change(model)` after the first, on every rank."""

    def run(rank: int) -> Tensor:
        model = mlp(dtype=torch.float32)
        model.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, strategy) as session:
            for number, (x, y) in enumerate(session.data(batches(rank, 3, dtype=torch.float32))):
                if number == 1:
                    change(model)
                optimizer.zero_grad()
                F.cross_entropy(model(x.to(model.get_parameter("0.weight").dtype)), y).backward()
                optimizer.step()
            assert model.get_parameter("0.weight").data_ptr() == inner_of(session).storage.flats[0].data_ptr()
        return flat(model)

    return run


def assign_state(model: nn.Module) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


REFUSED: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "assigned state": (
        assign_state,
        "parameter 0.weight was replaced by another object after attach (load_state_dict(assign=True)?)",
    ),
    "double": (
        lambda model: model.double(),
        "was torch.float32 (7, 5) on cpu when the session was attached and is torch.float64 (7, 5) on cpu",
    ),
    "module": (
        lambda model: setattr(model, "2", nn.Linear(7, 3)),
        "module 2 was replaced by another object after attach",
    ),
    "unfrozen": (
        lambda model: model.get_parameter("frozen").requires_grad_(),
        "parameter frozen was frozen at attach, but requires a gradient now",
    ),
}


@pytest.mark.parametrize("strategy", ["sgd", "agd", "periodic_average"])
@pytest.mark.parametrize("name", REFUSED)
def test_named(name: str, strategy: str) -> None:
    change, message = REFUSED[name]

    def run(rank: int) -> None:
        with pytest.raises(ReplacedError, match=re.escape(message)):
            change_and_train(change, strategy)(rank)

    on_ranks(2, run)


@pytest.mark.parametrize("strategy", ["local", "sgd"])
def test_another_shape_is_named(strategy: str) -> None:
    message = r"parameter 2\.bias was torch\.float32 \(3,\) .* and is torch\.float32 \(1,\) on cpu now"

    def shorten(model: nn.Module) -> None:
        model.get_parameter("2.bias").data = torch.zeros(1)

    def run(rank: int) -> None:
        train_on = change_and_train(shorten, strategy)
        with pytest.raises(ReplacedError, match=message):
            train_on(rank)

    on_ranks(2, run)


def replace_data(model: nn.Module) -> None:
    """Give parameters new memory with other values, as some libraries' weight loading does."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone().mul_(0.5)


def scale_in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


@pytest.mark.parametrize("strategy", ["sgd", "agd", "periodic_average"])
def test_replaced_data_is_taken_over(strategy: str) -> None:
    """The same numbers as a change in place, and parameters are views of the flat buffers again."""
    given = on_ranks(2, change_and_train(replace_data, strategy))
    expected = on_ranks(2, change_and_train(scale_in_place, strategy))
    assert all(torch.equal(one, other) for one, other in zip(given, expected, strict=True))


@pytest.mark.parametrize("strategy", ["sgd", "agd"])
def test_replaced_gradients_are_what_the_optimizer_gets(strategy: str) -> None:
    """`p.grad = ...` between backward and step is the user's business, and does the next round no harm."""

    def run(rank: int) -> Tensor:
        model = mlp()
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, strategy) as session:
            for x, y in session.data(batches(rank, 3)):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad = parameter.grad.clone()
                optimizer.step()
        return flat(model)

    expected = on_ranks(2, lambda rank: train((strategy,), batches(rank, 3)))
    assert all(torch.equal(one, other) for one, other in zip(on_ranks(2, run), expected, strict=True))


def test_an_equal_parameter_in_the_place_of_one_of_a_single_element_is_noticed() -> None:
    model = nn.Module()
    model.scale = nn.Parameter(torch.ones(1))
    storage = ParameterStorage(model, SinglePeer())
    storage.check(take_values=False)
    model.scale = nn.Parameter(torch.ones(1))
    with pytest.raises(ReplacedError, match="scale"):
        storage.check(take_values=False)
