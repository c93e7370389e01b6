"""Core's outer optimizer and merges against their contracts, torch's own, and their limits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hocket.outer.merge import AddDisplacement, Blend
from hocket.outer.sgd import Sgd
from hocket.testing.outer import MergeConformance, OuterConformance


class TestSgd(OuterConformance):
    outers = (Sgd(1.0), Sgd(0.5, 0.9), Sgd(0.7, 0.9, nesterov=True))


class TestMerges(MergeConformance):
    merges = (AddDisplacement(), Blend(0.0), Blend(0.3), Blend(1.0))


@pytest.mark.parametrize("outer", TestSgd.outers)
def test_it_has_the_bits_of_torchs_sgd(outer: Sgd) -> None:
    torch.manual_seed(0)
    reference = torch.nn.Parameter(torch.randn(33))
    optimizer = torch.optim.SGD([reference], outer.lr, outer.momentum, nesterov=outer.nesterov)
    parameters = reference.detach().clone()
    state = {name: torch.zeros(33) for name in outer.remembers}
    for _ in range(5):
        gradient = torch.randn(33)
        reference.grad = gradient.clone()
        optimizer.step()
        outer.step(parameters, gradient, state)
        assert torch.equal(parameters, reference.detach())


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"lr": 0.0}, "lr must be finite and more than 0"),
        ({"lr": float("inf")}, "lr must be finite"),
        ({"lr": 1.0, "momentum": 1.0}, "momentum must be 0 or more and less than 1"),
        ({"lr": 1.0, "nesterov": True}, "nesterov needs momentum"),
    ],
)
def test_what_does_not_step_is_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Sgd(**given)


@pytest.mark.parametrize("local", [0.0, 1.0])
def test_the_ends_of_a_blend_are_exact(local: float) -> None:
    """Also where numbers are so far apart that their difference is rounded."""
    parameters, come = torch.tensor([1e8, 0.1, -3.0]), torch.tensor([0.3, 1e8, 7.7])
    expected = parameters.clone() if local else come.clone()
    Blend(local).merge(parameters, come, None)
    assert torch.equal(parameters, expected)
