"""Fragments, turns, delays and merges against the NumPy loop, and what they reduce to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import Family, trained
from toys import LAYERS, inner_step, layers_of, on_ranks, start, steps_of, toy_session, train

import hocket
from hocket.errors import CompositionError
from hocket.segment.partition import Fragments, named_spans

STEPS = 23
NESTEROV: dict[str, Any] = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
FRAGMENTS = {
    "strided": [["a", "c"], ["b", "d"]],
    "sequential": [["a", "b"], ["c", "d"]],
    "balanced": [["b"], ["a", "c", "d"]],  # of 24 and 8 + 8 + 8 elements, in 64 bytes each
}


def streaming(**fields: Any) -> dict[str, Any]:
    return {"parameters": [{"collective": "allreduce", **fields}]}


def outer(**fields: Any) -> dict[str, Any]:
    return {"name": "sgd", **NESTEROV, **fields}


def merge_of(local: float | None) -> Any:
    return "add" if local is None else {"name": "blend", "local": local}


def assert_trained(strategy: Any, family: Family, ranks: int, steps: int = STEPS) -> None:
    replicas, _ = trained(family, start(ranks), steps, inner_step)

    def ended() -> Any:
        with toy_session(strategy) as session:
            steps_of(session, steps)
            return layers_of(session.model)  # before what is under way is merged

    for rank, own in enumerate(on_ranks(ranks, ended)):
        for layer in LAYERS:
            np.testing.assert_allclose(own[layer], replicas[-1][layer][rank], rtol=1e-11, atol=1e-12)


@pytest.mark.one_of_each
@pytest.mark.parametrize("local", [None, 0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("delay", [0, 1, 3])
@pytest.mark.parametrize("pattern", FRAGMENTS)
def test_fragments_take_turns(pattern: str, delay: int, local: float | None) -> None:
    fragments = FRAGMENTS[pattern]
    strategy = streaming(
        every=5,
        segments={"name": "fragments", "count": 2, "pattern": pattern},
        stagger=True,
        delay=delay,
        merge=merge_of(local),
        outer=outer(),
    )
    # (i + 1) 5 / 2, rounded to the even one: 2 and 5.
    family = Family(5, **NESTEROV, fragments=fragments, starts=[2, 0], delay=delay, local=local)
    assert_trained(strategy, family, 3)


@given(data=st.data())
def test_any_member_of_the_family(data: st.DataObject) -> None:
    ranks, every = data.draw(st.integers(1, 4)), data.draw(st.integers(4, 9))
    staggered = data.draw(st.booleans())
    offset = data.draw(st.integers(1 - every, every - 1))
    local = data.draw(st.sampled_from([None, 0.0, 0.25, 0.9]))
    delay = data.draw(st.integers(0, every - (local is not None)))
    rate = data.draw(st.sampled_from([{"lr": 1.0}, NESTEROV, {"lr": 0.4, "momentum": 0.6}]))
    strategy = streaming(
        every=every,
        segments="layers",
        stagger=staggered,
        offset=offset,
        delay=delay,
        merge=merge_of(local),
        outer={"name": "sgd", **rate},
    )
    starts = [(round((i + 1) * every / 4) if staggered else 0) + offset for i in range(4)]
    layers = [[layer] for layer in LAYERS]
    family = Family(every, **rate, fragments=layers, starts=starts, delay=delay, local=local)
    assert_trained(strategy, family, ranks)


@pytest.mark.one_of_each
@pytest.mark.parametrize("segments", ["layers", {"name": "fragments", "count": 2}])
@pytest.mark.parametrize("gossip", [False, True])
@pytest.mark.parametrize("delay", [0, 2, 4])
@pytest.mark.parametrize("local", [None, 0.4])
def test_without_outer_parameters_averages_are_merged(
    local: float | None, delay: int, gossip: bool, segments: Any
) -> None:
    """Each rank's own combination takes the place of the outer parameters."""
    if local is not None and delay == 4:
        return  # refused: nothing would be left of the steps
    ring = {"collective": "gossip", "topology": "ring"} if gossip else {}
    exchange = {
        "every": 4,
        "stagger": True,
        "segments": segments,
        "delay": delay,
        "merge": merge_of(local),
        **ring,
    }
    count = 4 if segments == "layers" else 2
    cut = [[layer] for layer in LAYERS] if count == 4 else FRAGMENTS["strided"]
    # Of three ranks a ring's matrix is the mean, too.
    values = start(3)
    under_way: dict[int, Any] = {}
    for step in range(1, STEPS + 1):
        inner_step(step, values)

        def receive(number: int, layers: list[str]) -> None:
            sent = under_way.pop(number)
            for layer in layers:
                mean = sent[layer].mean(0)
                if local is None:
                    values[layer] = values[layer] + mean - sent[layer]
                else:
                    values[layer] = local * values[layer] + (1 - local) * mean

        for number, layers in enumerate(cut):
            beginning = (number + 1) * 4 // count
            if delay and (step - delay - beginning) % 4 == 0 and number in under_way:
                receive(number, layers)
            if (step - beginning) % 4 == 0:
                under_way[number] = {layer: values[layer].copy() for layer in layers}
                if not delay:
                    receive(number, layers)

    def run() -> Any:
        with toy_session(streaming(**exchange)) as session:
            steps_of(session, STEPS)
            return layers_of(session.model)

    for rank, own in enumerate(on_ranks(3, run)):
        for layer in LAYERS:
            np.testing.assert_allclose(own[layer], values[layer][rank], rtol=1e-11, atol=1e-12)


