"""DiLoCo against the NumPy loop, torch's own SGD, and what it reduces to."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from oracle import Family, trained
from toys import LAYERS, flat, inner_step, layers_of, on_ranks, start, steps_of, toy_session, train

import hocket
from hocket.testing.session import inner_of

EVERY = 4
STEPS = 3 * EVERY + 2
OUTERS: list[dict[str, Any]] = [
    {"lr": 1.0},
    {"lr": 0.3},
    {"lr": 0.7, "momentum": 0.9},
    {"lr": 0.7, "momentum": 0.9, "nesterov": True},
    {"lr": 1.4, "momentum": 0.5, "nesterov": True},
]


def diloco(outer: dict[str, Any], **fields: Any) -> dict[str, Any]:
    exchange = {"collective": "allreduce", "every": EVERY, "outer": {"name": "sgd", **outer}, **fields}
    return {"parameters": [exchange]}


def assert_layers(given: Any, expected: Any, rtol: float = 1e-12) -> None:
    for layer in LAYERS:
        np.testing.assert_allclose(given[layer], expected[layer], rtol=rtol, atol=rtol)


@pytest.mark.one_of_each
@pytest.mark.parametrize("outer", OUTERS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_replicas_and_outer_parameters_are_those_of_the_definition(ranks: int, outer: dict[str, Any]) -> None:
    replicas, phi = trained(Family(EVERY, **outer), start(ranks), STEPS, inner_step)
    ended = on_ranks(ranks, lambda: train(diloco(outer), STEPS))
    for rank, (own, consensus, _) in enumerate(ended):
        assert_layers(own, {layer: replicas[-1][layer][rank] for layer in LAYERS})
        assert_layers(consensus, phi[-1])


@pytest.mark.one_of_each
@pytest.mark.parametrize("outer", OUTERS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_outer_parameters_are_those_of_torchs_sgd_on_the_mean_distance(
    ranks: int, outer: dict[str, Any]
) -> None:
    """In float32, for drawn replicas: torch steps with the mean of the ranks' distances."""
    rounds = 4
    drawn = torch.randn(rounds, ranks, sum(LAYERS.values()), generator=torch.Generator().manual_seed(1))

    def run() -> torch.Tensor:
        with toy_session(diloco(outer, every=1), torch.float32, lr=0.0) as session:
            for round in range(rounds):
                torch.nn.utils.vector_to_parameters(drawn[round, session.rank], session.model.parameters())
                for parameter in session.model.parameters():
                    parameter.grad = torch.zeros_like(parameter)
                session.optimizer.step()
            return flat(session.model)

    with toy_session({}, torch.float32) as alone:
        phi = torch.nn.Parameter(flat(alone.model))
    optimizer = torch.optim.SGD([phi], **outer)
    for of_ranks in drawn:
        phi.grad = (phi.detach() - of_ranks).double().mean(0).float()
        optimizer.step()
    for given in on_ranks(ranks, run):
        torch.testing.assert_close(given, phi.detach(), rtol=1e-6, atol=1e-6)


def test_parameters_of_two_bytes_have_outer_ones_of_four() -> None:
    """Distances of less than a parameter's rounding add up."""

    def run() -> tuple[NDArray[np.float64], torch.dtype]:
        with toy_session(diloco({"lr": 0.01}, every=1), torch.bfloat16, lr=0.0) as session:
            begun = flat(session.model)
            for _ in range(20):
                torch.nn.utils.vector_to_parameters(begun + 0.0625, session.model.parameters())
                steps_of(session, 1)
            [mix] = inner_of(session).phase.parameters.exchanges
            [outer] = mix.outer.values()
            moved = torch.cat([outer.parameters[s.start : s.stop] for s in mix.opened.segments[0].spans])
            return (moved - begun.float()).double().numpy(), outer.parameters.dtype

    for moved, dtype in on_ranks(2, run):
        assert dtype == torch.float32
        assert (moved > 0.008).all()


def test_rate_1_without_momentum_is_the_periodic_average() -> None:
    average = hocket.compose("periodic_average", f"parameters.0.every={EVERY}")
    for (own, *_), (expected, *_) in zip(
        on_ranks(3, lambda: train(diloco({"lr": 1.0}), STEPS)),
        on_ranks(3, lambda: train(average, STEPS)),
        strict=True,
    ):
        assert_layers(own, expected, rtol=1e-13)


def test_looking_at_the_outer_parameters_sends_nothing_and_changes_nothing() -> None:
    outer = OUTERS[3]
    for looked, plain in zip(
        on_ranks(3, lambda: train(diloco(outer), STEPS, look=range(1, STEPS))),
        on_ranks(3, lambda: train(diloco(outer), STEPS)),
        strict=True,
    ):
        for layer in LAYERS:
            np.testing.assert_array_equal(looked[0][layer], plain[0][layer])
        assert looked[2] == plain[2]


