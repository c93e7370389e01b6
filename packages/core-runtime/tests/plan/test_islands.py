"""Plans of islands: a rank's part of bytes and memory, and islands where ranks are counted for whole models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pytest
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

import hocket
from hocket.cli.planned import planned_run, situation_of
from hocket.errors import UserError
from hocket.launch.hosts import parse_hosts
from hocket.plan.plan import plan
from hocket.task.digits import Digits
from hocket.transport.network import NetworkModel

ISLAND = 4


@pytest.mark.parametrize("recipe", ["dpsgd", "overlap_sgp", "periodic_average"])
def test_a_rank_sends_its_part(recipe: str) -> None:
    strategy, network = hocket.compose(recipe), NetworkModel()
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 128, bias=False))
    whole, part = plan(strategy, model, 2, network), plan(strategy, model, 2, network, island=ISLAND)
    assert part.bytes_per_step == pytest.approx(whole.bytes_per_step / ISLAND)
    assert part.num_parameters == whole.num_parameters
    assert part.model_bytes == whole.model_bytes / ISLAND
    # In pieces, parameters are copied into a buffer that is sent.
    assert (
        whole.memory_bytes / ISLAND <= part.memory_bytes <= whole.memory_bytes / ISLAND + 2 * part.model_bytes
    )


def test_segments_are_cut_by_whole_parameters() -> None:
    strategy = hocket.compose("agd", "gradients.0.segments={name: bytes, size_mb: 0.02}")
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(8)))
    whole, part = (plan(strategy, model, 2, NetworkModel(), island=size) for size in (1, ISLAND))
    cuts = [[[span.name for span in cut.spans] for cut in of.exchanges[0].layouts] for of in (whole, part)]
    assert len(cuts[0]) > 1
    assert cuts[0] == cuts[1]


@pytest.mark.parametrize(
    ("ranks", "hosts", "island", "expected"),
    [
        (16, "", 4, (0, 0, 0, 0)),
        (None, "4x8", 8, (0, 1, 2, 3)),
        (None, "2x8", 4, (0, 0, 1, 1)),
    ],
)
def test_islands_are_where_their_ranks_are(
    ranks: int | None, hosts: str, island: int, expected: tuple[int, ...]
) -> None:
    _, placement = planned_run(
        "sgd", (f"island={{shard: {island}}}",), ranks, parse_hosts(hosts) if hosts else ()
    )
    assert placement.hosts == expected


def test_parts_of_islands_are_refused() -> None:
    with pytest.raises(UserError, match="6 ranks cannot be divided into islands of 4"):
        planned_run("sgd", ("island={shard: 4}",), 6, ())
    with pytest.raises(UserError, match="--hosts ISLANDSx16, with the bandwidth of its link"):
        planned_run("sgd", ("island={shard: 16}",), None, parse_hosts("4x8"))


@dataclass(frozen=True)
class Split(Digits):
    """A task with a plan of tensor parallelism for one of its layers, and for half of another."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64), nn.Linear(64, 10))

    def tensor_plan(self, model: nn.Module, ranks: int) -> Mapping[str, ParallelStyle]:
        return {"0": ColwiseParallel(), "1": RowwiseParallel()}


@pytest.mark.parametrize(("island", "shards"), [("{tensor: 2}", 1), ("{shard: 4, tensor: 2}", 4)])
def test_parameters_that_a_plan_leaves_whole(island: str, shards: int) -> None:
    split, whole = 128 * 64 + 128 + 128 * 64, 64 + 64 * 10 + 10
    run, placement = planned_run("periodic_average", (f"island={island}",), 4 * shards, ())
    planned = situation_of(run, Split(), placement, None).plan(run.strategy)
    assert planned.ranks == 2
    assert planned.num_parameters == split + whole
    assert planned.model_bytes == pytest.approx(4 * (split / 2 + whole) / shards, abs=4 * 6)
    given = situation_of(run, Split(), placement, ("equal", nn.Linear(64, 64))).plan(run.strategy)
    assert given.model_bytes == 4 * 65 * 64 / 2 / shards
