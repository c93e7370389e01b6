"""Runs that are saved at every step of a period, resumed on as many ranks or others, and phases."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from oracle import Family, Vector, trained
from toys import LAYERS, flat, inner_step, layers_of, on_ranks, start, steps_of, toy_session

import hocket
from hocket.testing.session import inner_of

EVERY = 4
STEPS = 2 * EVERY + 3
NESTEROV: dict[str, Any] = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
OUTER = {"name": "sgd", **NESTEROV}
DILOCO = {"parameters": [{"collective": "allreduce", "every": EVERY, "outer": OUTER}]}
RESIDUAL = {"name": "error_feedback", "compressor": {"name": "shared_random", "density": 0.5}}
GATHERED: dict[str, Any] = {
    "collective": "sparse_allreduce",
    "compressor": {
        "name": "error_feedback",
        "decay": 0.9,
        "compressor": {
            "name": "diloco.quantise",
            "format": "int2",
            "statistical": True,
            "compressor": {"name": "diloco.chunk_topk", "chunk": 8, "k": 2},
        },
    },
}


def streaming(merge: Any, **fields: Any) -> dict[str, Any]:
    exchange = {"segments": "layers", "stagger": True, "delay": 2, "merge": merge, **fields}
    return {"parameters": [{**DILOCO["parameters"][0], **exchange}]}


STRATEGIES = {
    "diloco": DILOCO,
    "blended": streaming({"name": "blend", "local": 0.3}),
    "added": streaming("add"),
    "under way as long as a period": streaming("add", delay=EVERY),
    "with a residual": streaming("add", compressor=RESIDUAL),
    "in 2 bits, under way with a residual": streaming({"name": "blend", "local": 0.3}, **GATHERED),
    "without outer parameters": streaming("add", outer=None, delay=3),
    "some elements": streaming(
        "add", outer=None, delay=EVERY, compressor={"name": "shared_random", "density": 0.3}
    ),
    "pairs": {
        "parameters": [
            {"collective": "gossip", "topology": "random_matching", "every": EVERY, "outer": "diloco.noloco"}
        ]
    },
    "two levels": {
        "gradients": [{"collective": "allreduce", "over": {"name": "group", "size": 2}}],
        "parameters": [
            {**DILOCO["parameters"][0], "over": {"name": "leaders", "size": 2}},
            {"collective": "broadcast", "over": {"name": "group", "size": 2}, "every": EVERY},
        ],
    },
}


def run(strategy: Any, first: Path | None, save_at: int, last: int, dtype: torch.dtype) -> torch.Tensor:
    """Train, from a checkpoint where there is one, and save after a step."""
    with toy_session(strategy, dtype) as session:
        if first is not None and first.exists() and save_at == 0:
            session.load(first)
        while session.step < last:
            steps_of(session, 1)
            if session.step == save_at:
                assert first is not None
                session.save(first)
        with session.consensus():
            shown = flat(session.model)
        return torch.cat([flat(session.model), shown])


@pytest.mark.one_of_each
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_resumed_at_each_step_of_a_period_it_has_the_same_bits(
    strategy: Any, dtype: torch.dtype, tmp_path: Path
) -> None:
    expected = on_ranks(4, lambda: run(strategy, None, 0, STEPS, dtype))
    for step in range(EVERY, 2 * EVERY + 1):
        folder = tmp_path / str(step)
        on_ranks(4, partial(run, strategy, folder, step, step, dtype))
        resumed = on_ranks(4, partial(run, strategy, folder, 0, STEPS, dtype))
        assert all(map(torch.equal, resumed, expected)), f"saved after step {step}"


@pytest.mark.one_of_each
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", ["diloco", "blended", "two levels"])
def test_on_other_ranks_outer_parameters_and_momentum_go_on(
    name: str, ranks: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The replicas begin from their mean, the outer parameters where they were."""
    Kept = tuple[torch.Tensor, torch.Tensor]

    def kept(session: Any) -> Kept:
        states: list[dict[str, Any]] = [
            o.state_dict() for m in inner_of(session).phase.parameters.exchanges for o in m.outer.values()
        ]
        by_name = {name: state for of_segment in states for name, state in of_segment.items()}
        parts = [[by_name[f"{layer}.weight"][key] for layer in LAYERS] for key in ("outer", "momentum")]
        return torch.cat(parts[0]).clone(), torch.cat(parts[1]).clone()

    def save() -> tuple[Kept | None, torch.Tensor]:
        with toy_session(STRATEGIES[name]) as session:
            steps_of(session, EVERY + 2)
            session.save(tmp_path)
            leads = name != "two levels" or session.rank % 2 == 0
            return kept(session) if leads else None, flat(session.model)

    def load() -> tuple[Kept | None, torch.Tensor, torch.Tensor]:
        with toy_session(STRATEGIES[name]) as session:
            session.load(tmp_path)
            leads = name != "two levels" or session.rank % 2 == 0
            found, own = kept(session) if leads else None, flat(session.model)
            with session.consensus():
                return found, own, flat(session.model)

    saved = on_ranks(4, save)
    assert saved[0][0] is not None
    outer, momentum = saved[0][0]
    mean = torch.stack([own for _, own in saved]).mean(0)
    for found, own, shown in on_ranks(ranks, load):
        torch.testing.assert_close(own, mean)
        torch.testing.assert_close(shown, outer, rtol=0, atol=0)
        if found is not None:
            assert torch.equal(found[0], outer)
            assert torch.equal(found[1], momentum)
    assert "is dropped except for outer parameters" in caplog.text


