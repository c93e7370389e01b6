"""Cuts of models: balanced chains, cuts by name, and what torch.fx makes of other modules."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hocket.errors import AttachError
from hocket_eapipe import Balance
from hocket_eapipe.splitting import balanced_cuts, layers_of, measured_cuts, split


@given(costs=st.lists(st.integers(0, 20), min_size=1, max_size=9), data=st.data())
def test_no_other_cuts_are_better(costs: list[int], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))

    def badness(cuts: tuple[int, ...]) -> tuple[float, float]:
        sums = [float(sum(costs[a:b])) for a, b in pairwise((0, *cuts, len(costs)))]
        return max(sums), sum(s**2 for s in sums)

    cuts = balanced_cuts(costs, num_stages)
    everything = list(combinations(range(1, len(costs)), num_stages - 1))
    assert tuple(cuts) in everything
    # The first criterion is met exactly; the second among the ways that extend the best beginnings.
    assert badness(tuple(cuts))[0] == min(badness(other)[0] for other in everything)


def test_layers_without_cost_stay_with_what_comes_before() -> None:
    assert balanced_cuts([5, 0, 5, 0, 5, 0], 3) == [2, 4]
    assert balanced_cuts([1, 1, 1, 1], 4) == [1, 2, 3]
    assert balanced_cuts([9, 1, 1, 1], 2) == [1]


def nested() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 4),
        nn.Sequential(nn.Tanh(), nn.Linear(4, 4), nn.Sequential(nn.Tanh())),
        nn.Linear(4, 4),
    )


def run(stages: list[nn.Module], x: Tensor) -> Any:
    """Return what the last stage does, of any type."""
    value: Any = x
    for stage in stages:
        value = stage(value)
    return value


def test_nested_chains_are_one_chain() -> None:
    model = nested()
    found = layers_of(model)
    assert found is not None
    assert [name for name, _ in found] == ["0", "1.0", "1.1", "1.2.0", "2"]
    x = torch.randn(3, 4)
    for num_stages in range(1, 6):
        stages = split(model, num_stages, Balance.LAYERS, None)
        assert len(stages) == num_stages
        assert torch.equal(run(stages, x), model(x))
        assert {id(p) for stage in stages for p in stage.parameters()} == {id(p) for p in model.parameters()}


def test_cuts_by_name() -> None:
    model = nested()
    stages = split(model, 3, Balance.PARAMETERS, ["1", "2"])
    assert [len(list(stage.children())) for stage in stages] == [1, 3, 1]
    for cuts, message in (
        (["1"], "cuts names 1 layers, but 3 stages need 2"),
        (["1", "7"], "'7' is not a layer"),
        (["2", "1"], "not in the order"),
        (["0", "1"], "name its first layer"),
    ):
        with pytest.raises(AttachError, match=message):
            split(model, 3, Balance.PARAMETERS, cuts)


class Skips(nn.Module):
    """Residual connections over what may be several stages, a parameter of its own, and two results."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.middle = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(4))
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        start = torch.tanh(self.first(x))
        y = start
        for layer in self.middle:
            y = torch.relu(layer(y)) + x
        y = y * self.scale + start
        return {"logits": self.last(y), "start": start.mean()}


@given(num_stages=st.integers(1, 8), balance=st.sampled_from(Balance))
def test_other_modules_are_traced(num_stages: int, balance: Balance) -> None:
    torch.manual_seed(0)
    model, x = Skips(), torch.randn(3, 4)
    stages = split(model, num_stages, balance, None)
    expected, found = model(x), run(stages, x)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in found)
    assert {id(p) for stage in stages for p in stage.parameters()} == {id(p) for p in model.parameters()}


def test_what_cannot_be_traced() -> None:
    class Branching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(AttachError, match=r"torch.fx cannot trace it .*nn.Sequential"):
        split(Branching(), 2, Balance.LAYERS, None)


def test_measured_cuts_separate_what_takes_long() -> None:
    """A layer that takes as long as all others together has a stage of its own."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 3000), nn.Linear(3000, 3000))
    assert measured_cuts(model, torch.randn(512, 8), 2) == ("4",)
