"""Fast selections against the paper's algorithms in NumPy: sets, counts, ties, and inputs that have no distribution."""

from __future__ import annotations

import numpy as np
import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st
from toys import PLAIN

from hocket.testing.compressor import make_segment
from hocket_redsync.hybrid import Exact, Sampled, Threshold, Trimmed
from hocket_redsync.kernels import Memory, Ranking, Update, kernels_for
from hocket_redsync.kernels.api import NOTHING_PASSES
from hocket_redsync.message import unpack
from hocket_redsync.residual import ResidualCompressor
from hocket_redsync.selection import SAMPLED_INTERVAL, Method, Selected, most_selected, select

CPU = kernels_for(torch.device("cpu"))

#: Distributions of residuals, [n] in float64, by name.
SHAPES = {
    "normal": lambda rng, n: rng.normal(size=n),
    "uniform": lambda rng, n: rng.uniform(-1, 1, size=n),
    "heavy": lambda rng, n: rng.standard_cauchy(size=n),
    "coarse": lambda rng, n: rng.integers(-3, 4, size=n).astype(float),  # ties everywhere
    "sparse": lambda rng, n: rng.normal(size=n) * (rng.uniform(size=n) < 0.01),
    "positive": lambda rng, n: rng.exponential(size=n),
}

#: Inputs of the paper page that leave statistics without meaning.
DEGENERATE = {
    "equal": np.full(3000, 0.5),
    "equal but for the sign": np.where(np.arange(3000) % 2, 0.5, -0.5),
    "zero": np.zeros(3000),
    "one outlier": np.r_[np.linspace(1, 2, 2999), 1e30],
    "one that is not zero": np.r_[np.zeros(2999), -3.0],
    "denormal": np.linspace(1, 3000, 3000) * 1e-44,
    "denormal and huge": np.r_[np.full(2000, 1e-44), np.full(1000, 3e38)],
    "one element": np.array([2.0]),
    "two levels": np.r_[np.ones(1500), np.full(1500, 2.0)],
}


def run(
    values: np.ndarray, method: Method, k: int, ranking: Ranking = Ranking.MAGNITUDE, start: int = 0
) -> Selected:
    """Select from a residual whose history is unknown."""
    residual = torch.from_numpy(values)
    memory = Memory(torch.zeros_like(residual), residual, None, start)
    floor = NOTHING_PASSES[values.itemsize]
    [found] = CPU.collect([CPU.advance(memory, Update(), ranking, floor, 0)])
    return select(CPU, memory, ranking, method, k, found, floor, 0)


