"""The contract of `hocket.topology.api` as tests, and an irregular graph that only push-sum averages over.

A topology's tests are a subclass of `TopologyConformance` with one line:

    class TestRing(TopologyConformance):
        topologies = (Ring(),)
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hocket import draws
from hocket.topology.api import Neighbours, Topology, neighbours_fault

if TYPE_CHECKING:
    import pytest

__all__ = ["Irregular", "TopologyConformance"]

_ROUNDS = st.integers(0, 2**40)
_SEGMENTS = st.integers(0, 2**20)

# The tests are inherited by many classes, which hypothesis would take for a mistake.
_EXAMPLES = settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.differing_executors])


@dataclass(frozen=True)
class Irregular(Topology):
    """A directed graph with other out-degrees and weights in each round: only W's columns sum to 1.

    Everyone sends to the next rank, so that the graph is strongly connected in each round, and to each of the
    others with chance 1/3. Even ranks keep 1/2 of their value, odd ones 1/4; what they give away is shared
    equally. For tests of push-sum: plain averaging over it neither keeps the mean nor reaches consensus on it.

    Attributes:
        seed: the seed of the draws.
    """

    rows_sum_to_one: ClassVar[bool] = False

    seed: int = 0

    def neighbours(self, rank: int, size: int, round: int, segment: int) -> Neighbours:
        """Return the drawn neighbours."""
        if size == 1:
            return Neighbours((), (), (), 1.0)
        drawn = draws.words(size * size, "unequal", self.seed, round, segment).reshape(size, size)
        sends = drawn < np.uint64(2**64 // 3)  # [sender, receiver]
        ranks = np.arange(size)
        sends[ranks, (ranks + 1) % size] = True
        sends[ranks, ranks] = False
        send_to = tuple(np.flatnonzero(sends[rank]).tolist())
        self_weight = 0.25 if rank % 2 else 0.5
        return Neighbours(
            send_to=send_to,
            send_weights=((1 - self_weight) / len(send_to),) * len(send_to),
            receive_from=tuple(np.flatnonzero(sends[:, rank]).tolist()),
            self_weight=self_weight,
        )


class TopologyConformance:
    """The conformance tests of topologies, for subclasses named `Test...` that list them.

    Every test runs for every topology and for every size from 1 to 33 that it does not refuse.

    Attributes:
        topologies: the topologies to test, with different fields.
        refuses: the sizes from 1 to 33 that `check_size` must refuse.
    """

    topologies: ClassVar[tuple[Topology, ...]]
    refuses: ClassVar[Iterable[int]] = ()

    sizes: ClassVar[tuple[int, ...]] = tuple(range(1, 34))

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "topology" in metafunc.fixturenames:
            metafunc.parametrize("topology", self.topologies, ids=repr)

    def possible_sizes(self) -> list[int]:
        """Return the sizes that are not refused."""
        refused = set(self.refuses)
        return [size for size in self.sizes if size not in refused]

    def test_refused_sizes_come_with_a_reason(self, topology: Topology) -> None:
        for size in self.possible_sizes():
            topology.check_size(size)
        for size in self.refuses:
            reason = _refusal(topology, size)
            assert reason is not None, f"size {size} is not refused"
            assert str(size) in reason, f"{reason!r} does not name the size {size}"
            assert len(reason.split()) >= 5, f"{reason!r} does not say which sizes are possible"

    @_EXAMPLES
    @given(round=_ROUNDS, segment=_SEGMENTS)
    def test_sends_and_receives_match(self, topology: Topology, round: int, segment: int) -> None:
        for size in self.possible_sizes():
            _check_neighbours(topology, size, round, segment)

    @_EXAMPLES
    @given(round=_ROUNDS, segment=_SEGMENTS)
    def test_mixing_matrix_is_what_the_ranks_do(self, topology: Topology, round: int, segment: int) -> None:
        for size in self.possible_sizes():
            _check_neighbours(topology, size, round, segment)
            expected = np.zeros((size, size))
            for rank in range(size):
                neighbours = topology.neighbours(rank, size, round, segment)
                expected[rank, rank] = neighbours.self_weight
                for to, weight in zip(neighbours.send_to, neighbours.send_weights, strict=True):
                    expected[to, rank] = weight
            matrix = topology.mixing_matrix(size, round, segment)
            assert matrix.dtype == np.float64
            np.testing.assert_array_equal(matrix, expected, _case(size, round, segment))

    @_EXAMPLES
    @given(round=_ROUNDS, segment=_SEGMENTS)
    def test_terms_follow_the_neighbours(self, topology: Topology, round: int, segment: int) -> None:
        for size in self.possible_sizes():
            _check_neighbours(topology, size, round, segment)
            terms = topology.mixing_rows(size, round, segment)
            for stored, followed in zip(
                terms, Topology.mixing_rows(topology, size, round, segment), strict=True
            ):
                assert stored.dtype == followed.dtype
                np.testing.assert_array_equal(stored, followed, _case(size, round, segment))
            matrix = np.zeros((size, size))
            for rank in range(size):
                own = slice(terms.starts[rank], terms.starts[rank + 1])
                neighbours = topology.neighbours(rank, size, round, segment)
                assert tuple(terms.sources[own]) == (rank, *neighbours.receive_from)
                matrix[rank, terms.sources[own]] = terms.weights[own]
            expected = topology.mixing_matrix(size, round, segment)
            np.testing.assert_array_equal(matrix, expected, _case(size, round, segment))

    @_EXAMPLES
    @given(round=_ROUNDS, segment=_SEGMENTS)
    def test_weights_are_as_declared(self, topology: Topology, round: int, segment: int) -> None:
        for size in self.possible_sizes():
            matrix = topology.mixing_matrix(size, round, segment)
            assert (matrix >= 0).all(), f"{_case(size, round, segment)}: a weight is less than 0"
            for axis, name in enumerate(("columns_sum_to_one", "rows_sum_to_one")):
                if getattr(topology, name):
                    np.testing.assert_allclose(
                        matrix.sum(axis=axis),
                        1,
                        atol=1e-12,
                        err_msg=f"{_case(size, round, segment)}, {name} is True",
                    )

    def test_sums_that_are_one_are_declared(self, topology: Topology) -> None:
        matrices = [topology.mixing_matrix(size, 0, 0) for size in self.possible_sizes()]
        for axis, name in enumerate(("columns_sum_to_one", "rows_sum_to_one")):
            always = all(np.allclose(matrix.sum(axis=axis), 1) for matrix in matrices)
            assert getattr(topology, name) or not always, (
                f"declare {name}: in round 0 it is so for every size"
            )

    @_EXAMPLES
    @given(round=_ROUNDS, segment=_SEGMENTS)
    def test_pure(self, topology: Topology, round: int, segment: int) -> None:
        sizes = self.possible_sizes()
        first = [topology.neighbours(size - 1, size, round, segment) for size in sizes]
        numpy_state, python_state = np.random.get_state(), random.getstate()
        # Others are asked in between, and a copy answers in another order: as on another rank.
        again = {}
        for size in reversed(sizes):
            topology.neighbours(0, size, round + 1, segment + 1)
            again[size] = copy.deepcopy(topology).neighbours(size - 1, size, round, segment)
        for size, answer in zip(sizes, first, strict=True):
            assert answer == again[size], (
                f"{_case(size, round, segment)}: rank {size - 1} first gets {answer}, and then {again[size]}"
            )
        assert random.getstate() == python_state
        assert repr(np.random.get_state()) == repr(numpy_state)

    @_EXAMPLES
    @given(round=_ROUNDS, segment=_SEGMENTS)
    def test_segments_differ_where_it_is_declared_alone(
        self, topology: Topology, round: int, segment: int
    ) -> None:
        if not topology.differs_by_segment:
            for size in self.possible_sizes():
                one, other = (topology.neighbours(size - 1, size, round, s) for s in (0, segment))
                assert one == other, (
                    f"size {size}, round {round}: rank {size - 1} has {one} for segment 0 and {other} for segment "
                    f"{segment}: declare differs_by_segment = True"
                )

    def test_a_rank_alone_keeps_its_value(self, topology: Topology) -> None:
        if 1 in self.possible_sizes():
            assert topology.mixing_matrix(1, 0, 0).tolist() == [[1.0]]


def _case(size: int, round: int, segment: int) -> str:
    return f"size {size}, round {round}, segment {segment}"


def _check_neighbours(topology: Topology, size: int, round: int, segment: int) -> None:
    everyone = [topology.neighbours(rank, size, round, segment) for rank in range(size)]
    for rank in range(size):
        fault = neighbours_fault(topology, rank, size, everyone.__getitem__)
        assert fault is None, f"{_case(size, round, segment)}: {fault}"


def _refusal(topology: Topology, size: int) -> str | None:
    try:
        topology.check_size(size)
    except ValueError as error:
        return str(error)
    return None
