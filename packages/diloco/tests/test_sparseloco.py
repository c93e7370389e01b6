"""Sparse and quantised distances, with what is not sent kept: against the NumPy loop, and in bytes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from codes import largest_of_chunks, levels_of
from numpy.typing import NDArray
from oracle import Family, Vector, trained
from toys import LAYERS, flat, inner_step, layers_of, on_ranks, start, steps_of, toy_session

import hocket
from hocket.compressor import ErrorFeedback
from hocket.errors import CompositionError
from hocket_diloco.quantise import Format, Quantise

STEPS = 23
CHUNK, K = 8, 4
OVERRIDES = (
    "parameters.0.every=4",
    f"parameters.0.compressor.compressor.compressor={{chunk: {CHUNK}, k: {K}}}",
)
NESTEROV: dict[str, Any] = {"lr": 0.4, "momentum": 0.9, "nesterov": True}


def sparse_in_2_bits(values: Vector) -> Vector:
    chosen, arrived = largest_of_chunks(values, CHUNK, K), np.zeros_like(values)
    arrived[chosen] = levels_of(values[chosen], Quantise(format=Format.INT2, statistical=True))
    return arrived


def with_feedback(decay: float, **fields: Any) -> dict[str, Any]:
    compressor = {
        "name": "error_feedback",
        "decay": decay,
        "compressor": {"name": "diloco.quantise", **fields},
    }
    return {"collective": "sparse_allreduce", "compressor": compressor}


def assert_trained(
    strategy: Any, family: Family, ranks: int, step_of_all: Any = inner_step, steps: int = STEPS
) -> None:
    replicas, _ = trained(family, start(ranks), steps, step_of_all)

    def ended() -> dict[str, NDArray[np.float64]]:
        with toy_session(strategy) as session:
            steps_of(session, steps)
            return layers_of(session.model)  # before what is under way is merged

    for rank, own in enumerate(on_ranks(ranks, ended)):
        for layer in LAYERS:
            np.testing.assert_allclose(own[layer], replicas[-1][layer][rank], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_sparseloco_is_that_of_the_definition(ranks: int) -> None:
    """a = 0.95 e + (φ - θ); what is sent of it is decoded from 2 bits; e = a - that; φ steps by the mean, plainly."""
    family = Family(4, coded=sparse_in_2_bits, decay=0.95)
    assert_trained(hocket.compose("diloco.sparseloco", *OVERRIDES), family, ranks)


@pytest.mark.one_of_each
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("form", ["int8", "int4", "e3m0", "sign"])
def test_streaming_in_few_bits(form: str, ranks: int) -> None:
    """Without feedback, as the paper has it."""
    fragments = [["a", "c"], ["b", "d"]]
    strategy = hocket.compose(
        "diloco.streaming",
        "parameters.0={every: 6, segments: {count: 2}, collective: sparse_allreduce}",
        f"parameters.0.compressor={{name: diloco.quantise, format: {form}}}",
    )
    coded = Quantise(format=Format(form))
    family = Family(
        6,
        **NESTEROV,
        fragments=fragments,
        starts=[3, 0],
        delay=1,
        local=0.5,
        coded=lambda v: levels_of(v, coded),
    )
    assert_trained(strategy, family, ranks)


def test_fragments_with_delay_quantiser_and_feedback() -> None:
    exchange = {
        "every": 6,
        "segments": {"name": "fragments", "count": 2},
        "stagger": True,
        "delay": 2,
        "merge": "add",
        "outer": {"name": "sgd", **NESTEROV},
        **with_feedback(0.9, format="int2", statistical=True),
    }
    coded = Quantise(format=Format.INT2, statistical=True)
    family = Family(
        6,
        **NESTEROV,
        fragments=[["a", "c"], ["b", "d"]],
        starts=[3, 0],
        delay=2,
        coded=lambda values: levels_of(values, coded),
        decay=0.9,
    )
    assert_trained({"parameters": [exchange]}, family, 3)


def test_quantiser_and_feedback_between_two_levels() -> None:
    def groups_step(step: int, theta: dict[str, Vector]) -> None:
        own = {layer: values.copy() for layer, values in theta.items()}
        inner_step(step, own)
        for layer, values in own.items():
            for group in (slice(0, 2), slice(2, 4)):
                theta[layer][group] += (values - theta[layer])[group].mean(0)

    coded = Quantise(format=Format.INT4)
    strategy = hocket.compose(
        "diloco.two_level",
        "gradients.0.over={size: 2, by: null}",
        "parameters.0={every: 4, outer: {lr: 0.4}, collective: sparse_allreduce}",
        "parameters.0.compressor={name: error_feedback, compressor: {name: diloco.quantise, format: int4}}",
    )
    family = Family(4, **NESTEROV, coded=lambda values: levels_of(values, coded), decay=1.0)
    assert_trained(strategy, family, 4, groups_step)


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_are_those_of_the_formulas(ranks: int) -> None:
    """(p - 1) N 64 / 4096 14 / 8 and (p - 1) N q / 8 in a period, and besides for each message what is told of it."""
    numel = 3 * 4096

    def sent(strategy: Any) -> float:
        model = torch.nn.Linear(64, numel // 64, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with hocket.attach(model, optimizer, strategy) as session:
            for _ in range(6):
                optimizer.zero_grad()
                model(torch.ones(1, 64)).square().sum().backward()
                optimizer.step()
            return float(session.counters.bytes_sent)

    outer, weight, number = {"name": "sgd", "lr": 1.0}, 4, 4
    quantised = {"every": 3, "outer": outer, **with_feedback(1.0, format="e3m0")}
    for strategy, bits, table in (
        (hocket.compose("diloco.sparseloco", "parameters.0.every=3"), 14 * 64 / 4096, 4 * number),
        ({"parameters": [quantised]}, 4, number),
    ):
        for given in on_ranks(ranks, partial(sent, strategy)):
            assert given == 2 * (ranks - 1) * (numel * bits / 8 + table + weight)


def test_what_is_not_sent_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without a residual, forced past the rule, what is never among the largest never moves."""
    sparse = hocket.compose("diloco.sparseloco", *OVERRIDES, "parameters.0.every=1")
    [exchange] = sparse.parameters
    assert isinstance(exchange.compressor, ErrorFeedback)
    forgetful = replace(sparse, parameters=(replace(exchange, compressor=exchange.compressor.compressor),))

    def moved(strategy: Any) -> float:
        with toy_session(strategy) as session:
            begun = flat(session.model)
            for _ in range(30):
                for parameter in session.model.parameters():
                    parameter.grad = torch.linspace(1, 2, parameter.numel(), dtype=parameter.dtype)
                session.optimizer.step()
            return float((flat(session.model) != begun).double().mean())

    largest = sum(len(largest_of_chunks(np.arange(size), CHUNK, K)) for size in LAYERS.values())
    assert on_ranks(2, lambda: moved(sparse)) == [1.0, 1.0]
    with pytest.raises(CompositionError, match="error_feedback"):
        on_ranks(2, lambda: moved(forgetful))
    monkeypatch.setattr("hocket.session.attach.check_composition", lambda strategy: None)
    assert on_ranks(2, lambda: moved(forgetful)) == [largest / sum(LAYERS.values())] * 2