def stepped_alike(step: int, theta: dict[str, Vector]) -> None:
    """Step all ranks with the mean gradient."""
    own = {layer: values.copy() for layer, values in theta.items()}
    inner_step(step, own)
    for layer, values in own.items():
        theta[layer][:] = theta[layer] + (values - theta[layer]).mean(0)


SYNCHRONOUS: dict[str, Any] = {"gradients": [{"collective": "allreduce"}], "parameters": []}


def phased(
    first: Any, changes: Mapping[int, Any], steps: int, ranks: int = 3
) -> list[dict[str, NDArray[np.float64]]]:
    def phases() -> dict[str, NDArray[np.float64]]:
        with toy_session({"gradients": [], **first, "phases": dict(changes)}) as session:
            steps_of(session, steps)
            return layers_of(session.model)

    return on_ranks(ranks, phases)


def assert_equal_to(given: list[dict[str, NDArray[np.float64]]], expected: Mapping[str, Vector]) -> None:
    for rank, own in enumerate(given):
        for layer in LAYERS:
            np.testing.assert_allclose(own[layer], expected[layer][rank], rtol=1e-12, atol=1e-13)


def test_from_synchronous_training_into_diloco_and_back() -> None:
    """Periods are those of all steps: 6 synchronous ones, then outer steps after 8 and 12, then synchronous ones."""
    given = phased(SYNCHRONOUS, {6: {"gradients": [], **DILOCO}, 12: SYNCHRONOUS}, 15)
    before, _ = trained(Family(100), start(3), 6, stepped_alike)
    diloco, _ = trained(
        Family(EVERY, **NESTEROV, starts=[2]), before[-1], 6, lambda step, theta: inner_step(step + 6, theta)
    )
    after, _ = trained(Family(100), diloco[-1], 3, lambda step, theta: stepped_alike(step + 12, theta))
    assert_equal_to(given, after[-1])


def test_a_phase_begins_with_the_outer_parameters_and_says_what_is_left_behind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        given = phased(DILOCO, {6: SYNCHRONOUS}, 6)
    _, outer = trained(Family(EVERY, **NESTEROV), start(3), 6, inner_step)
    for own in given:
        for layer in LAYERS:
            np.testing.assert_allclose(own[layer], outer[-1][layer], rtol=1e-12)
    assert "up to 2 steps of training since then are lost" in caplog.text


def test_momentum_goes_on_from_phase_to_phase() -> None:
    """With the same settings a change of phase after an outer step changes nothing."""
    faster = {"parameters.0.outer.lr": 0.7}
    gradients = {"gradients": [{"collective": "allreduce", "over": {"name": "group", "size": 1}}]}
    given = phased(DILOCO, {2 * EVERY: {**faster, **gradients}}, 4 * EVERY)
    expected, _ = trained(Family(EVERY, **NESTEROV), start(3), 4 * EVERY, inner_step)
    assert_equal_to(given, expected[-1])


def test_from_gossip_into_diloco_replicas_begin_from_their_mean() -> None:
    ring = {"parameters": [{"collective": "gossip", "topology": "exponential"}]}
    given = phased(ring, {3: DILOCO}, 3, ranks=4)
    assert all(np.array_equal(own[layer], given[0][layer]) for own in given for layer in LAYERS)


def test_only_ranks_without_outer_parameters_are_told_of_them() -> None:
    """Between two levels a consensus is one broadcast by a leader, and sets the same bits everywhere."""

    def look() -> tuple[torch.Tensor, torch.Tensor]:
        with toy_session(STRATEGIES["two levels"]) as session:
            steps_of(session, EVERY + 1)
            with session.consensus():
                shown = flat(session.model)
            outer = [
                each for mix in inner_of(session).phase.parameters.exchanges for each in mix.outer.values()
            ]
            held = torch.cat([each.parameters for each in outer]) if outer else torch.empty(0)
            return shown, held

    shown = on_ranks(4, look)
    assert [held.numel() > 0 for _, held in shown] == [True, False, True, False]
    assert torch.equal(shown[0][1], shown[2][1])
    assert all(torch.equal(each, shown[0][0]) for each, _ in shown)
    assert float(shown[0][0].sum()) == pytest.approx(float(shown[0][1].sum()))


@pytest.mark.parametrize("in_turns", [False, True])
def test_two_levels_are_those_of_the_definition(in_turns: bool) -> None:
    """Groups step with their mean gradient; outer parameters by the mean of the groups' distances."""

    def groups_step(step: int, theta: dict[str, Vector]) -> None:
        own = {layer: values.copy() for layer, values in theta.items()}
        inner_step(step, own)
        for layer, values in own.items():
            for group in (slice(0, 2), slice(2, 4)):
                theta[layer][group] += (values - theta[layer])[group].mean(0)

    turns: dict[str, Any] = (
        {"fragments": [["a", "c"], ["b", "d"]], "starts": [EVERY // 2, 0]} if in_turns else {}
    )
    expected, _ = trained(Family(EVERY, **NESTEROV, **turns), start(4), STEPS, groups_step)
    cut = "{segments: {name: fragments, count: 2}, stagger: true}" if in_turns else "{}"
    recipe = hocket.compose(
        "diloco.two_level",
        "gradients.0.over={size: 2, by: null}",
        f"parameters.0.every={EVERY}",
        *(f"parameters.{number}={cut}" for number in (0, 1)),
    )

    def train_recipe() -> dict[str, NDArray[np.float64]]:
        with toy_session(recipe) as session:
            steps_of(session, STEPS)
            return layers_of(session.model)

    assert_equal_to(on_ranks(4, train_recipe), expected[-1])