@pytest.mark.parametrize("segments", ["model", "layers", {"name": "bytes", "size_mb": 1e-4}])
def test_segments_change_no_bit(segments: Any) -> None:
    [expected, *_], [given, *_] = (
        on_ranks(2, partial(train, diloco(OUTERS[3], segments=cut), STEPS)) for cut in ("bytes", segments)
    )
    for layer in LAYERS:
        np.testing.assert_array_equal(given[0][layer], expected[0][layer])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_bytes_are_a_rings_of_the_parameters_every_period(ranks: int) -> None:
    """2 (p - 1) / p of N values in H steps, and one number more, the weight."""
    numel = sum(-(-size // 8) * 8 for size in LAYERS.values())  # in 64 bytes each
    for _, _, sent in on_ranks(ranks, lambda: train(diloco(OUTERS[3]), 3 * EVERY)):
        assert sent == 3 * 2 * (ranks - 1) / ranks * 8 * (numel + 1)


def test_ranks_weigh_as_much_as_their_batches() -> None:
    """A rank that is out of data repeats its last batch with weight 0, and counts as much less, or not at all."""
    counts = [STEPS, 6, 0]

    def run() -> dict[str, NDArray[np.float64]]:
        with toy_session(diloco(OUTERS[3])) as session:
            for _ in session.data(list(range(counts[session.rank]))):
                steps_of(session, 1)
            return layers_of(session.model)

    def weights(step: int) -> NDArray[np.float64]:
        return np.array([float(step <= count) for count in counts])

    def step_of_those_with_data(step: int, theta: Any) -> None:
        before = {layer: values.copy() for layer, values in theta.items()}
        inner_step(step, theta)
        for rank, count in enumerate(counts):
            for layer, values in theta.items():
                if step > count:
                    values[rank] = before[layer][rank]

    family = Family(EVERY, **OUTERS[3])
    replicas, _ = trained(family, start(3), STEPS, step_of_those_with_data, weights)
    for rank, own in enumerate(on_ranks(3, run)):
        assert_layers(own, {layer: replicas[-1][layer][rank] for layer in LAYERS})


def test_frozen_parameters_stay_at_home() -> None:
    """An exchange leaves them alone; one model on all ranks is what a consensus shows, until its end."""

    def run() -> list[float]:
        frozen = torch.nn.Linear(4, 4).requires_grad_(False)
        frozen.weight.fill_(hocket.join().rank)
        model = torch.nn.Sequential(frozen, torch.nn.Linear(4, 4)).double()
        optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
        with hocket.attach(model, optimizer, diloco(OUTERS[3], every=1), initial="keep") as session:
            model(torch.ones(1, 4).double()).sum().backward()
            optimizer.step()
            seen = [float(frozen.weight.detach().mean())]
            with session.consensus():
                seen.append(float(frozen.weight.detach().mean()))
            return [*seen, float(frozen.weight.detach().mean())]

    assert on_ranks(3, run) == [[rank, 1, rank] for rank in range(3)]


def test_outer_parameters_begin_equal_where_replicas_do_not() -> None:
    def run() -> tuple[torch.Tensor, torch.Tensor]:
        with toy_session(diloco(OUTERS[3]), initial="keep", shift=True) as session:
            begun = flat(session.model)
            with session.consensus():
                return begun, flat(session.model)

    ended = on_ranks(4, run)
    mean = torch.stack([begun for begun, _ in ended]).mean(0)
    for _, consensus in ended:
        torch.testing.assert_close(consensus, mean)


def test_a_scaler_that_skips_on_one_rank_still_counts_the_step() -> None:
    """One rank finds Inf in its gradients and stays where it is; all ranks are due after the same step."""

    def run() -> tuple[int, bool]:
        with toy_session(diloco(OUTERS[3]), torch.float32) as session:
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            for step in range(EVERY):
                for parameter in session.model.parameters():
                    parameter.grad = torch.ones_like(parameter) * 4
                    if session.rank == 1 and step == 1:
                        parameter.grad.fill_(torch.inf)
                scaler.scale(torch.zeros(()))
                scaler.step(session.optimizer)
                scaler.update()
            steps, own = session.step, flat(session.model)
            with session.consensus():
                return steps, torch.equal(own, flat(session.model))

    assert on_ranks(2, run) == [(EVERY, True)] * 2


def test_accumulated_batches_are_one_step() -> None:
    def run() -> tuple[int, float]:
        with toy_session(diloco(OUTERS[3])) as session:
            for number in range(2 * EVERY):
                total = sum(parameter.sum() for parameter in session.model.parameters())
                if number % 2 == 0:
                    with session.accumulate():
                        total.backward()
                else:
                    total.backward()
                    session.optimizer.step()
            return session.step, session.counters.exchanges

    assert on_ranks(2, run) == [(EVERY, 1)] * 2
