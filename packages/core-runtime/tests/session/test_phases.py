"""Changes of strategy at a step: nothing is lost, and equal replicas begin equal."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from toys import batches, flat, mlp, on_ranks, reference, sgd, train

import hocket

RANKS, STEPS = 3, 8


def sparse(density: float, corrected: bool = False) -> dict[str, Any]:
    compressor: dict[str, Any] = {"name": "topk", "density": density}
    compressor = {"name": "error_feedback", "compressor": compressor}
    if corrected:
        compressor = {"name": "momentum_correction", "masking": False, "compressor": compressor}
    return {"gradients": [{"collective": "sparse_allreduce", "compressor": compressor}], "parameters": []}


DENSE: dict[str, Any] = {"gradients": [{"collective": "allreduce"}], "parameters": []}
GOSSIP: dict[str, Any] = {
    "gradients": [],
    "parameters": [{"collective": {"name": "gossip", "push_sum": True}, "topology": "irregular_directed"}],
}


def dense() -> Tensor:
    data = [batches(rank, STEPS) for rank in range(RANKS)]
    return reference([[(own[step], 1.0) for own in data] for step in range(STEPS)])


def trained(strategy: dict[str, Any]) -> list[Tensor]:
    return on_ranks(RANKS, lambda rank: train((strategy,), batches(rank, STEPS)))


@pytest.mark.parametrize(
    "phases",
    [
        {3: {"gradients.0.overlap": "backward"}},
        {0: {"gradients.0.segments": "layers"}, 5: {"gradients.0.overlap": "backward"}},
        {4: sparse(1.0, corrected=True)},
        {2: sparse(1.0, corrected=True), 6: DENSE},
        {2: sparse(1.0), 3: sparse(1.0, corrected=True), 4: sparse(1.0)},
    ],
)
def test_phases_that_mean_the_same_change_nothing(phases: dict[int, Any]) -> None:
    for own in trained({**DENSE, "phases": phases}):
        torch.testing.assert_close(own, dense(), rtol=1e-12, atol=1e-14)


@pytest.mark.one_of_each
@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("following", [DENSE, {"gradients": [], "parameters": [{"collective": "allreduce"}]}])
def test_what_residuals_hold_is_sent(corrected: bool, following: dict[str, Any]) -> None:
    """With a linear model and learning rate 1, parameters are the sum of all gradients."""

    def run(strategy: dict[str, Any]) -> list[Tensor]:
        def of_rank(rank: int) -> Tensor:
            model = nn.Linear(40, 1, bias=False)
            nn.init.zeros_(model.weight)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            generator = torch.Generator().manual_seed(rank)
            with hocket.attach(model, optimizer, strategy) as session:
                for _ in session.data(range(STEPS)):
                    optimizer.zero_grad()
                    model(torch.randn(4, 40, generator=generator)).mean().backward()
                    optimizer.step()
            return model.weight.detach().clone()

        return on_ranks(RANKS, of_rank)

    changing = {**sparse(0.05, corrected), "phases": {STEPS - 1: following}}
    for own, expected in zip(run(changing), run(DENSE), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6)


def test_replicas_that_have_drifted_apart_go_on_from_their_mean() -> None:
    def run(rank: int) -> tuple[Tensor, Tensor]:
        model = mlp()
        optimizer = sgd(model)
        equal = []
        with hocket.attach(model, optimizer, {**GOSSIP, "phases": {4: DENSE}}) as session:
            for step, (x, y) in enumerate(session.data(batches(rank, STEPS))):
                if step == 4:
                    begun = flat(model)
                equal.append(session.inner.replicas_equal)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
        assert equal == [False] * 4 + [True] * 4
        return begun, flat(model)

    ended = on_ranks(RANKS, run)
    before = trained_until(GOSSIP, 4)
    for begun, after in ended:
        torch.testing.assert_close(begun, before, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(after, ended[0][1], rtol=0, atol=0)


def trained_until(strategy: dict[str, Any], step: int) -> Tensor:
    """The consensus of a run that ends there."""

    def run(rank: int) -> Tensor:
        model = mlp()
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, strategy) as session:
            for x, y in session.data(batches(rank, STEPS)[:step]):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
            session.consensus()
        return flat(model)

    return on_ranks(RANKS, run)[0]


def test_equal_replicas_may_drift_apart_from_a_step_on() -> None:
    ended = trained({**DENSE, "phases": {4: GOSSIP, 6: {"parameters.0.delay": 1}}})
    assert not torch.equal(ended[0], ended[1])


def test_a_parameter_that_no_optimizer_steps_stays_through_a_change_of_phase() -> None:
    def run(rank: int) -> tuple[Tensor, Tensor]:
        model = mlp()
        before = model.get_parameter("2.weight").detach().clone()
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
        with hocket.attach(model, optimizer, {**sparse(0.25, corrected=True), "phases": {2: DENSE}}):
            for x, y in batches(rank, 4):
                model.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
        return before, model.get_parameter("2.weight").detach()

    assert all(torch.equal(before, after) for before, after in on_ranks(2, run))


@pytest.mark.parametrize("following", [DENSE, sparse(1.0)])
def test_a_layer_that_a_phase_has_found_frozen_is_exchanged_in_every_backward_afterwards(
    following: dict[str, Any],
) -> None:
    """Of two backwards a step, as of sharpness-aware minimisation, whose first is dropped."""
    opens, thaws = 2, 4
    data = [batches(0, opens) + batches(rank, STEPS)[opens:] for rank in range(RANKS)]

    def run(ranks: range, strategy: dict[str, Any] | None) -> Tensor:
        """Train on the batches of some ranks, which are all alike while no gradients are exchanged."""
        model = mlp()
        optimizer = sgd(model)
        with nullcontext() if strategy is None else hocket.attach(model, optimizer, strategy):
            for step in range(STEPS):
                model[0].requires_grad_(step >= thaws)
                for _ in range(2):
                    optimizer.zero_grad()
                    pairs = [data[rank][step] for rank in ranks]
                    sum(
                        (cross_entropy(model(x), classes) / len(pairs) for x, classes in pairs),
                        torch.zeros(()),
                    ).backward()
                optimizer.step()
        return flat(model)

    strategy = {"gradients": [], "parameters": [], "phases": {opens: following}}
    for own in on_ranks(RANKS, lambda rank: run(range(rank, rank + 1), strategy)):
        torch.testing.assert_close(own, run(range(RANKS), None), rtol=1e-12, atol=1e-14)


def test_replicas_whose_optimizers_keep_a_history_stay_equal_from_a_phase_on() -> None:
    """There is no mean of the directions that LBFGS remembers, so that it begins anew on all ranks."""

    def of_rank(rank: int) -> Tensor:
        model = mlp()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2, history_size=3)
        strategy = {"gradients": [], "parameters": [], "phases": {3: DENSE}}
        with hocket.attach(model, optimizer, strategy):
            for x, classes in batches(rank, STEPS):

                def closure(x: Tensor = x, classes: Tensor = classes) -> Tensor:
                    optimizer.zero_grad()
                    loss = cross_entropy(model(x), classes)
                    loss.backward()
                    return loss

                optimizer.step(closure)
            return flat(model)

    first, *others = on_ranks(RANKS, of_rank)
    assert all(torch.equal(first, other) for other in others)
