"""The cost model: the paper's formula, what is chosen by it, the ranks at which it turns, its constants measured."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hocket
from hocket.collective.sparse import SparseAlgorithm
from hocket.errors import CompositionError
from hocket.plan.layout import Layout, gradient_layout
from hocket.plan.plan import plan
from hocket.progress import InlineProgress
from hocket.segment.partition import Model, named_spans, partition
from hocket.segment.segment import Segment
from hocket.testing.compressor import fill, make_segment
from hocket.transport.network import NetworkModel
from hocket_redsync.calibration import calibrate
from hocket_redsync.channel import RedSyncChannel
from hocket_redsync.choosing import Way, choose, first_dense_size
from hocket_redsync.cost import CostModel
from hocket_redsync.hybrid import Hybrid, Trimmed

FREE_CORE = {"select_s_per_element": 0.0, "add_s_per_element": 0.0}
SLOW = CostModel(0.0, 1e-7, 0.0, 1e-7, **FREE_CORE)  # 80 Mbit/s


def layout(*sizes: int) -> Layout:
    """A segment of flat parameters."""
    parameters = [(f"p{i}", torch.empty(size, device="meta")) for i, size in enumerate(sizes)]
    return gradient_layout(partition(named_spans(parameters), Model())[0])


@given(st.integers(2, 300), st.integers(1, 10**9), st.floats(1e-4, 0.1))
def test_the_equations(size: int, numel: int, density: float) -> None:
    """Equations 1 and 2, and that of scalable messages; 8 bytes for an element that is sent, 4 for a dense one."""
    costs = CostModel(2e-5, 1e-9, 3e-5, 2e-9, 5e-10, 3e-9)
    doublings = math.ceil(math.log2(size))
    k = density * numel
    sparse = costs.gather_latency(size) + costs.sparse_seconds(numel, size * k, 8 * k, size)
    assert sparse == pytest.approx(
        numel * 5e-10 + doublings * 2e-5 + (size - 1) * 8 * k * 1e-9 + size * k * 3e-9
    )
    scalable = costs.scalable_latency(size) + costs.sparse_seconds(numel, 2 * k, 2.5 / size * 8 * k, size)
    assert scalable == pytest.approx(
        numel * 5e-10 + (1 + doublings) * 2e-5 + 2.5 * (size - 1) / size * 8 * k * 1e-9 + 2 * k * 3e-9
    )
    dense = costs.reduce_latency(size) + costs.dense_seconds(4 * numel, size)
    assert dense == pytest.approx(2 * doublings * 3e-5 + 2 * (size - 1) / size * 4 * numel * 2e-9)


def test_a_constant_that_means_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="gather_s_per_byte must be finite and at least 0, not nan"):
        CostModel(0, math.nan, 0, 0)


def test_each_parameter_goes_the_cheaper_way() -> None:
    """A slow network makes long vectors sparse, a dear selection dense; short ones are not worth a latency."""
    shape, compressor = layout(10**6, 100, 50_000), Hybrid(0.001)
    assert choose(compressor, shape, 4, SLOW, auto=True).way.dense == {1}
    distant = CostModel(1e-3, 1e-7, 1e-3, 1e-7, **FREE_CORE)
    assert choose(compressor, shape, 4, distant, auto=True).way.dense == set()
    dear = CostModel(1e-4, 1e-7, 1e-4, 1e-7, select_s_per_element=1e-3, add_s_per_element=0.0)
    assert choose(compressor, shape, 4, dear, auto=True).way.dense == {0, 1, 2}
    assert choose(compressor, shape, 4, dear, auto=False).way.dense == {1}


@given(st.lists(st.integers(1, 10**7), min_size=1, max_size=6), st.integers(2, 512), st.floats(1e-10, 1e-6))
def test_what_is_chosen_is_never_predicted_to_be_worse_than_dense(
    sizes: list[int], size: int, s_per_byte: float
) -> None:
    costs = CostModel(2e-5, s_per_byte, 2e-5, s_per_byte)
    shape = layout(*sizes)
    chosen = choose(Hybrid(0.001), shape, size, costs, auto=True, algorithm=SparseAlgorithm.AUTO)
    nbytes = 4 * (shape.numel + shape.trailer_numel)
    assert chosen.seconds <= costs.reduce_latency(size) + costs.dense_seconds(nbytes, size) + 1e-12


@pytest.mark.parametrize(
    ("size", "density", "algorithm", "is_dense"),
    [(2, 0.01, "gather", False), (16, 0.01, "scalable", False), (16, 0.45, "gather", True)],
)
def test_the_fastest_of_three_ways_is_chosen(
    size: int, density: float, algorithm: str, is_dense: bool
) -> None:
    """Bytes only: a gather's 8 k (p - 1), 20 k (p - 1) / p scalable, 8 M (p - 1) / p dense."""
    shape = layout(10**6)
    way = choose(Trimmed(density), shape, size, SLOW, auto=True, algorithm=SparseAlgorithm.AUTO).way
    assert bool(way.dense) == is_dense
    assert way.algorithm == algorithm or is_dense


