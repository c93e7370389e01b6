"""Outer steps by whoever has come: each distance counts once, whenever it comes in; on virtual ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toys import LAYERS, LR, Toy, gradient, layers_of, steps_of, toy_session

import hocket
from hocket.errors import CompositionError

EVERY, STEPS, RANKS = 4, 24, 4
PACES_S = [0.01, 0.03, 0.011, 0.017]
RATE = 0.7
PLAIN = {"name": "sgd", "lr": RATE}


def quorum(**others: Any) -> dict[str, Any]:
    collective = {"name": "eager.partial_allreduce", "candidates": 1, "missed": "sum"}
    return {"collective": collective, "every": EVERY, "segments": "layers", "outer": PLAIN, **others}


def pace(session: Any) -> None:
    session.peer.clock.sleep(PACES_S[session.rank % len(PACES_S)])


def train_into_phase(exchange: dict[str, Any]) -> tuple[list[Any], list[Any], Any]:
    """Train until another phase begins; return by layer what this rank has sent and where it ends, and its counters."""
    period = EVERY if exchange.get("stagger") else 0
    due = {layer: (i + 1) * period // len(LAYERS) % EVERY for i, layer in enumerate(LAYERS)}
    later = {"gradients": [{"collective": "allreduce"}], "parameters": []}
    sent = {layer: np.zeros(size) for layer, size in LAYERS.items()}
    outer = layers_of(Toy())
    with toy_session({"parameters": [exchange], "phases": {STEPS: later}}) as session:
        counters = session.counters
        for step in range(1, STEPS + 1):
            pace(session)
            before = layers_of(session.model)
            steps_of(session, 1)
            for layer, after in layers_of(session.model).items():
                if (step - due[layer]) % EVERY == 0:
                    own = before[layer] - LR * gradient(session.rank, step, before[layer])
                    sent[layer] += outer[layer] - own
                    outer[layer] = after
        return list(sent.values()), list(layers_of(session.model).values()), counters


FEEDBACK = {"name": "error_feedback", "compressor": {"name": "topk", "density": 0.1}}


@pytest.mark.parametrize(
    "exchange",
    [
        quorum(),
        quorum(stagger=True),
        quorum(collective="sparse_allreduce", compressor=FEEDBACK),
        quorum(collective="sparse_allreduce", compressor=FEEDBACK, stagger=True),
    ],
    ids=["quorum", "quorum staggered", "sparse", "sparse staggered"],
)
def test_each_distance_counts_once_whenever_it_comes(exchange: dict[str, Any]) -> None:
    """At the phase's end φ has moved by lr / P times all that ranks have sent, in whichever round it came in.

    What no round has taken, because it was late or left out, is in a last step there.
    """
    told = hocket.virtual(RANKS).run(lambda: train_into_phase(exchange))
    if "compressor" not in exchange:
        assert max(counters.staleness_max for _, _, counters in told) > 0
        assert all(counters.active < RANKS * counters.outcomes for _, _, counters in told)
    for number, start in enumerate(layers_of(Toy()).values()):
        moved = RATE / RANKS * np.sum([sent[number] for sent, _, _ in told], axis=0)
        for _, end, _ in told:
            np.testing.assert_allclose(end[number], start - moved, rtol=0, atol=1e-13)


def test_the_last_of_all_is_the_synchronous_step() -> None:
    """To the bit, in the same order of additions."""

    def train(collective: dict[str, Any]) -> Any:
        with toy_session({"parameters": [quorum(collective=collective)]}) as session:
            for _ in range(STEPS):
                pace(session)
                steps_of(session, 1)
            return layers_of(session.model)

    full = {"name": "eager.partial_allreduce", "candidates": None, "starts": "last", "missed": "sum"}
    one = hocket.virtual(RANKS).run(lambda: train(full))
    other = hocket.virtual(RANKS).run(lambda: train({"name": "allreduce", "algorithm": "recursive_doubling"}))
    for mine, theirs in zip(one, other, strict=True):
        for layer in LAYERS:
            np.testing.assert_array_equal(mine[layer], theirs[layer])


@pytest.mark.parametrize("delay", [0, 2])
def test_a_resumed_run_goes_on_with_what_came_too_late(delay: int, tmp_path: Path) -> None:
    """Staggered, so that segments are in different rounds where it is saved; ranks wait for each other there."""

    def train(*, ends: bool = False, load: bool = False) -> Any:
        strategy = {"parameters": [quorum(stagger=True, delay=delay)]}
        with toy_session(strategy) as session:
            if load:
                session.load(tmp_path / "saved")
            while session.step < STEPS:
                pace(session)
                steps_of(session, 1)
                if session.step == 13 and not load:
                    session.save(tmp_path / "saved")
                    if ends:
                        return None
            session.consensus()
            return layers_of(session.model)

    # Two ranks, of which one is always the later.
    whole = hocket.virtual(2).run(train)
    hocket.virtual(2).run(lambda: train(ends=True))
    resumed = hocket.virtual(2).run(lambda: train(load=True))
    for layer in LAYERS:
        np.testing.assert_allclose(resumed[0][layer], whole[0][layer], rtol=0, atol=1e-12)
        np.testing.assert_array_equal(resumed[0][layer], resumed[1][layer])


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        (quorum(outer={"name": "sgd", "lr": 0.7, "momentum": 0.9}), "momentum: 0"),
        (quorum(collective="eager.partial_allreduce"), "use `collective: allreduce`"),
        ({"collective": "eager.partial_allreduce", "every": 4}, "give an outer"),
        (quorum(compressor="fp16"), "sends uncompressed values"),
    ],
)
def test_refusals(given: dict[str, Any], advice: str) -> None:
    with pytest.raises(CompositionError, match=advice):
        hocket.compose({"parameters": [given]})
