"""RedSync within sessions on virtual ranks: what it reduces to, what it computes, and what of it is saved."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from toys import RANKS, STEPS, batches, dense, flat, model_of, on_ranks, sgd, step, train, trained

import hocket
from hocket.errors import HocketError
from hocket.installing import how_to_install

#: So cheap a network that dense pays for the short vectors only, and so dear that it never does.
MIXED = {"gather_s_per_byte": 1e-9, "reduce_s_per_byte": 1e-8, "select_s_per_element": 1e-7}
COSTS = {"gather_latency_s": 0.0, "reduce_latency_s": 0.0, "add_s_per_element": 0.0, **MIXED}
SPARSE = "sparse_allreduce"
AUTO = {"name": "redsync.allreduce", "costs": COSTS}
ALL_DENSE = {"name": "redsync.allreduce", "costs": {**COSTS, "select_s_per_element": 1.0}}
POLICY = {"name": "redsync.allreduce", "auto": False}
SCALABLE = {"name": SPARSE, "algorithm": "scalable"}
SCALABLE_POLICY = {**POLICY, "algorithm": "scalable"}


def strategy(collective: Any, compressor: dict[str, Any], **fields: Any) -> dict[str, Any]:
    exchange = {"collective": collective, "compressor": {"dense_below_kb": 0.0, **compressor}, **fields}
    return {"gradients": [exchange]}


@pytest.mark.one_of_each
@pytest.mark.parametrize("overlap", ["none", "backward"])
@pytest.mark.parametrize("segments", ["layers", "model"])
@pytest.mark.parametrize("collective", [SPARSE, AUTO, ALL_DENSE, POLICY, SCALABLE, SCALABLE_POLICY])
@pytest.mark.parametrize("nesterov", [False, True])
def test_at_density_1_it_is_momentum_sgd_without_masking(
    collective: Any, segments: str, overlap: str, nesterov: bool
) -> None:
    compressor = {"name": "redsync.hybrid", "density": 1.0, "masking": False}
    own = trained(strategy(collective, compressor, segments=segments, overlap=overlap), nesterov=nesterov)
    torch.testing.assert_close(own, dense(nesterov=nesterov), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("segments", ["layers", "model"])
def test_at_density_1_it_is_plain_sgd_with_masking(segments: str) -> None:
    own = trained(strategy(SPARSE, {"name": "redsync.hybrid", "density": 1.0}, segments=segments))
    torch.testing.assert_close(own, dense(momentum=0.0), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["exact", "trimmed", "threshold", "sampled", "hybrid"])
def test_at_density_1_it_is_sgd_where_the_optimizer_keeps_its_momentum(name: str) -> None:
    compressor = {"name": f"redsync.{name}", "density": 1.0, "correct_momentum": False}
    torch.testing.assert_close(trained(strategy(SPARSE, compressor)), dense(), rtol=1e-12, atol=1e-14)


def test_the_recipe_at_density_1_is_the_recipe_sgd() -> None:
    fields = ["density=1.0", "masking=false", "dense_below_kb=0.0"]
    redsync = hocket.compose("redsync", *(f"gradients.0.compressor.{field}" for field in fields))
    torch.testing.assert_close(trained(redsync), trained(hocket.compose("sgd")), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("collective", [SPARSE, POLICY, SCALABLE_POLICY])
def test_small_parameters_are_those_of_momentum_sgd_though_masking_is_on(collective: Any) -> None:
    """A parameter that is dense by policy is not masked, which would take its momentum away."""
    compressor = {"name": "redsync.hybrid", "density": 0.01, "dense_below_kb": 128.0}
    torch.testing.assert_close(trained(strategy(collective, compressor)), dense(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("collective", [SPARSE, AUTO, POLICY, SCALABLE_POLICY])
def test_local_clipping_goes_around_it(collective: Any) -> None:
    """At density 1, what is clipped is what plain SGD would get of the same clipping."""
    inner = {"name": "redsync.hybrid", "density": 1.0, "masking": False, "methods": {"*.bias": "dense"}}
    clipping = {"name": "local_clipping", "max_norm": 0.2}
    own, plain = (
        {"gradients": [{"collective": with_, "compressor": {**clipping, "compressor": held}}]}
        for with_, held in ((collective, {**inner, "dense_below_kb": 0.0}), (SPARSE, "none"))
    )
    torch.testing.assert_close(trained(own), trained(plain), rtol=1e-12, atol=1e-14)
    assert not torch.equal(trained(plain), dense())


@pytest.mark.parametrize("density", [0.02, 0.3])
def test_it_is_its_definition(density: float) -> None:
    """For each parameter: V += G / p; send the k largest of |V|; clear them; step with the sum of what all sent."""
    compressor = {"name": "redsync.trimmed", "density": density, "correct_momentum": False}
    own = trained(strategy(SPARSE, compressor, segments="model"))

    model = model_of()
    optimizer = sgd(model)
    data = [batches(rank) for rank in range(RANKS)]
    residuals = [[np.zeros(p.numel()) for p in model.parameters()] for _ in data]
    for number in range(STEPS):
        sums = [np.zeros(p.numel()) for p in model.parameters()]
        for of_rank, of_parameters in zip(data, residuals, strict=True):
            x, y = of_rank[number]
            gradients = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
            for total, residual, gradient in zip(sums, of_parameters, gradients, strict=True):
                np.add(residual, gradient.reshape(-1).numpy() / RANKS, out=residual)
                k = max(1, round(density * len(residual)))
                chosen = np.argsort(-np.abs(residual), kind="stable")[:k]
                total[chosen] += residual[chosen]
                residual[chosen] = 0
        for parameter, total in zip(model.parameters(), sums, strict=True):
            parameter.grad = torch.from_numpy(total).view_as(parameter)
        optimizer.step()
    torch.testing.assert_close(own, flat(model), rtol=1e-10, atol=1e-12)


@pytest.mark.one_of_each
@pytest.mark.parametrize(
    ("name", "collective"),
    [
        *itertools.product(["hybrid", "sampled", "asq"], [SPARSE, AUTO, POLICY]),
        *itertools.product(["hybrid", "sampled"], [SCALABLE, SCALABLE_POLICY]),
    ],
)
@pytest.mark.parametrize("ranks", [2, 5])
def test_ranks_stay_equal(name: str, collective: Any, ranks: int) -> None:
    """More ranks than some parameter's k, and messages of different lengths."""
    compressor = {"name": f"redsync.{name}", "density": 0.02}
    methods = {"methods": {"*.bias": "dense"}} if name == "hybrid" else {}
    assert trained(strategy(collective, {**compressor, **methods}), ranks=ranks).isfinite().all()