def equal_bits(one: Any, other: Any, ranks: int = 3, steps: int = STEPS) -> None:
    for own, expected in zip(
        on_ranks(ranks, lambda: train(one, steps)), on_ranks(ranks, lambda: train(other, steps)), strict=True
    ):
        for layer in LAYERS:
            np.testing.assert_array_equal(own[0][layer], expected[0][layer])


def test_one_fragment_at_once_is_diloco() -> None:
    one = {"name": "fragments", "count": 1}
    blend = streaming(every=5, segments=one, stagger=True, merge=merge_of(0.0), outer=outer())
    equal_bits(blend, streaming(every=5, outer=outer()))


def test_a_blend_of_1_is_local_training() -> None:
    for delay in (0, 2):
        alone = streaming(
            every=5, segments="layers", stagger=True, delay=delay, merge=merge_of(1.0), outer=outer()
        )
        equal_bits(alone, "local")


def test_the_recipe_is_what_it_says() -> None:
    overrides = ("parameters.0.every=6", "parameters.0.segments.count=2", "parameters.0.delay=2")
    family = Family(
        6,
        lr=0.4,
        momentum=0.9,
        nesterov=True,
        fragments=FRAGMENTS["strided"],
        starts=[3, 0],
        delay=2,
        local=0.5,
    )
    assert_trained(hocket.compose("diloco.streaming", *overrides), family, 4)


def test_a_step_sends_one_fragment_at_most() -> None:
    """The peak is the largest fragment's ring, the mean DiLoCo's."""
    sizes = [24 + 1, 3 * 8 + 1]

    def run() -> list[float]:
        with toy_session(
            streaming(
                every=4,
                segments={"name": "fragments", "count": 2, "pattern": "balanced"},
                stagger=True,
                delay=1,
                outer=outer(),
            )
        ) as session:
            sent = [0.0]
            for _ in range(8):
                steps_of(session, 1)
                sent.append(session.counters.bytes_sent)
            return np.diff(sent).tolist()

    for each in on_ranks(4, run):
        assert each == [0, 2 * 3 / 4 * 8 * sizes[0], 0, 2 * 3 / 4 * 8 * sizes[1]] * 2


@pytest.mark.parametrize(("pattern", "groups"), FRAGMENTS.items())
def test_patterns(pattern: Any, groups: list[list[str]]) -> None:
    with toy_session("local") as session:
        spans = named_spans(session.model.named_parameters())
    cut = Fragments(2, pattern).cut(spans)
    assert [[span.name.partition(".")[0] for span in fragment] for fragment in cut] == groups
    assert len(Fragments(9, pattern).cut(spans)) == len(LAYERS)


def test_more_turns_than_steps_are_refused_with_the_number_of_segments() -> None:
    strategy = streaming(every=3, segments="layers", stagger=True)
    with pytest.raises(CompositionError, match=r"parameters\.0: stagger: 4 segments need 4 steps"):
        on_ranks(2, lambda: toy_session(strategy).close())
