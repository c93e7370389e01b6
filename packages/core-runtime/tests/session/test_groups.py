"""Exchanges among groups and their leaders, against a single process that averages as they should."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import batches, flat, mlp, on_ranks, reference, sgd, step_with, train

import hocket
from hocket.errors import CompositionError

STEPS = 4


def stages(over: dict[str, Any], **first: Any) -> dict[str, Any]:
    """An allreduce of gradients in three stages: within groups, between leaders, within groups."""
    group, leaders = {"name": "group", **over}, {"name": "leaders", **over}
    return {
        "gradients": [
            {"collective": "allreduce", "over": group, "segments": "layers", **first},
            {"collective": "allreduce", "over": leaders, "segments": "layers"},
            {"collective": "broadcast", "over": group, "segments": "layers"},
        ]
    }


def all_batches(size: int) -> list[list[tuple[Any, float]]]:
    data = [batches(rank, STEPS) for rank in range(size)]
    return [[(of_rank[step], 1.0) for of_rank in data] for step in range(STEPS)]


@pytest.mark.one_of_each
@pytest.mark.parametrize("overlap", ["none", "backward"])
@pytest.mark.parametrize(
    ("size", "over"),
    [
        (4, {"size": 2}),
        (5, {"size": 2}),
        (5, {"count": 2}),
        (7, {"size": 3}),
        (4, {"size": 4}),
        (3, {"size": 1}),
        (6, {"size": 2, "sharded": True}),
        (6, {"size": 3, "sharded": True}),
        (4, {"by": "host"}),
    ],
)
def test_three_stages_are_one_allreduce(size: int, over: dict[str, Any], overlap: str) -> None:
    ended = on_ranks(size, lambda rank: train((stages(over, overlap=overlap),), batches(rank, STEPS)))
    for own in ended:
        torch.testing.assert_close(own, ended[0], rtol=0, atol=0)
        torch.testing.assert_close(own, reference(all_batches(size)), rtol=1e-12, atol=1e-14)


def test_groups_alone_train_apart() -> None:
    strategy = {"gradients": [{"collective": "allreduce", "over": {"name": "group", "size": 2}}]}
    ended = on_ranks(5, lambda rank: train((strategy,), batches(rank, STEPS)))
    steps = all_batches(5)
    for group in ([0, 1], [2, 3], [4]):
        alone = reference([[weighted[rank] for rank in group] for weighted in steps])
        for rank in group:
            torch.testing.assert_close(ended[rank], alone, rtol=1e-12, atol=1e-14)


@pytest.mark.one_of_each
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("overlap", ["none", "forward"])
def test_leaders_gossip_and_their_groups_hear_of_it(sharded: bool, overlap: str) -> None:
    """Every member steps with its group's mean; then W mixes the groups' parameters."""
    over = {"size": 2, "sharded": sharded}
    strategy = {
        "gradients": [{"collective": "allreduce", "over": {"name": "group", "size": 2}}],
        "parameters": [
            {
                "collective": "gossip",
                "over": {"name": "leaders", **over},
                "topology": "exponential",
                "segments": "layers",
            },
            {
                "collective": "broadcast",
                "over": {"name": "group", **over},
                "segments": "layers",
                "overlap": overlap,
            },
        ],
    }
    ended = on_ranks(6, lambda rank: train((strategy,), batches(rank, STEPS)))
    expected = groups_that_gossip(3)
    for rank, own in enumerate(ended):
        torch.testing.assert_close(own, expected[rank // 2], rtol=1e-12, atol=1e-14)


def groups_that_gossip(count: int) -> list[Tensor]:
    """Train a replica for each group of two, mixed with the one that is 1, then 2, places before after each step."""
    models = [mlp() for _ in range(count)]
    optimizers = [sgd(model) for model in models]
    data = [batches(rank, STEPS) for rank in range(2 * count)]
    for step in range(STEPS):
        for group, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            step_with(model, optimizer, [(data[rank][step], 1.0) for rank in (2 * group, 2 * group + 1)])
        values = [flat(model) for model in models]
        distance = 2 ** (step % 2)
        for group, model in enumerate(models):
            mixed = (values[group] + values[(group - distance) % count]) / 2
            nn.utils.vector_to_parameters(mixed, model.parameters())
    return [flat(model) for model in models]


def test_a_number_of_ranks_that_sharded_leaders_cannot_have() -> None:
    strategy = hocket.compose(stages({"size": 2, "sharded": True}))

    def run(rank: int) -> None:
        model = mlp()
        with pytest.raises(
            CompositionError,
            match=r"^gradients\.0 does not fit 5 ranks: sharded leaders need groups of equal size",
        ):
            hocket.attach(model, sgd(model), strategy)

    on_ranks(5, run)


def test_ranks_without_data_weigh_nothing_in_any_stage() -> None:
    """Rank 3 has two batches less than the others."""
    data = [batches(rank, STEPS - 2 * (rank == 3)) for rank in range(4)]
    ended = on_ranks(4, lambda rank: train((stages({"size": 2}),), data[rank]))
    steps = [[(own[step], 1.0) for own in data if step < len(own)] for step in range(STEPS)]
    for own in ended:
        torch.testing.assert_close(own, reference(steps), rtol=1e-12, atol=1e-14)
