"""`hocket recommend`: predictions against sums by hand and against simulated ranks, and what mistakes look like."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import hocket
from hocket.cli.main import cli
from hocket.delays import Delays, Fixed, RandomSubset
from hocket.errors import UserError
from hocket.plan.advice import Prediction, least_bandwidth_for_plain, most_hosts_for_plain, predict
from hocket.plan.lateness import LOOKED_AT, held_up_seconds
from hocket.plan.plan import Plan, plan
from hocket.strategy.scope import Placement
from hocket.transport.network import NetworkModel

RANKS, STEP_S = 4, 0.1
NETWORK = NetworkModel(latency_s=1e-3, bandwidth_bytes_per_s=2e5)
SITUATION = ["--params", "25M", "--hosts", "8x1", "--bandwidth", "1gbit", "--step", "0.1"]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(20, 20, bias=False) for _ in range(5)))


def planned(*strategy: str, ranks: int = RANKS) -> Plan:
    return plan(hocket.compose(*strategy), model(), Placement(tuple(range(ranks))), NETWORK)


def drawn(delays: Delays, ranks: int = RANKS) -> np.ndarray:
    return np.stack([delays.of_step(step, ranks, 0) for step in range(LOOKED_AT)])


def test_who_meets_all_others_in_each_step_is_held_up_by_the_latest() -> None:
    delays = RandomSubset(2, 0.3)
    held_up_s = held_up_seconds(planned("sgd"), STEP_S, delays)
    assert held_up_s == pytest.approx(drawn(delays).max(axis=1).mean())


def test_who_meets_them_at_the_end_of_a_period_is_held_up_by_the_latest_of_a_period() -> None:
    delays = RandomSubset(1, 0.3)
    held_up_s = held_up_seconds(planned("periodic_average"), STEP_S, delays)
    of_periods = drawn(delays).reshape(-1, 8, RANKS).sum(axis=1)
    assert held_up_s == pytest.approx(of_periods.max(axis=1).sum() / LOOKED_AT)


def test_who_meets_nobody_is_held_up_by_itself_alone() -> None:
    delays = Fixed([1], 0.2)
    assert held_up_seconds(planned("local"), STEP_S, delays) == pytest.approx(0.2 / RANKS)


def test_a_slow_rank_holds_up_everybody_it_hears_of() -> None:
    # Over a ring it takes some steps until all know of it; from then on all are as slow.
    held_up_s = held_up_seconds(planned("dpsgd", ranks=8), STEP_S, Fixed([3], 0.2))
    assert 0.19 < held_up_s < 0.2


def test_a_delay_hides_lateness_within_a_step() -> None:
    delays = RandomSubset(1, 0.05)
    now, later = (
        held_up_seconds(planned("periodic_average", "parameters.0.every=1", *delay), STEP_S, delays)
        for delay in ((), ("parameters.0.delay=1",))
    )
    assert now == pytest.approx(0.05)
    assert later < 0.6 * now


@pytest.mark.parametrize("late", [None, RandomSubset(1, 0.2)])
@pytest.mark.parametrize("recipe", ["sgd", "dpsgd", "sgp", "periodic_average"])
def test_it_predicts_what_simulated_ranks_take(recipe: str, late: Delays | None) -> None:
    steps = 40

    def train() -> float:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        peer = hocket.join()
        with hocket.attach(net, optimizer, recipe) as session:
            for step in range(steps):
                peer.clock.elapse(STEP_S + (0.0 if late is None else late.of_step(step, RANKS, 0)[peer.rank]))
                optimizer.zero_grad()
                net(torch.ones(1, 20)).square().mean().backward()
                optimizer.step()
            session.settle()
            return peer.clock.now() / steps

    taken = hocket.virtual(RANKS, network=NETWORK).run(train)
    held_up_s = 0.0 if late is None else held_up_seconds(planned(recipe), STEP_S, late)
    predicted = predict(recipe, planned(recipe), STEP_S, held_up_s).step_s
    assert predicted == pytest.approx(np.mean(taken), rel=0.1)


def test_plain_allreduce_is_good_from_where_it_is_within_five_per_cent() -> None:
    def at(bandwidth: float) -> list[Prediction]:
        return [
            Prediction(name, STEP_S + nbytes / bandwidth, 0.0, 0.0, 0.0, nbytes, 0)
            for name, nbytes in (("agd", 2e6), ("other", 1e6))
        ]

    least = least_bandwidth_for_plain(at)
    exact = (2e6 - 1.05e6) / (0.05 * STEP_S)
    assert least is not None
    assert exact <= least < 1.3 * exact
    assert least_bandwidth_for_plain(lambda _: at(1.0)) is None

    def among(hosts: int) -> list[Prediction]:
        return [Prediction(*each, 0.0, 0.0, 0.0, 0.0, 0) for each in (("agd", 0.01 * hosts), ("other", 0.08))]

    assert most_hosts_for_plain(among, (2, 4, 8, 16)) == 8
    assert most_hosts_for_plain(among, (16, 32)) is None


def recommend(*arguments: str) -> str:
    result = CliRunner().invoke(cli, ["recommend", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def ranked(told: str) -> list[str]:
    lines = told[told.index("strategy") :].splitlines()
    return [line.split()[0] for line in lines[1 : lines.index("")]]


def test_it_ranks_recipes_and_says_what_they_cost() -> None:
    slow, fast = (recommend(*SITUATION, "--bandwidth", each) for each in ("100mbit", "1tbit"))
    names = ranked(slow)
    assert names.index("periodic_average") < names.index("agd") <= names.index("sgd")
    assert set(names) == set(ranked(fast))
    assert "local" not in names
    for name in names:
        assert re.search(rf"^- {re.escape(name)}: .*\n?(.*\n)*?.*Measured:", slow, re.M), name
    assert "Plain allreduce (agd) is within 5 %" in slow
    assert "with any number of such hosts" in slow
    assert re.search(r"up to 1024\s+such hosts", fast)


def test_it_takes_a_task_a_function_a_file_and_an_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["--hosts", "4x2", "--step", "0.1"]
    assert "2 hosts" not in recommend("task=digits", *given)
    (tmp_path / "mine.py").write_text("import torch\ndef net(): return torch.nn.Linear(10, 10)\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "110 parameters" in recommend("--model", "mine:net", *given)
    file = tmp_path / "run.yaml"
    file.write_text("recipe: dpsgd\nranks: 4\ncompute: {step_s: 0.2}\n")
    assert "a step computes 200 ms" in recommend(str(file))
    adamw = recommend("task=digits", *given, "--optimizer", "adamw", "--late", "1x0.3", "--all")
    assert "RandomSubset" in adamw


def test_it_measures_a_task_s_step_and_compressors() -> None:
    told = recommend("task=digits", "--hosts", "2x1", "--measure")
    assert "compressing" in told
    assert re.search(r"a step computes [\d.]+ [mu]s", told)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--hosts is missing"),
        (["--hosts", "1x1", "--params", "1M", "--step", "1"], "a single rank exchanges nothing"),
        (["--hosts", "2x1", "--step", "1"], "which model is missing"),
        (["--hosts", "2x1", "--params", "1M"], "--step is missing"),
        (["--hosts", "2x1", "--params", "1M", "--measure"], "--step is missing"),
        (["--hosts", "2x1", "--params", "many"], "--params: got 'many'"),
        (["--hosts", "2x1", "--params", "1M", "--model", "a:b"], "leave one out"),
        (["--hosts", "2x1", "--model", "nothing"], "'module:attribute'"),
        (["--hosts", "2x1", "--model", "no_such_module:net"], "no_such_module"),
        (["--hosts", "2x1", "--model", "os:getcwd"], "returned str, no torch.nn.Module"),
        (["--hosts", "2x1", "--bandwidth", "fast"], "--bandwidth: got 'fast'"),
        (["--hosts", "2x1", "--latency", "5"], "--latency: got '5'"),
        (["--hosts", "2x1", "--late", "often"], "--late: got 'often'"),
        (["--hosts", "2x1", "--params", "1M", "--step", "1", "--late", "3x1"], "--late among 2 ranks"),
        (["--hosts", "2x1", "--params", "1M", "--step", "1", "--optimizer", "adamv"], "adamv"),
        (["nowhere", "--hosts", "2x1"], "neither a YAML file nor the folder of a run"),
    ],
)
def test_a_mistake_is_told_in_a_line(arguments: list[str], said: str) -> None:
    with pytest.raises(UserError) as raised:
        recommend(*arguments)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)
