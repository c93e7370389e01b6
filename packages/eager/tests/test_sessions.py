"""Partial allreduces in sessions, on virtual ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training import STEPS, strategy, train

import hocket
from hocket.errors import CompositionError

FULL = {"name": "eager.partial_allreduce", "candidates": None, "starts": "last"}
SOLO = {"name": "eager.partial_allreduce", "candidates": None}
PACES_S = [0.01, 0.02, 0.05, 0.03]


def run(given: Any, ranks: int = 4, seed: int = 0, **others: Any) -> list[dict[str, Any]]:
    return hocket.virtual(ranks, seed=seed).run(lambda: train(given, **others))


@pytest.mark.one_of_each
@pytest.mark.parametrize("overlap", ["none", "backward"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_last_of_all_is_sgd(ranks: int, overlap: str) -> None:
    """To the bit, in the same order of additions."""
    synchronous = {"name": "allreduce", "algorithm": "recursive_doubling"}
    other = run(strategy(synchronous, overlap=overlap), ranks)
    for missed in ("newest", "sum"):
        one = run(strategy({**FULL, "missed": missed}, overlap=overlap), ranks)
        assert [of["parameters"] for of in one] == [of["parameters"] for of in other]
        assert [of["losses"] for of in one] == [of["losses"] for of in other]
        assert all(of["equal"] and of["active"] == ranks and of["staleness"] == 0 for of in one)


def test_nobody_waits_for_late_ranks_in_solo() -> None:
    def seconds(given: Any) -> float:
        world = hocket.virtual(4)
        world.run(lambda: train(strategy(given), paces_s=PACES_S))
        return world.elapsed_s

    # Everybody has each pace in turn: on average 27.5 ms a step, and at worst 50 ms.
    assert seconds(SOLO) < 1.2 * STEPS * 0.0275
    assert seconds("allreduce") > STEPS * 0.05


@pytest.mark.one_of_each
@pytest.mark.parametrize("overlap", ["none", "backward"])
@pytest.mark.parametrize("recipe", ["eager", "eager.majority", "eager.solo"])
def test_recipes_learn(recipe: str, overlap: str) -> None:
    """At a fifth of the learning rate that `sgd` bears here: momentum and stale gradients are unstable together."""
    given = hocket.compose(recipe, f"gradients.0.overlap={overlap}")
    for of in run(given, steps=80, paces_s=PACES_S, learning_rate=0.02):
        assert np.mean(of["losses"][-10:]) < 0.5 * np.mean(of["losses"][:5])
        assert not of["equal"]
        assert 1 <= of["active"] <= 4


def test_ranks_that_are_never_late_have_equal_replicas_under_sum() -> None:
    """Without momentum, which is not linear in what comes when, all rounds handed out give everybody the same."""
    told = run(strategy({**SOLO, "missed": "sum"}), paces_s=PACES_S, momentum=0.0)
    first = np.array(told[0]["parameters"])
    assert max(of["staleness"] for of in told) > 0
    for of in told[1:]:
        np.testing.assert_allclose(of["parameters"], first, rtol=1e-5, atol=1e-6)
    apart = run(strategy(SOLO), paces_s=PACES_S, momentum=0.0)
    assert np.abs(np.array(apart[1]["parameters"]) - apart[0]["parameters"]).max() > 1e-4


def test_a_rank_that_has_caught_up_steps_with_zeros_under_sum() -> None:
    """Each of its steps has momentum and decay, as each of the others': a missing gradient would leave them out."""

    def body() -> tuple[list[bool], float]:
        weight = torch.nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(weight.parameters(), lr=0.1, momentum=0.5, weight_decay=0.01)
        given, told = strategy({**SOLO, "missed": "sum"}), []
        with hocket.attach(weight, optimizer, given) as session:
            if session.rank == 1:
                session.peer.clock.sleep(1.0)  # the other has done all of its steps by then
            for _ in range(4):
                optimizer.zero_grad()
                weight(torch.ones(1, 1)).sum().backward()
                before = weight.weight.item()
                gradient = weight.weight.grad
                told.append(gradient is not None and gradient.item() == 0)
                optimizer.step()
                assert weight.weight.item() != before
        return told, optimizer.state[weight.weight]["momentum_buffer"].item()

    (on_time, _), (late, momentum) = hocket.virtual(2).run(body)
    assert not any(on_time)
    assert late == [False, True, True, True]
    assert abs(momentum) < 1.0  # that of its first step has decayed three times