def test_dense_warm_up_hands_the_momentum_over() -> None:
    """Dense steps first, by phases; then density 1 goes on as if nothing had happened."""
    compressed = strategy(SPARSE, {"name": "redsync.hybrid", "density": 1.0, "masking": False})
    warm_up = {"gradients": [{"collective": "allreduce"}], "phases": {3: compressed}}
    torch.testing.assert_close(trained(warm_up), dense(), rtol=1e-12, atol=1e-14)


def train_with_inf(
    rank: int, on_nonfinite: Literal["error", "skip"], collective: Any, overlap: str = "none"
) -> str:
    """Let rank 0 have Inf in one parameter's gradient in step 2; return what the session says of it."""
    model = model_of()
    optimizer = sgd(model)
    compressor = {"name": "redsync.hybrid", "density": 0.02}
    exchange = strategy(collective, compressor, segments="layers", overlap=overlap)
    try:
        with hocket.attach(model, optimizer, exchange, on_nonfinite=on_nonfinite) as session:
            for number, batch in enumerate(session.data(batches(rank))):
                handle = model.get_parameter("2.weight").register_hook(lambda gradient: gradient / 0)
                if (rank, number) != (0, 2):
                    handle.remove()
                step(model, optimizer, batch)
                handle.remove()
    except HocketError as error:
        return str(error)
    assert flat(model).isfinite().all()
    return "trained"


def test_inf_is_an_error_that_names_the_parameter() -> None:
    own, *others = on_ranks(RANKS, lambda rank: train_with_inf(rank, "error", SPARSE))
    assert "2.weight" in own
    assert all("another rank" in told for told in others)


