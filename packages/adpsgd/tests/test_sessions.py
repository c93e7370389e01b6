"""Averagings of pairs with everything else that sessions do: consensus, phases, checkpoints, errors, plans."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from click.testing import CliRunner
from pair_cases import Case, check, mean_at_start, mean_of, simulate, train
from torch import nn

import hocket
from hocket.cli.main import cli
from hocket.errors import (
    CompositionError,
    ConfigError,
    ExchangeTimeoutError,
    HocketError,
    PeerLostError,
    SessionLeftError,
)
from hocket.plan.plan import plan
from hocket.plugin import default_registry
from hocket.testing.memory import held_bytes
from hocket.transport.faults import Faults, KillAt
from hocket.transport.network import NetworkModel
from hocket.transport.virtual import VirtualWorld

#: So that averagings are under way when ranks come together.
LATE = Faults(seed=1, delay_s=(0.0, 0.005))


@pytest.mark.parametrize("topology", ["complete", "ring"])
def test_a_consensus_while_averagings_are_under_way_is_the_mean(topology: str) -> None:
    case = Case(
        9,
        [0.001, 0.0073, 0.0021],
        lr=0.0,
        exchange={"topology": topology},
        consensus=(3, 4, 8),
        settles=(2, 6),
    )
    told = simulate(case, 6)
    check(case, told)
    mean = mean_at_start(6)
    for of_rank in told:
        assert len(of_rank["means"]) == 3
        np.testing.assert_allclose(of_rank["means"], np.broadcast_to(mean, (3, len(mean))), atol=1e-14)
    np.testing.assert_allclose(mean_of(told), mean, atol=1e-14)


def test_one_rank_settles_alone() -> None:
    case = Case(10, [0.001, 0.003, 0.0021], settles=(2, 5, 6, 10))
    check(case, simulate(case, 4))


def test_another_phase_begins_with_the_mean() -> None:
    told = simulate(Case(8, [0.001, 0.0073, 0.0021], lr=0.0, phase=3), 6, LATE)
    assert len({tuple(of_rank["parameters"]) for of_rank in told}) == 1
    np.testing.assert_allclose(mean_of(told), mean_at_start(6), atol=1e-14)


def test_a_checkpoint_loses_no_change(tmp_path: Path) -> None:
    paces_s, ranks = [0.001, 0.0073, 0.0021], 5
    saved = simulate(Case(6, paces_s, lr=0.0, save=str(tmp_path)), ranks, LATE)
    resumed = simulate(Case(7, paces_s, lr=0.0, load=str(tmp_path)), ranks)
    np.testing.assert_allclose(mean_of(saved), mean_at_start(ranks), atol=1e-14)
    np.testing.assert_allclose(mean_of(resumed), mean_at_start(ranks), atol=1e-14)
    spread = [np.std([of_rank["parameters"] for of_rank in told], axis=0).sum() for told in (saved, resumed)]
    assert spread[1] < spread[0]


def test_a_dead_partner_is_named() -> None:
    def body() -> str:
        try:
            train(Case(40, [0.001, 0.002]))
        except PeerLostError as error:
            return str(error)
        return ""

    told = VirtualWorld(4, wrap=Faults(kill=KillAt(rank=2, step=5)).wrap).run(body)
    assert told[2] is None
    for rank in (0, 1, 3):
        assert f"rank {rank} " in told[rank]
        assert "rank 2" in told[rank], told[rank]
        assert "was killed" in told[rank]


def test_a_partner_that_does_not_come_is_named() -> None:
    def body() -> None:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with hocket.attach(model, optimizer, hocket.compose("adpsgd")) as session:
            if session.rank == 1:
                session.peer.clock.sleep(1e4)
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            session.settle()

    told = r"rank 0 .*averaging 0 of parameters\.0\[0\]: the averagings of this rank wait for rank 1 to agree"
    with pytest.raises(ExchangeTimeoutError, match=told):
        VirtualWorld(2, timeout_s=10.0).run(body)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"delay": "0", "merge": "{name: blend, local: 0.5}"},
            "`merge: blend` would lose a part of each change: use `merge: add`",
        ),
        ({"topology": "null"}, "needs a topology, for instance `topology: complete`"),
        ({"compressor": "fp16"}, "sends uncompressed values: use none"),
        ({"outer": "{name: sgd, lr: 1.0}"}, "use `collective: allreduce`"),
        ({"progress": "thread"}, "has its own schedule"),
        ({"buffers": "mean"}, "buffers: own"),
        ({"collective.seed": -1}, "seed is -1"),
    ],
)
def test_what_means_nothing_is_refused(given: dict[str, Any], told: str) -> None:
    overrides = [f"parameters.0.{key}={value}" for key, value in given.items()]
    with pytest.raises(HocketError) as caught:
        hocket.compose("adpsgd", *overrides)
    assert told in str(caught.value)


def test_gradients_are_refused() -> None:
    with pytest.raises(
        CompositionError, match=r"adpsgd\.pair_average .* cannot exchange gradients: use it in parameters"
    ):
        hocket.compose({"gradients": [{"collective": "adpsgd.pair_average", "topology": "complete"}]})


def test_both_ends_of_an_averaging_count_it() -> None:
    def body() -> tuple[int, dict[int, int]]:
        peer = hocket.join()
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        drawing = np.random.default_rng(peer.rank)
        with hocket.attach(model, optimizer, "adpsgd") as session:
            for _ in range(20):
                optimizer.zero_grad()
                model(torch.from_numpy(drawing.standard_normal((3, 4))).float()).square().mean().backward()
                optimizer.step()
                peer.clock.sleep(drawing.exponential(0.01))
            early = sum(session.counters.partners.values())
            with session.consensus():
                pass
            return early, dict(session.counters.partners)

    told = hocket.virtual(4, seed=1).run(body)
    counted = [[partners.get(other, 0) for other in range(4)] for _, partners in told]
    assert counted == [list(column) for column in zip(*counted, strict=True)]
    assert sum(map(sum, counted)) > sum(early for early, _ in told), "some came after ranks had ended"


def test_trials_after_one_that_fails_on_a_rank_begin_together() -> None:
    """Rank 1 fails in mid-step of the first trial; the others hear of it, and later trials train."""

    class OutOfMemoryError(Exception):
        pass

    def trial(number: int) -> str:
        model = nn.Linear(4, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        try:
            with hocket.attach(model, optimizer, "adpsgd") as session:
                for step in range(5):
                    optimizer.zero_grad()
                    model(torch.full((2, 4), 1.0 + session.rank)).sum().backward()
                    if (number, session.rank, step) == (0, 1, 2):
                        raise OutOfMemoryError("on this rank only")
                    optimizer.step()
        except (OutOfMemoryError, SessionLeftError) as error:
            return f"{type(error).__name__}: {error}"
        return "trained"

    for first, *later in hocket.virtual(3).run(lambda: [trial(number) for number in range(3)]):
        assert "OutOfMemoryError: on this rank only" in first
        assert later == ["trained", "trained"]


# ---- recipe, plan and names -----------------------------------------------------------------------------------------


def test_the_recipe_composes_to_itself_and_tells_its_source() -> None:
    strategy = hocket.compose("adpsgd")
    for again in (hocket.compose(strategy.resolved()), hocket.compose(strategy)):
        assert again == strategy
        assert again.name == "adpsgd"
        assert again.resolved() == strategy.resolved()
    content = yaml.safe_load(default_registry().recipe_file("adpsgd").path.read_text())
    assert content["name"] == "adpsgd"
    assert content["description"]
    assert content["source"]


def test_the_collective_without_its_prefix_is_answered_with_it() -> None:
    with pytest.raises(
        ConfigError, match=r"no collective 'pair_average'.* Did you mean 'adpsgd\.pair_average'\?"
    ):
        hocket.compose({"parameters": [{"collective": "pair_average", "topology": "complete"}]})


@pytest.mark.parametrize("ranks", [3, 4, 6])
def test_bytes_and_memory_are_as_planned(ranks: int) -> None:
    def mlp() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(60, 80), nn.Tanh(), nn.Linear(80, 70), nn.Tanh(), nn.Linear(70, 10))

    def body() -> tuple[float, int]:
        net = mlp()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
        with hocket.attach(net, optimizer, "adpsgd") as session:
            for _ in range(6):
                optimizer.zero_grad()
                net(torch.ones(4, 60)).square().mean().backward()
                optimizer.step()
            session.settle()
            return session.counters.bytes_sent / 6, held_bytes(session)

    planned = plan(hocket.compose("adpsgd"), mlp(), ranks, NetworkModel())
    assert planned.bytes_per_step > 0
    told = hocket.virtual(ranks).run(body)
    assert [sent for sent, _ in told] == [pytest.approx(planned.bytes_per_step, rel=1e-12)] * ranks
    assert max(held for _, held in told) == pytest.approx(planned.memory_bytes, rel=0.1)


def test_it_has_no_matrices_to_analyse() -> None:
    result = CliRunner().invoke(cli, ["plan", "adpsgd", "--analysis"])
    assert result.exit_code != 0
    told = f"{result.output}{result.exception}"
    assert re.search(r"--analysis needs an exchange with a topology, and this strategy has none", told)
