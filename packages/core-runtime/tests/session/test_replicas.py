"""Replicas that drift apart: periodic averages, the consensus, and the distance from it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toys import batches, flat, gradient_of, mlp, on_ranks, reference, replicas, sgd, train

import hocket

RANKS, STEPS = 4, 7


@pytest.mark.one_of_each
@pytest.mark.parametrize("segments", ["model", "layers", "{name: bytes, size_mb: 0.0001}"])
@pytest.mark.parametrize("every", [1, 3])
def test_periodic_average_equals_the_single_process(every: int, segments: str) -> None:
    strategy = ("periodic_average", f"parameters.0.every={every}", f"parameters.0.segments={segments}")
    given = on_ranks(RANKS, lambda rank: train(strategy, batches(rank, STEPS)))
    expected = replicas([batches(rank, STEPS) for rank in range(RANKS)], every)
    for of_rank, wanted in zip(given, expected, strict=True):
        torch.testing.assert_close(of_rank, wanted, rtol=1e-12, atol=1e-13)
    assert (STEPS % every == 0) == all(torch.equal(of_rank, given[0]) for of_rank in given)


def test_average_of_every_step_is_synchronous_sgd() -> None:
    """Without momentum, averaging parameters after each step is averaging gradients."""
    given = on_ranks(
        RANKS,
        lambda rank: train(("periodic_average", "parameters.0.every=1"), batches(rank, STEPS), momentum=0),
    )
    columns = zip(*(batches(rank, STEPS) for rank in range(RANKS)), strict=True)
    expected = reference([[(batch, 1.0) for batch in column] for column in columns], momentum=0)
    torch.testing.assert_close(given[0], expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("strategy", ["sgd", "agd"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_mean_of_gradients_of_16_bits_is_rounded_once(dtype: torch.dtype, strategy: str) -> None:
    given = [gradient_of(mlp(0, dtype), batches(rank, 1, dtype=dtype)[0]) for rank in range(RANKS)]
    means = [torch.stack(of_ranks).double().mean(0) for of_ranks in zip(*given, strict=True)]

    def step(rank: int) -> None:
        model = mlp(0, dtype)
        x, y = batches(rank, 1, dtype=dtype)[0]
        with hocket.attach(model, sgd(model), strategy):
            F.cross_entropy(model(x), y).backward()
            for parameter, mean in zip(model.parameters(), means, strict=True):
                assert parameter.grad is not None
                torch.testing.assert_close(parameter.grad, mean.to(dtype), rtol=0, atol=0)

    on_ranks(RANKS, step)


def test_keep_starts_each_rank_from_its_own() -> None:
    given = on_ranks(
        3, lambda rank: train(("periodic_average",), batches(rank, 8), seed=rank, attach={"initial": "keep"})
    )
    expected = replicas([batches(rank, 8) for rank in range(3)], 8, initial=(0, 1, 2))
    for of_rank, wanted in zip(given, expected, strict=True):
        torch.testing.assert_close(of_rank, wanted, rtol=1e-12, atol=1e-13)
    local = on_ranks(3, lambda rank: train(("local",), [], seed=rank, attach={"initial": "keep"}))
    assert all(torch.equal(of_rank, flat(mlp(rank))) for rank, of_rank in enumerate(local))


def test_broadcast_of_a_root() -> None:
    strategy = {
        "gradients": [{"collective": "allreduce"}],
        "parameters": [{"collective": {"name": "broadcast", "root": 1}}],
    }
    keep = {"initial": "keep"}
    given = on_ranks(3, lambda rank: train((strategy,), batches(rank, 1), seed=rank, attach=keep))
    root = mlp(1)
    gradients = [gradient_of(mlp(rank), batches(rank, 1)[0]) for rank in range(3)]
    for parameter, *of_ranks in zip(root.parameters(), *gradients, strict=True):
        parameter.grad = torch.stack(of_ranks).mean(0)
    sgd(root).step()
    for of_rank in given:
        torch.testing.assert_close(of_rank, flat(root), rtol=1e-12, atol=1e-13)


class Normed(nn.Module):
    """Parameters, batch norm's buffers, an integer one, a transposed one, an empty one, a flag."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.enter = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.head = nn.Linear(7, 3)
        self.register_buffer("seen", torch.tensor([seed]))
        self.register_buffer("transposed", torch.randn(3, 2).t())
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("flag", torch.tensor(seed % 2 == 1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(torch.tanh(self.norm(self.enter(x))))
        return y


def drifted(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    return (model := Normed(rank)), torch.optim.SGD(model.parameters(), lr=0.1)


def state(model: nn.Module) -> dict[str, np.ndarray]:
    return {name: value.detach().numpy().copy() for name, value in model.state_dict().items()}


def mean_of(states: list[dict[str, np.ndarray]], rank: int) -> dict[str, np.ndarray]:
    """Average what is floating point; keep the rank's own rest."""
    return {
        name: np.asarray(np.mean([other[name] for other in states], axis=0, dtype=np.float64))
        if value.dtype.kind == "f"
        else value
        for name, value in states[rank].items()
    }


def assert_states_equal(
    given: dict[str, np.ndarray], expected: dict[str, np.ndarray], rtol: float = 0
) -> None:
    assert given.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(given[name], value, rtol=rtol, atol=rtol, err_msg=name)


@pytest.mark.parametrize("as_context", [True, False])
@pytest.mark.parametrize("strategy", ["local", "periodic_average"])
def test_consensus_is_the_mean(strategy: str, as_context: bool) -> None:
    def run(rank: int) -> list[dict[str, np.ndarray]]:
        model, optimizer = drifted(rank)
        before = state(model)
        with hocket.attach(model, optimizer, strategy, initial="keep", statistics=["transposed"]) as session:
            if as_context:
                with session.consensus():
                    inside = state(model)
            else:
                session.consensus()
                inside = state(model)
            return [before, inside, state(model)]

    told = on_ranks(3, run)
    befores = [before for before, _, _ in told]
    for before, inside, after in told:
        assert_states_equal(inside, mean_of(befores, 0), rtol=1e-6)
        assert_states_equal(after, before if as_context else inside)
    floats = [{n: v for n, v in inside.items() if v.dtype.kind == "f"} for _, inside, _ in told]
    assert_states_equal(floats[1], floats[0])


def test_consensus_leaves_equal_replicas_alone() -> None:
    """With gradients averaged at every step only buffers differ: parameters keep their bits."""

    def run(rank: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        model, optimizer = drifted(rank)
        with hocket.attach(model, optimizer, "agd") as session:
            for x, y in session.data(batches(rank, 3, dtype=torch.float32)):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            before = state(model)
            session.consensus()
            return before, state(model)

    told = on_ranks(3, run)
    befores = [before for before, _ in told]
    assert not np.array_equal(befores[0]["norm.running_mean"], befores[1]["norm.running_mean"])
    for rank, (before, after) in enumerate(told):
        assert_states_equal(after, mean_of(befores, rank), rtol=1e-6)
        for name in ("enter.weight", "head.bias"):
            assert np.array_equal(after[name], before[name])
            assert np.array_equal(after[name], told[0][1][name])


def test_training_goes_on_from_the_own_replica_after_evaluation() -> None:
    def run(rank: int) -> Tensor:
        model = mlp()
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, "local") as session:
            for x, y in session.data(batches(rank, 4)):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                with session.consensus():
                    model(x)
        return flat(model)

    for given, expected in zip(
        on_ranks(2, run), replicas([batches(r, 4) for r in range(2)], None), strict=True
    ):
        torch.testing.assert_close(given, expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_consensus_distance(dtype: torch.dtype) -> None:
    def run(rank: int) -> tuple[float, np.ndarray]:
        model = mlp(rank, dtype)
        with hocket.attach(model, sgd(model), "local", initial="keep") as session:
            return session.consensus_distance(), flat(model).double().numpy()

    told = on_ranks(3, run)
    values = np.stack([value for _, value in told])
    expected = np.sqrt(np.square(values - values.mean(axis=0)).sum(axis=1).mean())
    for distance, _ in told:
        assert distance == pytest.approx(
            expected, rel={torch.float64: 1e-12, torch.float32: 1e-6}.get(dtype, 1e-2)
        )


def test_consensus_distance_of_equal_replicas_is_zero() -> None:
    def run(rank: int) -> float:
        model = mlp()
        with hocket.attach(model, sgd(model), "agd") as session:
            return session.consensus_distance()

    assert on_ranks(2, run) == [0.0, 0.0]


def test_attach_gives_everyone_rank_0s_buffers_and_frozen_parameters() -> None:
    def run(rank: int) -> dict[str, np.ndarray]:
        model, _ = drifted(rank)
        model.head.requires_grad_(False)
        with hocket.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "sgd"):
            return state(model)

    expected = state(Normed(0))
    for given in on_ranks(3, run):
        assert_states_equal(given, expected)
