"""Each kind of delays against its formula, for any step, number of ranks and seed, and files with mistakes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.delays import Delays, Fixed, LinearSkew, RandomSubset, Recorded, ShiftingSkew

SIZES = st.integers(1, 40)
STEPS = st.integers(0, 10**9)
SEEDS = st.integers(0, 2**63)
SECONDS = st.floats(0, 100)


@given(size=SIZES, step=STEPS, seconds=SECONDS, data=st.data())
def test_fixed(size: int, step: int, seconds: float, data: st.DataObject) -> None:
    ranks = data.draw(st.lists(st.integers(0, size - 1), unique=True))
    delays = Fixed(ranks, seconds)
    delays.check_size(size)
    assert delays.of_step(step, size, 0).tolist() == [seconds * (rank in ranks) for rank in range(size)]


@given(size=SIZES, step=STEPS, seed=SEEDS, data=st.data())
def test_a_random_subset_has_as_many_ranks_as_asked_for(
    size: int, step: int, seed: int, data: st.DataObject
) -> None:
    count = data.draw(st.integers(0, size))
    delays = RandomSubset(count, 0.3)
    delays.check_size(size)
    found = delays.of_step(step, size, seed)
    assert sorted(found.tolist()) == [0.0] * (size - count) + [0.3] * count
    # Whatever was asked for in between: the answer is addressed, not drawn in order.
    delays.of_step(step + 1, size, seed)
    np.testing.assert_array_equal(RandomSubset(count, 0.3).of_step(step, size, seed), found)


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.5, 1.0])
def test_a_random_subset_is_late_in_a_fraction_of_the_steps(fraction: float) -> None:
    steps = 2000
    late = np.array([RandomSubset(2, 0.3, fraction).of_step(step, 5, 7) for step in range(steps)])
    assert set(np.count_nonzero(late, axis=1)) <= {0, 2}
    # Four standard deviations of a binomial.
    assert np.count_nonzero(late.any(axis=1)) / steps == pytest.approx(
        fraction, abs=4 * (fraction * (1 - fraction) / steps) ** 0.5
    )
    with pytest.raises(ValueError, match=r"^fraction is 1\.5; allowed: 0 to 1"):
        RandomSubset(2, 0.3, 1.5)


def test_random_subsets_are_uniform_and_depend_on_the_seed() -> None:
    """All 28 pairs of 8 ranks come as often, within 5 standard deviations; steps and seeds are independent."""
    num_steps = 5600
    delays = RandomSubset(2, 1.0)
    drawn = np.stack([delays.of_step(step, 8, seed=1) for step in range(num_steps)])
    pairs = drawn.T @ drawn
    spread = (num_steps / 28 * (27 / 28)) ** 0.5
    assert np.abs(pairs[np.triu_indices(8, 1)] - num_steps / 28).max() < 5 * spread
    agreeing = (drawn[1:] == drawn[:-1]).all(axis=1).sum()
    other = np.stack([delays.of_step(step, 8, seed=2) for step in range(num_steps)])
    for number in (agreeing, (drawn == other).all(axis=1).sum()):
        assert abs(number - num_steps / 28) < 5 * spread


@given(size=SIZES, step=STEPS, shortest=st.floats(0, 1), more=st.floats(0, 1))
def test_skews(size: int, step: int, shortest: float, more: float) -> None:
    longest = shortest + more
    expected = [shortest + (longest - shortest) * rank / max(1, size - 1) for rank in range(size)]
    linear, shifting = LinearSkew(shortest, longest), ShiftingSkew(shortest, longest)
    np.testing.assert_allclose(linear.of_step(step, size, 0), expected, rtol=1e-12, atol=1e-12)
    shifted = [linear.of_step(step, size, 0)[(rank + step) % size] for rank in range(size)]
    assert shifting.of_step(step, size, 0).tolist() == shifted


def test_the_papers_severe_skew() -> None:
    """50 to 400 ms over 8 ranks; in 8 steps each rank has each delay once."""
    delays = ShiftingSkew(0.05, 0.4)
    rows = np.stack([delays.of_step(step, 8, 0) for step in range(8)])
    expected = np.arange(1, 9) * 0.05
    for column in (*rows, *rows.T):
        np.testing.assert_allclose(np.sort(column), expected)
    np.testing.assert_array_equal(delays.of_step(8, 8, 0), rows[0])


@given(
    lines=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 20), st.floats(0, 9)), max_size=30),
    step=st.integers(0, 60),
    repeat=st.booleans(),
)
def test_a_file_gives_what_it_says(
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[tuple[int, int, float]],
    step: int,
    repeat: bool,
) -> None:
    path = tmp_path_factory.mktemp("recorded") / "delays.csv"
    path.write_text("rank,step,seconds\n" + "".join(f"{r},{s},{d!r}\n" for r, s, d in lines))
    delays = Recorded(str(path), repeat)
    delays.check_size(8)
    within = step % (max((s for _, s, _ in lines), default=0) + 1) if repeat else step
    for rank, found in enumerate(delays.of_step(step, 8, 0)):
        assert found == sum(d for r, s, d in lines if (r, s) == (rank, within))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: the column names are missing; write rank,step,seconds"),
        ("0,1,0.5\n", "line 1: the column names are missing"),
        ("rank,step,seconds\n0,1\n", "line 2: got '0,1'; allowed: rank and step from 0, and seconds"),
        ("rank,step,seconds\n0,1,2,3\n", "line 2: got '0,1,2,3'; allowed"),
        ("rank,step,seconds\n\n0,one,0.5\n", "line 3: got '0,one,0.5'; allowed"),
        ("rank,step,seconds\n-1,0,0.5\n", "line 2: got '-1,0,0.5'; allowed"),
        ("rank,step,seconds\n1,0,-0.5\n", "line 2: seconds is -0.5; allowed: 0 or more, finite"),
        ("rank,step,seconds\n1,0,nan\n", "line 2: seconds is nan; allowed: 0 or more, finite"),
    ],
)
def test_a_line_that_means_nothing_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "delays.csv"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        Recorded(str(path))
    assert str(caught.value).startswith(f"file {path}, {message}")


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "delays.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="is not UTF-8 text"):
        Recorded(str(tmp_path / "delays.csv"))


@pytest.mark.parametrize(
    ("delays", "size", "message"),
    [
        (Fixed([0, 4], 1.0), 4, r"^ranks is \[0, 4\]; allowed: ranks from 0 to 3$"),
        (RandomSubset(5, 1.0), 4, "^count is 5; allowed: 0 to 4, the number of ranks$"),
    ],
)
def test_ranks_that_there_are_not(delays: Delays, size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        delays.check_size(size)


def test_a_rank_of_a_file_that_there_is_not(tmp_path: Path) -> None:
    path = tmp_path / "delays.csv"
    path.write_text("rank,step,seconds\n4,0,1\n")
    Recorded(str(path)).check_size(5)
    with pytest.raises(ValueError, match=r"delays rank 4; allowed: ranks from 0 to 3$"):
        Recorded(str(path)).check_size(4)