def test_dense_is_better_from_where_the_formula_says() -> None:
    """Bytes only: sparse pays while (p - 1) 8 k < 2 (p - 1) / p 4 M, so for p < M / k."""
    model = layout(10**7)
    costs = CostModel(0, 1e-8, 0, 1e-8, **FREE_CORE)
    assert first_dense_size(Trimmed(0.001), [model], costs) == pytest.approx(1000, abs=2)
    assert first_dense_size(Trimmed(0.01), [model], costs) == pytest.approx(100, abs=2)
    scalable = SparseAlgorithm.SCALABLE
    assert first_dense_size(Trimmed(0.01), [model], costs, scalable) is None
    assert first_dense_size(Trimmed(0.45), [model], costs, scalable) == 2
    never = CostModel(0, 0, 0, 1e-8, **FREE_CORE)
    assert first_dense_size(Trimmed(0.01), [model], never) is None


def test_calibration_finds_the_networks_constants() -> None:
    """On virtual ranks the network is known: 1 ms and 10 MB/s."""
    network = NetworkModel(latency_s=1e-3, bandwidth_bits_per_s=8e7)
    found = hocket.virtual(4, network=network).run(
        lambda: calibrate(hocket.join(), InlineProgress(), torch.device("cpu"))
    )
    assert found == [found[0]] * 4
    costs = found[0]
    assert costs.gather_s_per_byte == pytest.approx(1e-7, rel=0.1)
    assert costs.reduce_s_per_byte == pytest.approx(1e-7, rel=0.2)
    assert 0 < costs.gather_latency_s < 1e-2
    assert 0 < costs.select_s_per_element < 1e-6
    assert 0 < costs.add_s_per_element < 1e-5


def bytes_of_a_step(ranks: int, *strategy: str, outputs: int = 100) -> float:
    def run() -> float:
        torch.manual_seed(hocket.join().rank)
        model = nn.Linear(1000, outputs)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with hocket.attach(model, optimizer, hocket.compose(*strategy)) as session:
            model(torch.randn(4, 1000)).square().sum().backward()
            optimizer.step()
            return session.counters.bytes_sent

    sent = hocket.virtual(ranks).run(run)
    return sum(sent) / ranks


@pytest.mark.parametrize("ranks", [2, 7, 64])
def test_bytes_grow_with_the_ranks_as_the_model_says(ranks: int) -> None:
    shape = gradient_layout(
        partition(named_spans(nn.Linear(1000, 100).named_parameters()), Model(), backward=True)[0]
    )
    sent = bytes_of_a_step(ranks, "redsync", "gradients.0.collective=sparse_allreduce")
    assert sent == (ranks - 1) * Hybrid().footprint(shape).message_bytes


DEAR = "{gather_latency_s: 1, reduce_latency_s: 0, gather_s_per_byte: 1, reduce_s_per_byte: 0}"
COSTS = "{gather_latency_s: 0, reduce_latency_s: 0, gather_s_per_byte: 1e-7, reduce_s_per_byte: 1e-7}"


