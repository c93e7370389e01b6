"""The scalable sparse allreduce against its definition in NumPy, and what becomes of what does not survive."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scalable_cases import SCALABLE, TRAILER, carried_out, drawn, in_a_job, segment_of

import hocket
from hocket.arrays import Array
from hocket.collective.api import Choices
from hocket.collective.scalable import Regions
from hocket.collective.sparse import Mean, SparseAlgorithm, SparseAllreduce
from hocket.compressor import ErrorFeedback, MomentumCorrection, TopK
from hocket.errors import CompositionError
from hocket.launch.joining import join
from hocket.progress import InlineProgress
from hocket.testing.compressor import make_segment
from hocket.testing.job import Job
from hocket.transport.network import NetworkModel
from hocket.transport.virtual import VirtualWorld

MPI = [
    pytest.mark.mpi,
    pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed"),
]


# --- the definition --------------------------------------------------------------------------------------


def cut(weights: Sequence[tuple[int, Fraction]], size: int) -> list[int]:
    """Cut pieces of so many elements and so much weight, evenly spread, into equal weights."""
    total = sum((weight for _, weight in weights), Fraction(0))
    bounds = [0]
    for number in range(1, size):
        goal, place = Fraction(total * number, size), Fraction(0)
        for length, weight in weights:
            if goal <= weight:
                place += length * goal / weight
                break
            goal -= weight
            place += length
        bounds.append(int(place))
    return [*bounds, sum(length for length, _ in weights)]


def largest(values: Array, places: Array, count: int) -> Array:
    """The places of the largest, of equal ones the first."""
    return np.sort(places[np.argsort(-np.abs(values[places]), kind="stable")[:count]])


def defined(contributions: Array, density: float, of_contributors: bool = False) -> tuple[Array, Array]:
    """Return the results [rounds, numel + trailer] and the last residuals [ranks, numel]."""
    segment = segment_of()
    numel, ranks = segment.numel, contributions.shape[1]
    whole = np.concatenate([np.arange(span.start, span.stop) for span in segment.spans])
    k = max(1, round(density * len(whole)))
    share = -(-(16 + -(-TRAILER // ranks) * 8 + -(-k // ranks) * 12) // 16) * 16
    head = 16 + -(-TRAILER // ranks) * 8
    to_owner, to_all = (share * 3 // 2 - head) // 12, (share - head) // 12
    bounds = cut([(len(whole), Fraction(1))], ranks)
    residuals, results = np.zeros((ranks, numel)), []
    for of_ranks in contributions:
        residuals = residuals + of_ranks[:, :numel]
        sent = [largest(v, whole[np.argsort(whole)], k) for v in residuals]
        result, taken = np.zeros(numel), np.zeros((ranks, numel), bool)
        counts = []
        for low, high in pairwise(bounds):
            region, came = whole[low:high], np.zeros((ranks, numel))
            has = np.zeros((ranks, numel), bool)
            own = [np.intersect1d(places, region) for places in sent]
            counts.append(sum(map(len, own)))
            for rank, places in enumerate(own):
                going = largest(residuals[rank], places, to_owner)
                came[rank, going], has[rank, going] = residuals[rank, going], True
            total, contributors = came.sum(axis=0), has.sum(axis=0)
            if of_contributors:
                total = total * ranks / np.maximum(contributors, 1)
            ranked = np.where(contributors == ranks, np.inf, total)
            surviving = largest(ranked, np.flatnonzero(contributors), to_all)
            result[surviving] = total[surviving]
            taken[:, surviving] |= has[:, surviving]
        residuals = np.where(taken, 0, residuals)
        results.append(np.concatenate([result, of_ranks[:, numel:].sum(axis=0)]))
        lengths = [high - low for low, high in pairwise(bounds)]
        weights = [
            (length, Fraction(3 * count, sum(counts)) + Fraction(length, len(whole)))
            for length, count in zip(lengths, counts, strict=True)
        ]
        bounds = cut(weights, ranks)
    return np.array(results), residuals


# --- against it ------------------------------------------------------------------------------------------


@pytest.mark.one_of_each
@pytest.mark.parametrize("density", [0.02, 0.1, 0.5])
@pytest.mark.parametrize("ranks", range(1, 18))
def test_it_is_its_definition(ranks: int, density: float) -> None:
    contributions = drawn(ranks, 4, seed=ranks)
    results, residuals = defined(contributions, density)
    ended = carried_out(contributions, ErrorFeedback(TopK(density)))
    for own, residual in zip(ended, residuals, strict=True):
        np.testing.assert_array_equal(own.results, results)
        np.testing.assert_array_equal(own.residual, residual)
    assert np.count_nonzero(results[:, :-TRAILER]) > 0


def test_the_mean_over_contributors_is_its_definition() -> None:
    contributions = drawn(5, 3, seed=2) * 12  # of 1 to 5 ranks, without rounding
    results, residuals = defined(contributions, 0.2, of_contributors=True)
    collective = replace(SCALABLE, mean=Mean.CONTRIBUTORS)
    for own, residual in zip(
        carried_out(contributions, ErrorFeedback(TopK(0.2)), collective), residuals, strict=True
    ):
        np.testing.assert_allclose(own.results, results, rtol=1e-15)
        np.testing.assert_array_equal(own.residual, residual)


@given(
    ranks=st.integers(1, 9),
    rounds=st.integers(1, 6),
    density=st.floats(0.001, 1.0),
    sizes=st.lists(st.integers(0, 70), min_size=1, max_size=3),
    seed=st.integers(0, 10**6),
)
def test_nothing_is_lost(ranks: int, rounds: int, density: float, sizes: list[int], seed: int) -> None:
    """What all have given is what came, and what waits with the ranks; to the bit, as nothing is rounded."""
    contributions = drawn(ranks, rounds, seed, sizes)
    ended = carried_out(contributions, ErrorFeedback(TopK(density)), sizes=sizes)
    numel = ended[0].residual.size
    came = ended[0].results[:, :numel].sum(axis=0)
    waits = sum(own.residual for own in ended)
    np.testing.assert_array_equal(came + waits, contributions[..., :numel].sum(axis=(0, 1)))
    for own in ended:
        np.testing.assert_array_equal(own.results, ended[0].results)


@pytest.mark.parametrize("ranks", [1, 2, 5, 8])
def test_where_all_is_sent_it_is_the_gather(ranks: int) -> None:
    """To the bit, of values whose sums are rounded."""
    contributions = np.random.default_rng(3).standard_normal((2, ranks, segment_of().outgoing.numel()))
    for span in segment_of().spans:
        contributions[..., span.stop : span.start + span.padded_numel] = 0
    [own, gathered] = (
        carried_out(contributions, TopK(1.0), collective)[0] for collective in (SCALABLE, SparseAllreduce())
    )
    np.testing.assert_array_equal(own.results, gathered.results)
    np.testing.assert_allclose(own.results, contributions.sum(axis=1), atol=1e-14)


def test_momentum_of_what_does_not_survive_goes_on() -> None:
    """Velocity is cleared where an element came through, and is as if nothing had been sent elsewhere."""
    contributions = drawn(4, 1, seed=1)
    compressor = MomentumCorrection(ErrorFeedback(TopK(0.2)))
    for own, given_ in zip(carried_out(contributions, compressor), contributions[0], strict=True):
        waits = own.residual != 0
        np.testing.assert_array_equal(own.residual[waits], given_[:-TRAILER][waits])
        np.testing.assert_array_equal(own.momentum, own.residual)
        assert 0 < waits.sum() < own.residual.size


def test_nan_of_one_rank_enters_no_residual() -> None:
    contributions = drawn(3, 3, seed=4)
    contributions[1, 2, [3, 50]] = np.nan, np.inf
    ended = carried_out(contributions, ErrorFeedback(TopK(0.1)))
    assert all(np.isfinite(own.residual).all() for own in ended)
    assert not np.isfinite(ended[0].results[1]).all()
    assert np.isfinite(ended[0].results[2]).all()


def test_a_resumed_channel_goes_on_to_the_bit() -> None:
    """With its boundaries, which have moved to the segment's end by then."""
    contributions = drawn(5, 6, seed=7)
    whole, resumed = (
        carried_out(contributions, ErrorFeedback(TopK(0.05)), resumed_at=at) for at in (None, 3)
    )
    for own, other in zip(whole, resumed, strict=True):
        np.testing.assert_array_equal(own.results, other.results)
        np.testing.assert_array_equal(own.residual, other.residual)