@pytest.mark.one_of_each
@pytest.mark.parametrize("overlap", ["none", "backward"])
@pytest.mark.parametrize("collective", [SPARSE, SCALABLE, SCALABLE_POLICY])
def test_a_step_with_inf_can_be_skipped(collective: Any, overlap: str) -> None:
    """Nothing of it stays in residuals or velocities, which would spoil every later step."""
    told = on_ranks(RANKS, lambda rank: train_with_inf(rank, "skip", collective, overlap))
    assert told == ["trained"] * RANKS


@pytest.mark.parametrize(
    ("name", "collective"),
    [
        ("hybrid", SPARSE),
        ("sampled", SPARSE),
        ("asq", SPARSE),
        ("hybrid", SCALABLE),
        ("sampled", SCALABLE_POLICY),
    ],
)
def test_a_resumed_run_goes_on_bit_for_bit(name: str, collective: Any, tmp_path: Path) -> None:
    """Residuals, momentum, thresholds and the boundaries of regions are in the checkpoint."""
    compressed = strategy(collective, {"name": f"redsync.{name}", "density": 0.05}, overlap="backward")

    def run(rank: int, first: int, folder: Path | None) -> torch.Tensor:
        model = model_of(seed=first)
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, compressed) as session:
            if first:
                session.load(tmp_path)
            for batch in session.data(batches(rank)):
                step(model, optimizer, batch)
                if folder is not None and session.step == 4:
                    session.save(folder)
                    break
        return flat(model)

    whole = on_ranks(RANKS, lambda rank: run(rank, 0, None))
    on_ranks(RANKS, lambda rank: run(rank, 0, tmp_path))
    resumed = on_ranks(RANKS, lambda rank: run(rank, 4, None))
    assert all(torch.equal(own, expected) for own, expected in zip(resumed, whole, strict=True))


def test_counted_bytes_are_those_of_the_messages() -> None:
    def run(rank: int) -> float:
        model = torch.nn.Linear(100, 50)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        compressor = {"name": "redsync.trimmed", "density": 0.01, "methods": {"bias": "dense"}}
        compressor = {**compressor, "name": "redsync.hybrid"}
        with hocket.attach(model, optimizer, strategy(SPARSE, compressor, segments="model")) as session:
            model(torch.ones(1, 100)).square().sum().backward()
            optimizer.step()
            return session.counters.bytes_sent

    # 2 headers of 8 bytes, 4 trailing numbers and 50 values of 4, 50 of 5,000 elements of 8: to each of two others.
    assert on_ranks(3, run) == [2 * (2 * 8 + 4 * 4 + 50 * 4 + 50 * 8)] * 3


def test_quantised_messages_are_not_scalable() -> None:
    with pytest.raises(HocketError, match=r"compressor redsync\.asq does not say which elements it selects"):
        hocket.compose("redsync.scalable", "gradients.0.compressor=redsync.asq")


def test_leaders_of_groups_exchange_scalable() -> None:
    """Sums of groups among four leaders, and back: all ranks end equal, and with all sent it is the mean."""
    group, leaders = ({"name": name, "size": 2} for name in ("group", "leaders"))

    def hierarchy(density: float) -> dict[str, Any]:
        compressor = {"name": "error_feedback", "compressor": {"name": "topk", "density": density}}
        return {
            "gradients": [
                {"collective": "reduce", "over": group},
                {"collective": SCALABLE, "over": leaders, "compressor": compressor},
                {"collective": "broadcast", "over": group},
            ]
        }

    torch.testing.assert_close(trained(hierarchy(1.0), ranks=8), dense(ranks=8), rtol=1e-12, atol=1e-14)
    assert not torch.allclose(trained(hierarchy(0.1), ranks=8), dense(ranks=8))


def test_the_hierarchy_with_crossover_runs_or_says_what_is_missing() -> None:
    try:
        composed = hocket.compose("redsync.hierarchical_crossover")
    except HocketError as error:
        assert how_to_install("hocket-crossover") in str(error)  # noqa: PT017
        return
    ended = on_ranks(8, lambda rank: train(composed, rank))
    assert all(own.isfinite().all() for own in ended)
    assert torch.equal(ended[0], ended[3])


def test_that_nothing_is_compressed_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    trained("redsync")
    [message] = [record.getMessage() for record in caplog.records]
    assert message == (
        "gradients.0: nothing is compressed, because all 4 parameters are below dense_below_kb=128: the largest has "
        "1.88 KB. compressor.dense_below_kb sets the limit"
    )