def test_a_rank_without_data_contributes_nothing() -> None:
    """The divisor stays P: with the same gradients of two of three ranks, steps are 2/3 as long."""
    alone = strategy(FULL)
    told = run(alone, 3, steps=1, batches=[1, 1, 0], momentum=0.0)
    mean = run(strategy("allreduce"), 3, steps=1, batches=[1, 1, 0], momentum=0.0)
    start = run(strategy("allreduce"), 3, steps=0, batches=[0, 0, 0])[0]["parameters"]
    np.testing.assert_allclose(
        np.subtract(told[0]["parameters"], start),
        np.subtract(mean[0]["parameters"], start) * 2 / 3,
        rtol=1e-4,
        atol=1e-7,
    )


@pytest.mark.parametrize("step", [3, 7])
def test_a_resumed_run_goes_on_where_it_was(step: int, tmp_path: Path) -> None:
    """To the bit where results do not depend on time; and with what no round had taken where they do."""
    given = strategy(FULL)
    run(given, save=(tmp_path / "full", step))
    whole, resumed = run(given), run(given, load=tmp_path / "full")
    assert [of["parameters"] for of in whole] == [of["parameters"] for of in resumed]
    # Two ranks that keep distance are deterministic, too: one is always late.
    late = strategy({**SOLO, "missed": "sum"})
    paces_s = [0.01, 0.015]
    run(late, 2, save=(tmp_path / "late", step), paces_s=paces_s)
    again = run(late, 2, load=tmp_path / "late", paces_s=paces_s)
    assert all(np.isfinite(of["parameters"]).all() for of in again)


@pytest.mark.parametrize("collective", [SOLO, FULL, {**SOLO, "candidates": 2, "starts": "last"}])
def test_another_number_of_ranks_resumes(collective: Any, tmp_path: Path) -> None:
    """Rounds are counted on, from the replicas' mean."""
    run(strategy(collective), 4, save=(tmp_path, 5), paces_s=PACES_S)
    told = run(strategy(collective), 3, load=tmp_path, paces_s=PACES_S)
    assert all(np.isfinite(of["parameters"]).all() for of in told)


def test_late_gradients_join_the_next_phase() -> None:
    """Steps of plain SGD with rate 1 add up: nothing is lost when the strategy changes."""
    phases = {
        "gradients": [{"collective": {**SOLO, "missed": "sum"}, "segments": "model"}],
        "phases": {6: {"gradients": [{"collective": "allreduce", "segments": "model"}]}},
    }
    told = run(hocket.compose(phases), paces_s=PACES_S)
    assert len({tuple(of["parameters"]) for of in told}) == 1


def test_what_cannot_be_composed() -> None:
    for change, message in (
        ({"parameters": [{"collective": SOLO}]}, "use it in gradients"),
        ({"gradients": [{"collective": SOLO, "compressor": "topk"}]}, "sends uncompressed values"),
        ({"gradients": [{"collective": {**SOLO, "candidates": 0}}]}, "1 or more"),
        ({"gradients": [{"collective": {**SOLO, "staleness": -1}}]}, "0 or more"),
    ):
        with pytest.raises((CompositionError, hocket.errors.ConfigError), match=message):
            hocket.compose(change)


@pytest.mark.parametrize("missed", ["newest", "sum"])
def test_a_group_s_members_have_their_leader_s_numbers(missed: str) -> None:
    """A late sum is no mean yet to divide by its weight, nor on ranks that get it from their leader."""
    collective = {**SOLO, "missed": missed}
    slow = hocket.compose(
        {
            "gradients": [
                {"collective": "allreduce", "over": {"name": "group", "size": 2}},
                {"collective": collective, "over": {"name": "leaders", "size": 2}},
                {"collective": "broadcast", "over": {"name": "group", "size": 2}},
            ]
        }
    )
    told = hocket.virtual(4).run(lambda: train(slow, paces_s=PACES_S))
    assert max(of["staleness"] for of in told) > 0
    for leader, member in ((0, 1), (2, 3)):
        assert told[leader]["parameters"] == told[member]["parameters"]
