"""LARS against a computation of its own in NumPy, in MXNet's formulation, and within sessions and runs."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hocket
from hocket.config.optimizer import build_optimizer
from hocket.training.run import load_run
from hocket_crossover import LARS


def mxnet_step(
    weight: np.ndarray, gradient: np.ndarray, velocity: np.ndarray, lr: float, options: dict[str, float]
) -> None:
    """Step as mxnet.optimizer.LARS.step documents it, with the parameters' names replaced by their axes."""
    scaled = 1.0
    if weight.ndim > 1:
        weight_norm, gradient_norm = np.sqrt((weight**2).sum()), np.sqrt((gradient**2).sum())
        if weight_norm > 0 and gradient_norm > 0:
            decay = options["weight_decay"] * weight_norm
            scaled = options["coefficient"] * weight_norm / (gradient_norm + decay + options["eps"])
    velocity *= options["momentum"]
    velocity -= lr * scaled * (gradient + options["weight_decay"] * weight)
    weight += velocity


@given(
    st.sampled_from([0.0, 0.9, 0.96]),
    st.sampled_from([0.0, 5e-5, 0.1]),
    st.sampled_from([0.001, 0.0025]),
    st.integers(0, 2**31),
)
def test_against_numpy_with_a_warm_up(momentum: float, decay: float, coefficient: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    options = {"momentum": momentum, "weight_decay": decay, "coefficient": coefficient, "eps": 1e-8}
    shapes = [(3, 4), (4,), (2, 3, 3, 3), (), (5, 1), (6,)]
    expected = [random.normal(size=shape) for shape in shapes]
    expected[4][:] = 0  # a weight without norm
    velocities = [np.zeros(shape) for shape in shapes]
    weights = [nn.Parameter(torch.from_numpy(np.array(value))) for value in expected]
    optimizer = LARS(weights, lr=0.3, **options)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=4)
    for step in range(6):
        for place, (weight, value, velocity) in enumerate(zip(weights, expected, velocities, strict=True)):
            gradient = np.array(random.normal(size=value.shape)) * (
                place != 0 or step != 3
            )  # once without norm
            weight.grad = torch.from_numpy(np.array(gradient))
            mxnet_step(value, gradient, velocity, 0.3 * min(1.0, 0.1 + 0.9 * step / 4), options)
        optimizer.step()
        warm_up.step()
        for weight, value in zip(weights, expected, strict=True):
            np.testing.assert_allclose(weight.detach(), value, rtol=1e-10, atol=1e-12)


def test_the_rate_is_inside_the_velocity() -> None:
    """After a step with lr 1, a step with lr 0 goes on by momentum times as much; torch's SGD would stand still."""
    weight = nn.Parameter(torch.zeros(3))
    optimizer = LARS([weight], lr=1.0, momentum=0.5)
    for lr, expected in ((1.0, -2.0), (0.0, -3.0)):
        optimizer.param_groups[0]["lr"] = lr
        weight.grad = torch.full((3,), 2.0)
        optimizer.step()
        assert weight.tolist() == [expected] * 3


def test_a_tensor_without_gradient_stays() -> None:
    weights = [nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))]
    optimizer = LARS(weights, lr=1.0, weight_decay=0.1)
    weights[0].grad = torch.ones(2, 2)
    optimizer.step()
    assert weights[1].tolist() == [[1, 1], [1, 1]]
    assert weights[0].tolist() != [[1, 1], [1, 1]]


def test_a_gradient_that_is_no_number_is_not_hidden() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.full((2, 2), float("nan"))
    LARS([weight]).step()
    assert torch.isnan(weight).all()


def test_the_state_can_be_saved() -> None:
    def make() -> tuple[nn.Parameter, LARS]:
        weight = nn.Parameter(torch.arange(6.0).reshape(2, 3))
        return weight, LARS([weight], lr=0.2)

    def step(weight: nn.Parameter, optimizer: LARS) -> None:
        weight.grad = weight.detach() ** 2
        optimizer.step()

    whole, optimizer = make()
    step(whole, optimizer)
    resumed, other = make()
    with torch.no_grad():
        resumed.copy_(whole)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch shares its tensors
    step(whole, optimizer)
    step(resumed, other)
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("option", "value"),
    [("lr", -1.0), ("momentum", 1.0), ("weight_decay", -1e-5), ("coefficient", 0.0), ("eps", float("nan"))],
)
def test_an_option_out_of_its_range_is_refused(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"^{option} must be .*, not {value}"):
        LARS([nn.Parameter(torch.ones(1))], **{option: value})


def test_a_run_can_name_it() -> None:
    run = load_run("crossover", ["optimizer={name: hocket_crossover:LARS, lr: 4, coefficient: 0.0025}"])
    optimizer = build_optimizer(run.optimizer, [nn.Parameter(torch.ones(1))])
    assert isinstance(optimizer, LARS)
    assert optimizer.defaults["coefficient"] == 0.0025


def test_equal_gradients_keep_replicas_equal() -> None:
    """On flat buffers, over two ranks with `agd`, to the bit of one process with both batches' mean gradient."""
    inputs = [torch.randn(4, 5, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]

    def model_and_optimizer() -> tuple[nn.Module, LARS]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        return model, LARS(model.parameters(), lr=0.5, weight_decay=0.01, coefficient=0.1)

    def rank() -> Any:
        model, optimizer = model_and_optimizer()
        own = inputs[hocket.join().rank]
        with hocket.attach(model, optimizer, "agd") as session:
            for x in session.data([own] * 3):
                optimizer.zero_grad()
                model(x.double()).square().mean().backward()
                optimizer.step()
        return nn.utils.parameters_to_vector(model.parameters()).detach()

    model, optimizer = model_and_optimizer()
    for _ in range(3):
        optimizer.zero_grad()
        (sum(model(x.double()).square().mean() for x in inputs) / 2).backward()
        optimizer.step()
    expected = nn.utils.parameters_to_vector(model.parameters()).detach()
    for ended in hocket.virtual(2).run(rank):
        torch.testing.assert_close(ended, expected, rtol=1e-12, atol=1e-14)
