"""BatchNorm's statistics, which ranks keep for themselves, or average where they exchange parameters."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn
from toys import batches, on_ranks

import hocket
from hocket.errors import CompositionError
from hocket.plan.plan import plan
from hocket.transport.network import NetworkModel

RANKS, EVERY, STEPS, MOMENTUM = 3, 2, 5, 0.1

OUTER = "parameters.0.outer={name: sgd, lr: 0.7, momentum: 0.9}"
STRATEGY = ("periodic_average", f"parameters.0.every={EVERY}")


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Linear(5, 7), nn.BatchNorm1d(7, momentum=MOMENTUM), nn.Tanh(), nn.Linear(7, 3))
    net = nn.Sequential(*layers).double()
    net.register_buffer("single", torch.zeros(4, dtype=torch.float32))
    return net


def train(rank: int, *overrides: str) -> tuple[list[Tensor], Tensor, float]:
    """Return the running means after each step, the other buffer at the end, and the bytes sent in a step."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    means = []
    with hocket.attach(
        net, optimizer, hocket.compose(*STRATEGY, *overrides), statistics=["single"]
    ) as session:
        net.get_buffer("single").fill_(rank)
        for x, y in batches(rank, STEPS):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
            means.append(net.get_buffer("1.running_mean").clone())
        session.settle()
        return means, net.get_buffer("single").clone(), session.counters.bytes_sent / STEPS


@pytest.mark.parametrize(
    "overrides", [(), (OUTER,), (OUTER, "parameters.0.delay=1", "parameters.0.stagger=true")]
)
def test_buffers_are_their_mean_at_the_end_of_each_period(overrides: tuple[str, ...]) -> None:
    own = on_ranks(RANKS, lambda rank: train(rank, *overrides))
    mean = on_ranks(RANKS, lambda rank: train(rank, *overrides, "parameters.0.buffers=mean"))
    # In training nothing reads them, so that both runs have the same batches' means, which follow from the first run's.
    expected = torch.zeros(RANKS, 7, dtype=torch.float64)
    before = torch.zeros(RANKS, 7, dtype=torch.float64)
    for step in range(STEPS):
        alone = torch.stack([means[step] for means, _, _ in own])
        of_batch = (alone - (1 - MOMENTUM) * before) / MOMENTUM
        before = alone
        expected = (1 - MOMENTUM) * expected + MOMENTUM * of_batch
        if (step + 1) % EVERY == 0:
            expected = expected.mean(0).expand(RANKS, -1)
        got = torch.stack([means[step] for means, _, _ in mean])
        torch.testing.assert_close(got, expected)
    assert [float(single[0]) for _, single, _ in own] == [0, 1, 2]
    assert [float(single[0]) for _, single, _ in mean] == [1, 1, 1]
    # In a ring two statistics of 7 in float64, in 2 of 5 steps, and once 4 numbers in float32, which are equal then.
    more = [with_mean[2] - alone[2] for with_mean, alone in zip(mean, own, strict=True)]
    assert more == pytest.approx([2 * (RANKS - 1) / RANKS * (2 * 2 * 7 * 8 + 4 * 4) / STEPS] * RANKS)


def test_a_plan_counts_them() -> None:
    own, mean = (
        plan(hocket.compose(*STRATEGY, f"parameters.0.buffers={what}"), model(), RANKS, NetworkModel())
        for what in ("own", "mean")
    )
    nbytes = 2 * (RANKS - 1) / RANKS * 2 * 7 * 8 / EVERY
    assert mean.bytes_per_step - own.bytes_per_step == pytest.approx(nbytes)
    assert mean.seconds_per_step > own.seconds_per_step


def test_a_session_says_where_outer_parameters_leave_them_alone(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "hocket"):
        on_ranks(RANKS, lambda rank: train(rank, OUTER))
        assert "the model's 3 buffers (BatchNorm's statistics) differ between ranks" in caplog.text
        assert "parameters.0.buffers=mean" in caplog.text
        caplog.clear()
        # Among leaders it is refused, so that it is no advice.
        led = (
            "parameters=[{collective: allreduce, over: {name: leaders, size: 1}, segments: bytes, every: 2, "
            "outer: {name: sgd, lr: 0.7}}, {collective: broadcast, over: {name: group, size: 1}, segments: bytes, "
            "every: 2}]"
        )
        on_ranks(RANKS, lambda rank: train(rank, led))
        assert "differ between ranks" in caplog.text
        assert "buffers=mean" not in caplog.text
        caplog.clear()
        on_ranks(RANKS, lambda rank: train(rank, OUTER, "parameters.0.buffers=mean"))
        on_ranks(RANKS, train)
        assert [told.partition(": ")[0] for told in caplog.messages] == [
            "parameters.0 steps outer parameters every 2 steps with momentum 0.9 from the first step on",
            "parameters.0 steps outer parameters every 2 steps",
        ]


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (("sgd", "gradients.0.buffers=mean"), "buffers works only for exchanges of parameters"),
        (("dpsgd", "parameters.0.buffers=mean"), "cannot average buffers"),
        (
            (*STRATEGY, "parameters.0.over={name: leaders, size: 1}", "parameters.0.buffers=mean"),
            "only leaders would average their buffers",
        ),
    ],
)
def test_a_mean_of_buffers_is_refused_where_there_is_none(strategy: tuple[str, ...], message: str) -> None:
    with pytest.raises(CompositionError, match=message):
        hocket.compose(*strategy)