@pytest.mark.parametrize("ranks", [4, 32])
def test_scalable_bytes_are_those_of_its_messages(ranks: int) -> None:
    """The weight's 100 elements, 8 bytes each, 16 of a header and the trailer's share; the bias 400, dense."""
    share = 16 + -(-4 // ranks) * 4 + -(-100 // ranks) * 8
    share = -(-share // 16) * 16
    sent = bytes_of_a_step(ranks, "redsync.scalable")
    assert sent == pytest.approx((ranks - 1) * 2.5 * share + 2 * (ranks - 1) / ranks * 400, rel=1e-12)
    if ranks == 32:
        assert sent < bytes_of_a_step(ranks, "redsync") / 4


@pytest.mark.parametrize(
    "collective", ["{name: redsync.allreduce, auto: false}", f"{{name: redsync.allreduce, costs: {COSTS}}}"]
)
def test_bytes_of_mixed_segments_are_those_of_both_ways(collective: str) -> None:
    """The weight sparse, 100 elements of 8 bytes, 2 headers of 8 and 4 trailing ones of 4; the bias 400, dense."""
    sent = bytes_of_a_step(4, "redsync", f"gradients.0.collective={collective}")
    assert sent == 3 * (100 * 8 + 2 * 8 + 4 * 4) + 3 * 2 / 4 * 400


def test_where_nothing_is_sparse_bytes_are_those_of_an_allreduce() -> None:
    auto = f"gradients.0.collective={{name: redsync.allreduce, costs: {DEAR}}}"
    assert bytes_of_a_step(4, "redsync", auto) == bytes_of_a_step(4, "sgd", "gradients.0.segments=layers")


def test_auto_measures_and_trains() -> None:
    assert bytes_of_a_step(3, "redsync.auto") > 0


@pytest.mark.parametrize("compressor", ["none", "topk", "{name: error_feedback, compressor: topk}"])
def test_only_its_own_compressors_can_be_chosen_between(compressor: str) -> None:
    with pytest.raises(
        CompositionError, match=r"use compressor redsync\.hybrid, or collective sparse_allreduce"
    ):
        hocket.compose("redsync", f"gradients.0.compressor={compressor}")


@pytest.mark.one_of_each
@pytest.mark.parametrize("costs", [DEAR, COSTS])
@pytest.mark.parametrize("segments", ["model", "layers"])
@pytest.mark.parametrize("algorithm", ["gather", "scalable", "auto"])
def test_planned_bytes_are_counted_bytes(costs: str, segments: str, algorithm: str) -> None:
    """The bytes are those of all dense segments, padding included, and of mixed ones; 6 does not divide them."""
    collective = f"gradients.0.collective={{name: redsync.allreduce, algorithm: {algorithm}, costs: {costs}}}"
    strategy = ("redsync", collective, f"gradients.0.segments={segments}")
    planned = plan(hocket.compose(*strategy), nn.Linear(1000, 101), 6, NetworkModel()).bytes_per_step
    assert bytes_of_a_step(6, *strategy, outputs=101) == pytest.approx(planned, rel=1e-12)


@pytest.mark.parametrize("algorithm", [SparseAlgorithm.GATHER, SparseAlgorithm.SCALABLE])
def test_a_resumed_channel_keeps_its_choices(algorithm: SparseAlgorithm) -> None:
    """Costs that were measured anew might make a parameter dense whose residual would then never be sent."""
    other = next(each for each in (SparseAlgorithm.SCALABLE, SparseAlgorithm.GATHER) if each is not algorithm)

    def run() -> list[list[float]]:
        peer, progress = hocket.join(), InlineProgress()
        compressor = Trimmed(0.1, dense_below_kb=0.0, correct_momentum=False)
        ends = []

        def opened(segment: Segment, way: Way) -> RedSyncChannel:
            return RedSyncChannel(peer, [segment], progress, compressor, compressor, [way])

        for resumes in (False, True):
            segment = make_segment([60, 40], torch.float32, trailer_numel=1)
            # The second channel begins with another choice, and is told of the first one's.
            channel = opened(segment, Way(frozenset({1}), algorithm))
            for round in range(4):
                if resumes and round == 2:
                    channel.close()
                    saved, channel = channel, opened(segment, Way(frozenset({0}), other))
                    channel.resume({0: round}, saved.state_dict())
                fill(segment, 10 * peer.rank + round)
                channel.start([segment], round).wait()
                ends.append(segment.incoming.tolist())
            channel.close()
        progress.close()
        return ends

    for ends in hocket.virtual(3).run(run):
        assert ends[:4] == ends[4:]