def test_regions_follow_the_elements() -> None:
    """Of elements that all lie in the last tenth, no region has more than a third above its share after some rounds."""
    segment = make_segment([4000, 6000])
    regions, size = Regions(segment.spans, 8), 8
    indices = np.arange(segment.numel - 1000, segment.numel)
    for _ in range(12):
        counts = np.histogram(indices, regions.bounds)[0]
        regions.balance(counts.tolist())
    counts = np.histogram(indices, regions.bounds)[0]
    assert counts.max() <= 4 / 3 * 1000 / size + 1
    assert np.diff(regions.cuts).max() <= 4 * 10_000 / size + 1


@pytest.mark.parametrize("ranks", [2, 8, 32])
def test_bytes_do_not_grow_with_the_ranks(ranks: int) -> None:
    """2.5 (p - 1) / p messages, but for what is rounded up."""
    segment = make_segment([100_000], trailer_numel=3)
    network, compressor = NetworkModel(), ErrorFeedback(TopK(0.1))
    nbytes = SCALABLE.message_bytes(compressor, segment, ranks, network)
    sent = SCALABLE.cost(nbytes, ranks, None, network).bytes
    message = compressor.footprint(segment).message_bytes
    assert sent == pytest.approx(2.5 * (ranks - 1) / ranks * message, rel=0.03)