def nonzero(values: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Leave out places of zeros, which are never sent."""
    kept: np.ndarray = places[values[places] != 0]
    return kept


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", SHAPES)
@given(st.integers(1, 9000), st.floats(0.0005, 1), st.integers(0, 2**16))
def test_the_k_largest_are_those_of_the_paper(
    shape: str, dtype: type, n: int, density: float, seed: int
) -> None:
    values = SHAPES[shape](np.random.default_rng(seed), n).astype(dtype)
    k = max(1, round(density * n))
    for method in (Method.EXACT, Method.TRIMMED):
        selected = run(values, method, k)
        np.testing.assert_array_equal(np.sort(selected.indices), nonzero(values, reference.exact(values, k)))
        np.testing.assert_array_equal(values[selected.indices], selected.values)
        by_paper = np.sort(np.abs(values[reference.trimmed(values, k)]))
        np.testing.assert_array_equal(np.sort(np.abs(selected.values)), by_paper[by_paper != 0])


@pytest.mark.parametrize("shape", SHAPES)
@given(st.integers(1, 9000), st.floats(0.0005, 1), st.integers(0, 2**16))
def test_a_threshold_is_found_where_there_is_one(shape: str, n: int, density: float, seed: int) -> None:
    values = SHAPES[shape](np.random.default_rng(seed), n).astype(np.float32)
    k = max(1, round(density * n))
    selected = run(values, Method.THRESHOLD, k)
    magnitudes, sent = np.abs(values), np.abs(selected.values)
    assert len(sent) == len(set(selected.indices.tolist()))
    if reference.has_threshold(values, k):
        assert k <= len(sent) <= 2 * k
        assert len(sent) == np.count_nonzero(magnitudes >= sent.min())
    else:
        assert len(sent) == min(k, np.count_nonzero(values))
        np.testing.assert_array_equal(np.sort(selected.indices), nonzero(values, reference.exact(values, k)))


@given(st.integers(10, 9000), st.integers(0, 2**16))
def test_where_the_papers_bisection_succeeds_so_does_ours(n: int, seed: int) -> None:
    values = np.random.default_rng(seed).normal(size=n).astype(np.float32)
    k = max(1, n // 50)
    if reference.threshold(values, k) is not None:
        assert k <= len(run(values, Method.THRESHOLD, k).indices) <= 2 * k


@pytest.mark.parametrize("k", [1, 2, 30, 1000, 2999, 3000])
@pytest.mark.parametrize("method", [Method.EXACT, Method.TRIMMED, Method.THRESHOLD, Method.SAMPLED])
@pytest.mark.parametrize("name", DEGENERATE)
def test_degenerate_inputs(name: str, method: Method, k: int) -> None:
    values = DEGENERATE[name].astype(np.float32)
    k = min(k, len(values))
    selected = run(values, method, k)
    sent = np.abs(selected.values)
    assert min(k, int(np.count_nonzero(values))) <= len(sent) <= most_selected(method, k, len(values))
    left = np.delete(np.abs(values), selected.indices)
    assert not len(left) or not len(sent) or left.max() <= sent.min()
    if method in (Method.EXACT, Method.TRIMMED):
        assert len(sent) <= k


@pytest.mark.parametrize("method", [Method.TRIMMED, Method.THRESHOLD, Method.SAMPLED])
@pytest.mark.parametrize("larger", [0, 2, 7])
def test_more_equal_elements_than_there_is_room_for(larger: int, method: Method) -> None:
    """No floor lets as few pass as are wanted: the k largest are found among all, equal ones by their places."""
    values = np.full(40_000, -0.5, np.float32)
    values[123::4000][:larger] = 2.0
    selected = run(values, method, 5)
    wanted = reference.exact(values, 5)
    if larger == 7 and method is not Method.TRIMMED:
        wanted = np.flatnonzero(values == 2.0)  # 5 to 10 elements reach one threshold
    np.testing.assert_array_equal(np.sort(selected.indices), wanted)


@given(st.integers(1, 5000), st.floats(0.001, 1), st.integers(0, 2**16))
def test_one_sign_at_a_time(n: int, density: float, seed: int) -> None:
    values = np.random.default_rng(seed).normal(size=n).astype(np.float32)
    k = max(1, round(density * n))
    for ranking, sign in ((Ranking.LARGEST, 1), (Ranking.SMALLEST, -1)):
        wanted = np.argsort(-sign * values, kind="stable")[:k]
        wanted = wanted[sign * values[wanted] > 0]
        np.testing.assert_array_equal(
            np.sort(run(values, Method.TRIMMED, k, ranking).indices), np.sort(wanted)
        )


@pytest.mark.parametrize("threads", [1, 3])
def test_large_parameters_and_several_threads(threads: int) -> None:
    """The parameter is as long as several pieces, with a floor from a sample, and with one from the step before."""
    torch.set_num_threads(threads)
    n, k = (1 << 20) + 77, 1000
    values = np.random.default_rng(0).normal(size=n).astype(np.float32)
    first = run(values, Method.TRIMMED, k, start=5)
    np.testing.assert_array_equal(np.sort(first.indices) - 5, reference.exact(values, k))
    again = Trimmed(k / n, dense_below_kb=0, correct_momentum=False)
    segment = make_segment([n])
    state = again.init(segment)
    rng = np.random.default_rng(1)
    for round in range(4):
        segment.outgoing[:n] = torch.from_numpy(rng.normal(size=n).astype(np.float32))
        whole = (state.residual + segment.outgoing)[:n].numpy()
        parts = unpack(again.compress(segment, state, round))
        np.testing.assert_array_equal(np.sort(parts.indices), reference.exact(whole, k))


def rounds(compressor: ResidualCompressor, given: list[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return for each round V before anything is sent, and the places that are."""
    n = len(given[0])
    segment = make_segment([n])
    state = compressor.init(segment)
    result = []
    for round, values in enumerate(given):
        segment.outgoing[:n] = torch.from_numpy(values)
        whole = (state.residual + segment.outgoing)[:n].numpy().copy()
        sent = unpack(compressor.compress(segment, state, round)).indices.copy()
        assert not state.residual[torch.from_numpy(sent).long()].any()
        result.append((whole, sent))
    return result


def test_a_sampled_threshold_is_used_again_and_then_searched() -> None:
    rng = np.random.default_rng(0)
    n, k = 20_000, 200
    given = [rng.normal(size=n).astype(np.float32) for _ in range(40)]
    taken = 0
    thresholds: list[float] = []
    for whole, sent in rounds(Sampled(k / n, **PLAIN), given):
        assert k <= len(sent) <= 4 * k
        low, high = np.abs(whole[sent]).min(), np.delete(np.abs(whole), sent).max()
        assert high < low
        # The same threshold separates what is sent from the rest as in the step before.
        same = bool(thresholds) and high < thresholds[-1] <= low
        thresholds.append(thresholds[-1] if same else low)
        taken = taken + 1 if same else 0
        assert taken <= SAMPLED_INTERVAL
    assert len(set(thresholds)) < len(thresholds)


def test_a_sampled_threshold_that_no_longer_fits_is_searched_at_once() -> None:
    rng = np.random.default_rng(0)
    n, k = 20_000, 200
    scales = [1, 1, 100, 100, 1e-3, 1, 1e4, 1]
    given = [(scale * rng.normal(size=n)).astype(np.float32) for scale in scales]
    for _, sent in rounds(Sampled(k / n, **PLAIN), given):
        assert k <= len(sent) <= 4 * k


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", sorted(SHAPES.keys() - {"coarse"}))
@pytest.mark.parametrize("k", [64, 1000])
def test_the_next_round_finds_neither_too_few_candidates_nor_many(
    shape: str, dtype: type[np.floating], k: int
) -> None:
    values = SHAPES[shape](np.random.default_rng(k), 1_000_000).astype(dtype)
    floor = run(values, Method.TRIMMED, k).floor
    assert (
        1.5 * k
        <= np.count_nonzero(np.abs(values) >= np.array(floor, f"i{values.itemsize}").view(dtype))
        <= 6 * k
    )


@pytest.mark.parametrize("kind", [Exact, Trimmed, Threshold, Sampled])
def test_no_weight_starves(kind: type[ResidualCompressor]) -> None:
    """Equal gradients everywhere, and room for a tenth: all are sent in turn, not the lowest indices for ever."""
    n = 1000
    ever = np.zeros(n, dtype=bool)
    for _, sent in rounds(kind(0.1, **PLAIN), [np.ones(n, np.float32)] * 30):
        ever[sent] = True
    assert ever.all()


@pytest.mark.parametrize("kind", [Exact, Trimmed, Threshold, Sampled])
def test_nothing_is_lost_over_many_rounds(kind: type[ResidualCompressor]) -> None:
    """Whole numbers: every sum is exact, so all that came in is sent or still there, whatever the order."""
    rng = np.random.default_rng(3)
    n = 5000
    compressor = kind(0.01, **PLAIN)
    segment = make_segment([n])
    state = compressor.init(segment)
    given, sent = torch.zeros_like(segment.outgoing), torch.zeros_like(segment.outgoing)
    for round in range(20):
        segment.outgoing[:n] = torch.from_numpy(rng.integers(-50, 50, size=n).astype(np.float32))
        given += segment.outgoing
        compressor.accumulate(compressor.compress(segment, state, round), 1.0, sent)
    assert torch.equal(given, sent + state.residual)
