"""The plan of outer parameters, turns and delays by `hocket plan`; its bytes are those that a session counts."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from toys import Toy, on_ranks, steps_of, toy_session

import hocket
from hocket.cli.planning import plan_command
from hocket.errors import CompositionError
from hocket.plan.plan import plan
from hocket.testing.memory import held_bytes
from hocket.transport.network import NetworkModel

RECIPES = (
    "diloco",
    "diloco.streaming",
    "diloco.snoo",
    "diloco.two_level",
    "diloco.sparta",
    "diloco.sparta_diloco",
    "diloco.noloco",
    "diloco.sparseloco",
)


@pytest.mark.one_of_each
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("recipe", RECIPES)
def test_planned_bytes_are_those_that_are_counted(recipe: str, ranks: int) -> None:
    last = len(hocket.compose(recipe).parameters)
    strategy = hocket.compose(recipe, *(f"parameters.{number}.every=8" for number in range(last)))
    planned = plan(strategy, Toy(), ranks, NetworkModel())

    def sent() -> float:
        with toy_session(strategy) as session:
            steps_of(session, 16)
            return float(session.counters.bytes_sent) / 16

    counted = on_ranks(ranks, sent)
    assert sum(counted) / ranks == pytest.approx(planned.bytes_per_step, rel=1e-12)


def test_memory_is_the_outer_parameters_momentum_and_buffers() -> None:
    def memory_bytes(*overrides: str) -> int:
        return plan(hocket.compose("diloco", *overrides), Toy(), 2, NetworkModel()).exchanges[0].memory_bytes

    model_bytes = 8 * sum(-(-p.numel() // 8) * 8 for p in Toy().parameters())
    weights = 2 * 8  # one behind what is sent, one behind what comes back
    assert memory_bytes() == 4 * model_bytes + weights
    plain = "parameters.0.outer={momentum: 0, nesterov: false}"
    assert memory_bytes(plain) == 3 * model_bytes + weights
    assert (
        memory_bytes("parameters.0.delay=1") == 5 * model_bytes + weights
    )  # what parameters were when they were sent
    assert (
        memory_bytes("parameters.0={delay: 1, merge: {name: blend, local: 0.5}}") == 4 * model_bytes + weights
    )


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_segments_take_turns_in_two_buffers_of_the_largest(ranks: int) -> None:
    strategy = hocket.compose("diloco", "parameters.0={every: 2, segments: layers}")
    sizes = [(48, 64), (64, 96), (96, 16), (16, 64), (64, 64), (64, 48)]

    def held() -> int:
        model = nn.Sequential(*(nn.Linear(*size, bias=False) for size in sizes))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with hocket.attach(model, optimizer, strategy) as session:
            for _ in range(4):
                optimizer.zero_grad()
                model(torch.ones(2, 48)).square().mean().backward()
                optimizer.step()
            return held_bytes(session)

    model = nn.Sequential(*(nn.Linear(*size, bias=False) for size in sizes))
    planned = plan(strategy, model, ranks, NetworkModel()).memory_bytes
    kept = 2 * 4 * sum(rows * columns for rows, columns in sizes)
    buffers = 2 * 2 * 4 * (64 * 96 + 1)  # what is sent, and what comes, with a weight behind it
    assert planned == kept + buffers
    assert on_ranks(ranks, held) == [buffers] * ranks  # of the exchange itself, without outer parameters


def test_it_says_what_is_hidden_and_when(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    plan_command("diloco.streaming", (), 4)
    told = capsys.readouterr().out
    assert "outer sgd {lr: 0.4, momentum: 0.9, nesterov: True}" in told
    assert "96 steps, in turns" in told
    assert "delay 1, blend {local: 0.5}" in told
    assert "segments take turns, so one step exchanges at most" in told
    assert "consensus and evaluation use the outer parameters" in told


def test_it_says_from_how_many_ranks_a_gather_sends_more(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gather of q bits sends more from 64 / q ranks on; the digits' model adds tables of 4 bytes per parameter."""
    monkeypatch.setenv("COLUMNS", "400")
    given = "parameters.0={collective: sparse_allreduce, compressor: {name: diloco.quantise, format: e3m0}}"
    for ranks, more in ((8, False), (17, True)):
        plan_command("diloco.streaming", (given,), ranks)
        [line] = [each for each in capsys.readouterr().out.splitlines() if "uncompressed values" in each]
        assert "Among more than about 16 ranks this is more than an allreduce of uncompressed values" in line
        assert ("(as here)" in line) == more


def test_more_segments_than_steps_are_refused() -> None:
    exchange = {"collective": "allreduce", "every": 3, "segments": "layers", "stagger": True}
    with pytest.raises(CompositionError, match=r"parameters\.0: stagger: 4 segments need"):
        plan(hocket.compose({"parameters": [exchange]}), Toy(), 2, NetworkModel())