@pytest.mark.parametrize(("ranks", "numel", "chosen"), [(2, 50_000, "gather"), (16, 50_000, "scalable")])
def test_auto_takes_the_faster_one(
    ranks: int, numel: int, chosen: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hocket")
    collective = replace(SCALABLE, algorithm=SparseAlgorithm.AUTO)

    def run() -> tuple[str, float]:
        segment, progress = make_segment([numel]), InlineProgress()
        compressor = ErrorFeedback(TopK(0.1))
        choices = Choices("gradients.0", "gradients", compressor=compressor)
        channel = collective.open(join(), [segment], progress, choices)
        segment.outgoing.copy_(torch.linspace(-1, 1, segment.outgoing.numel()))
        channel.start([segment], 0).wait()
        carrier = channel.carried_by[0]
        channel.close()
        progress.close()
        assert isinstance(carrier, SparseAllreduce)
        return carrier.algorithm, int(segment.incoming.count_nonzero())

    told = VirtualWorld(ranks).run(run)
    assert told == [(chosen, told[0][1])] * ranks
    assert 0 < told[0][1] <= numel / 10
    assert f"algorithm auto chooses {chosen} for 1 segment" in caplog.text


@pytest.mark.parametrize("compressor", ["none", "bf16", {"name": "error_feedback", "compressor": "bf16"}])
def test_what_does_not_select_is_refused_and_auto_gathers_it(compressor: Any) -> None:
    def exchange(algorithm: str) -> dict[str, Any]:
        collective = {"name": "sparse_allreduce", "algorithm": algorithm}
        return {"gradients": [{"collective": collective, "compressor": compressor}]}

    with pytest.raises(CompositionError, match="use topk, redsync"):
        hocket.compose(exchange("scalable"))

    def bytes_of_a_step(algorithm: str) -> float:
        model = torch.nn.Linear(3, 2)
        with hocket.attach(
            model, torch.optim.SGD(model.parameters(), lr=0.1), exchange(algorithm)
        ) as session:
            model(torch.ones(1, 3)).sum().backward()
            return session.counters.bytes_sent

    told = [VirtualWorld(5).run(lambda each=each: bytes_of_a_step(each)) for each in ("auto", "gather")]
    assert told[0] == told[1]


@pytest.mark.parametrize(
    ("transport", "ranks"),
    [
        *(pytest.param("mpi", ranks, marks=[*MPI, pytest.mark.full]) for ranks in (2, 4)),
        ("torch", 4),
    ],
)
def test_over_processes_it_is_its_definition(transport: str, ranks: int) -> None:
    rounds, seed, density = 4, 5, 0.1
    results, residuals = defined(drawn(ranks, rounds, seed), density)
    job = Job(ranks, Path(__file__).parent, transport)
    try:
        told = job.run(in_a_job, (rounds, seed, density))
    finally:
        job.close()
    for (own, kept), residual in zip(told, residuals, strict=True):
        np.testing.assert_array_equal(own, results)
        np.testing.assert_array_equal(kept, residual)
