"""One process with N virtual stages gives bit for bit what N processes give, or any number between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import bodies
import pytest
import torch
from torch import nn

import hocket
from hocket.launch.joining import join
from hocket.plugin import default_registry
from hocket.testing.job import Job
from hocket_eapipe import Pipeline, Policy

POLICIES = ["naive", "stashing", "vertical_sync", "spectrain", "elastic", "flush"]


def on_virtual_ranks(size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    return hocket.virtual(size).run(lambda: body(join(), *args))


def check_same(alone: tuple[str, list[float]], ranks: list[Any]) -> None:
    """Check that all ranks end with the whole model, and that the last has been told the losses."""
    assert [found for found, _ in ranks] == [alone[0]] * len(ranks)
    assert ranks[-1][1] == alone[1]
    assert all(losses == [] for _, losses in ranks[:-1])


@pytest.mark.parametrize("policy", POLICIES)
def test_convnet_with_batchnorm_dropout_and_a_schedule(policy: str) -> None:
    [alone] = on_virtual_ranks(1, bodies.train_convnet, policy, 4, 11)
    assert len(alone[1]) == 11
    for size in (2, 3, 4):
        check_same(alone, on_virtual_ranks(size, bodies.train_convnet, policy, 4, 11))


@pytest.mark.parametrize("micro_batches", [2, 3])
def test_micro_batches(micro_batches: int) -> None:
    """Batches of 2 to 6 samples: some have fewer than there are micro-batches."""
    [alone] = on_virtual_ranks(1, bodies.train_convnet, "flush", 3, 8, micro_batches)
    check_same(alone, on_virtual_ranks(3, bodies.train_convnet, "flush", 3, 8, micro_batches))


@pytest.mark.parametrize("count", [1, 2, 9])
def test_nested_values_of_changing_shapes(count: int) -> None:
    [alone] = on_virtual_ranks(1, bodies.train_shapes, 4, count)
    for size in (2, 4):
        check_same(alone, on_virtual_ranks(size, bodies.train_shapes, 4, count))


@pytest.mark.one_of_each
@pytest.mark.parametrize(
    "strategy",
    [
        {"gradients": [{"collective": "allreduce"}]},
        {"parameters": [{"collective": "gossip", "topology": "ring"}]},
        {
            "parameters": [
                {"collective": "gossip", "topology": "ring", "segments": "layers", "overlap": "forward"}
            ]
        },
        {"parameters": [{"collective": "allreduce", "every": 3, "delay": 1}]},
    ],
    ids=["gradients", "parameters", "forward", "delayed"],
)
@pytest.mark.parametrize("policy", ["stashing", "elastic", "flush"])
def test_two_pipelines(policy: str, strategy: dict[str, Any]) -> None:
    """A 2 x 2 mesh, a 2 x 4 one, and two processes with all four stages each."""
    two = on_virtual_ranks(2, bodies.train_mesh, 2, strategy, policy, 4, 9)
    assert len({found for found, _ in two}) == 1
    for size in (4, 8):
        found = on_virtual_ranks(size, bodies.train_mesh, 2, strategy, policy, 4, 9)
        assert {bits for bits, _ in found} == {two[0][0]}
        assert [found[size // 2 - 1][1], found[-1][1]] == [two[0][1], two[1][1]]


def test_pipelines_that_average_in_pairs_settle_with_every_change() -> None:
    """The saved run has the mean that it would have without a save."""
    if "adpsgd" not in default_registry().installed():
        pytest.skip("hocket-adpsgd is not installed")

    def body() -> tuple[int, list[float], list[float]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = Pipeline(stages=2, pipelines=4, policy=Policy.STASHING)

        def whole() -> list[float]:
            return list(nn.utils.parameters_to_vector(model.parameters()).tolist())

        with hocket.attach(model, optimizer, "adpsgd", engine=engine) as session:
            pipeline = session.data_rank
            for t in range(6):
                session.delay(0.001 * (1 + 3 * pipeline))
                generator = torch.Generator().manual_seed(100 * pipeline + t)
                batch = torch.randn(4, 6, generator=generator).double(), torch.tensor([0, 1, 2, 0])
                session.train_batch(batch, nn.functional.cross_entropy)
            with session.replica():
                own = whole()
            with session.consensus():
                return pipeline, own, whole()

    told = hocket.virtual(8).run(body)
    own = torch.tensor(list({pipeline: own for pipeline, own, _ in told}.values()))
    for _, _, mean in told:
        torch.testing.assert_close(own.mean(0), torch.tensor(mean), rtol=0, atol=1e-6)


@pytest.mark.parametrize("policy", POLICIES)
def test_over_processes(job_of_4: Job, policy: str) -> None:
    [alone] = on_virtual_ranks(1, bodies.train_convnet, policy, 4, 11)
    check_same(alone, [tuple(each) for each in job_of_4.run(bodies.train_convnet, (policy, 4, 11))])


def test_nested_values_over_processes(job_of_4: Job) -> None:
    [alone] = on_virtual_ranks(1, bodies.train_shapes, 4, 9)
    check_same(alone, [tuple(each) for each in job_of_4.run(bodies.train_shapes, (4, 9))])


def test_more_stages_than_there_are_processes(job_of_4: Job) -> None:
    [alone] = on_virtual_ranks(1, bodies.train_convnet, "elastic", 7, 12)
    check_same(alone, [tuple(each) for each in job_of_4.run(bodies.train_convnet, ("elastic", 7, 12))])


@pytest.mark.parametrize("plugin", ["crossover", "redsync"])
def test_two_pipelines_of_two_over_processes(job_of_4: Job, plugin: str) -> None:
    """With a plugin's strategy among the two holders of each stage."""
    pytest.importorskip(f"hocket_{plugin}")
    if plugin not in default_registry().installed():
        pytest.skip(f"hocket-{plugin} is not installed")
    strategy = {
        "crossover": {
            "parameters": [
                {
                    "collective": "gossip",
                    "topology": "crossover.fair_random",
                    "segments": "layers",
                    "overlap": "forward",
                }
            ]
        },
        "redsync": {
            "gradients": [
                {"collective": "sparse_allreduce", "compressor": {"name": "redsync.hybrid", "density": 0.3}}
            ]
        },
    }[plugin]
    expected = on_virtual_ranks(4, bodies.train_mesh, 2, strategy, "elastic", 2, 20)
    found = job_of_4.run(bodies.train_mesh, (2, strategy, "elastic", 2, 20))
    assert [tuple(each) for each in found] == expected
