"""Algorithms of allreduce under a compressor, and `reduce` as the first step of a hierarchy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hocket
from hocket.collective.allreduce import Allreduce, AllreduceAlgorithm
from hocket.collective.api import Choices
from hocket.errors import CompositionError
from hocket.launch.joining import join
from hocket.progress import InlineProgress
from hocket.segment.partition import Model, named_spans, partition
from hocket.segment.segment import Segment
from hocket.testing.collective.rounds import Case, Shape, exchange_rounds
from hocket.transport.network import NetworkModel
from hocket.transport.virtual import VirtualWorld

GROUP, LEADERS = {"name": "group", "size": 2}, {"name": "leaders", "size": 2}
IN_GROUPS = [
    {"collective": "reduce", "over": GROUP},
    {"collective": "allreduce", "over": LEADERS},
    {"collective": "broadcast", "over": GROUP},
]


def trained(strategy: dict[str, Any], size: int) -> list[list[np.ndarray]]:
    """Every rank's parameters after three steps, each rank with a model and samples of its own."""

    def train() -> list[np.ndarray]:
        generator = torch.Generator().manual_seed(hocket.join().rank)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        samples = torch.randn(3, 8, 5, generator=generator, dtype=torch.float64)
        with hocket.attach(model, optimizer, strategy) as session:
            for x in session.data(list(samples)):
                optimizer.zero_grad()
                model(x).square().sum().backward()
                optimizer.step()
        return [parameter.detach().numpy().copy() for parameter in model.parameters()]

    return hocket.virtual(size).run(train)


@pytest.mark.parametrize("slot", ["gradients", "parameters"])
def test_a_hierarchy_of_equal_groups_is_an_allreduce(slot: str) -> None:
    flat, in_groups = trained({slot: [{"collective": "allreduce"}]}, 6), trained({slot: IN_GROUPS}, 6)
    for rank in range(6):
        for one, other in zip(flat[0], in_groups[rank], strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-12, atol=1e-14)


@pytest.mark.one_of_each
@pytest.mark.parametrize("algorithm", ["auto", "rabenseifner", "recursive_doubling", "ring", "tree"])
@pytest.mark.parametrize("overlap", ["none", "backward"])
def test_algorithms_train_as_the_native_one(algorithm: str, overlap: str) -> None:
    native, scheduled = (
        trained({"gradients": [{"collective": collective, "segments": "layers", "overlap": overlap}]}, 5)
        for collective in ("allreduce", {"name": "allreduce", "algorithm": algorithm})
    )
    for one, other in zip(native, scheduled, strict=True):
        for expected, given in zip(one, other, strict=True):
            np.testing.assert_allclose(given, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("algorithm", ["auto", "recursive_doubling", "ring"])
def test_compressed_messages_are_summed(algorithm: str) -> None:
    def told(algorithm: str) -> list[Any]:
        collective = {"name": "allreduce", "algorithm": algorithm}
        exchange = {"collective": collective, "compressor": {"name": "shared_random", "density": 0.3}}
        shapes = [Shape(0, 100, 2, "float64"), Shape(1, 7, 0, "float64")]
        case = Case("gradients", exchange, shapes, rounds=3)
        return VirtualWorld(3).run(lambda: exchange_rounds(join(), case.to_json()))

    for native, scheduled in zip(np.ravel(told("native")), np.ravel(told(algorithm)), strict=True):
        values = [np.frombuffer(bytes.fromhex(bits)) for bits in (native, scheduled)]
        assert 0 < np.count_nonzero(values[0]) < values[0].size
        np.testing.assert_allclose(values[1], values[0], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("size", "latency_s", "largest"),
    [(4, 1e-5, "rabenseifner"), (6, 1e-4, "native"), (8, 1e-3, "rabenseifner")],
)
def test_auto_takes_the_fastest_of_the_model(size: int, latency_s: float, largest: str) -> None:
    network, counts = NetworkModel(latency_s, 8e8), [10, 3_000, 200_000]

    def taken() -> list[AllreduceAlgorithm]:
        parts = [partition(named_spans([("p", torch.zeros(count))]), Model())[0] for count in counts]
        segments = [
            Segment(f"tested[{i}]", i, spans, *(torch.zeros(spans[-1].padded_numel) for _ in range(2)))
            for i, spans in enumerate(parts)
        ]
        progress = InlineProgress()
        channel = Allreduce(AllreduceAlgorithm.AUTO).open(
            join(), segments, progress, Choices("gradients.0", "gradients")
        )
        chosen = [collective for _, collective in sorted(channel.carried_by.items())]
        for segment in segments:
            segment.outgoing.fill_(join().rank)
        for request in [channel.start([segment], 0) for segment in segments]:
            request.wait()
        assert all((segment.incoming == size * (size - 1) / 2).all() for segment in segments)
        channel.close()
        progress.close()
        assert all(isinstance(collective, Allreduce) for collective in chosen)
        return [collective.algorithm for collective in chosen if isinstance(collective, Allreduce)]

    told = VirtualWorld(size, network=network).run(taken)
    assert told == [told[0]] * size
    others = [algorithm for algorithm in AllreduceAlgorithm if algorithm is not AllreduceAlgorithm.AUTO]
    for algorithm, count in zip(told[0], counts, strict=True):
        seconds = [Allreduce(other).cost(4 * count, size, None, network).seconds for other in others]
        # Nearly as fast is as good: polling takes time, too.
        assert Allreduce(algorithm).cost(4 * count, size, None, network).seconds <= 1.02 * min(seconds)
    assert told[0][0] == "native"
    assert told[0][-1] == largest


@pytest.mark.parametrize("collective", ["reduce", "broadcast"])
def test_what_sends_values_whole_refuses_a_compressor(collective: str) -> None:
    exchange = {"collective": collective, "over": GROUP, "compressor": "shared_random"}
    with pytest.raises(CompositionError, match=f"{collective} sends uncompressed values"):
        hocket.compose({"parameters": [exchange]})


def test_a_root_beyond_the_scope_is_refused() -> None:
    following = {"collective": "broadcast"}
    strategy = hocket.compose({"parameters": [{"collective": {"name": "reduce", "root": 4}}, following]})
    with pytest.raises(ValueError, match="root: there is no rank 4 in a scope of 3"):
        strategy.parameters[0].collective.check_size(3)
