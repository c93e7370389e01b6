"""The tests that every collective passes, on every number of ranks that it is defined for."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hocket.arrays import Array
from hocket.collective.api import Collective, Ends
from hocket.compressor.api import Compressor
from hocket.config.component import describe
from hocket.strategy.equality import results
from hocket.testing.collective.rounds import (
    Case,
    Shape,
    contribution,
    exchange_rounds,
    sample,
    shape_of,
    time_round,
)
from hocket.topology.api import Topology
from hocket.transport.network import Cost, NetworkModel
from hocket.transport.virtual import VirtualWorld, current_peer

__all__ = ["CollectiveConformance"]

T = TypeVar("T")

# The tests are inherited by many classes, which hypothesis would take for a mistake.
_EXAMPLES = settings(
    max_examples=10 if os.environ.get("HOCKET_CELLS") == "all" else 5,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.differing_executors],
)

_SHAPES = st.lists(
    st.builds(
        Shape,
        index=st.integers(0, 9),
        numel=st.sampled_from([0, 1, 7, 33, 1003]),
        trailer_numel=st.sampled_from([0, 1, 3]),
        dtype=st.sampled_from(["float32", "float64", "bfloat16"]),
    ),
    min_size=1,
    max_size=4,
    unique_by=lambda shape: shape.index,
)

_SHAPE = Shape(0, 96, 0, "float32")
_LONG = Shape(0, 400_000, 0, "float32")


class CollectiveConformance(ABC):
    """The conformance tests of a collective, for subclasses named `Test...` that name it and its result.

    Attributes:
        collective: the collective to test, registered by core or by an installed plugin.
        topology: the topology, for a collective that needs one.
        compressor: the compressor, for a collective that needs one; it must send all values.
        slot: `gradients` or `parameters`, in which the collective has a meaning.
        sizes: the numbers of ranks to test with; those that the collective refuses are left out.
    """

    collective: ClassVar[Collective]
    topology: ClassVar[Topology | None] = None
    compressor: ClassVar[Compressor | None] = None
    slot: ClassVar[str] = "parameters"
    sizes: ClassVar[tuple[int, ...]] = tuple(range(1, 10))

    @abstractmethod
    def expected(self, values: Array, round: int, segment: int) -> Array:
        """Return the ranks' results of a round.

        Of gradients this is asked for the data; `expected_trailer` has the trailers' results.

        Args:
            values: the ranks' contributions, float64 [size, n], padding included, before they are multiplied by
                `contribution_scale`.
            round: the exchange's counter.
            segment: the segment's index.

        Returns:
            float64 [size, n].
        """

    def expected_trailer(self, values: Array, round: int, segment: int) -> Array:
        """Return the ranks' results of a round of gradients' trailers, which carry weights.

        The mean where all ranks end with one combination (`Ends.SAME`), else as `expected`: the data's weights times
        the trailers. Override it where results are the ranks' own and `expected` is not linear.

        Args:
            values, round, segment: as for `expected`, with the trailers' n.

        Returns:
            float64 [size, n].
        """
        if self.collective.traits.ends is Ends.SAME:
            return np.broadcast_to(values.mean(axis=0), values.shape)
        return self.expected(values, round, segment)

    def run(self, size: int, seed: int, body: Callable[..., T], *args: object) -> list[T]:
        """Run `body(peer, *args)` on `size` ranks, virtual ones unless a subclass says otherwise.

        Args:
            size: the number of ranks.
            seed: chooses which of the virtual ranks goes first.
            body: a function in a module of this package.
            args: JSON values.

        Returns:
            The ranks' return values, by rank: JSON values.
        """
        return _run_on(VirtualWorld(size, seed=seed), body, *args)

    def check(self, size: int, shapes: list[Shape], rounds: int, **others: Any) -> None:
        """Carry out rounds on `size` ranks, and compare their results with `expected`.

        Args:
            size: the number of ranks.
            shapes: the shapes of the segments.
            rounds: the number of rounds, counted from 0.
            others: fields of `Case`.
        """
        case = self._case(shapes, rounds, **others)
        received = self.run(size, case.seed, exchange_rounds, case.to_json())
        for round in range(rounds):
            for place, shape in enumerate(shapes):
                dtype = np.dtype("float64" if shape.dtype == "float64" else "float32")
                values = np.stack([contribution(case, rank, round, shape) for rank in range(size)])
                got = np.stack([np.frombuffer(bytes.fromhex(rank[round][place]), dtype) for rank in received])
                # Rounding of every addition, and of the scaling before them.
                tolerance = 4 * (size + 1) * np.finfo(dtype).eps * np.abs(values).max(initial=0.0)
                expected = self._expected(values, round, shape)
                np.testing.assert_allclose(
                    got,
                    sample(expected),
                    rtol=0,
                    atol=tolerance,
                    err_msg=f"round {round}, segment {shape.index}; the last {shape.trailer_numel} elements are the "
                    "trailer, which carries weights: of gradients it arrives as `expected_trailer` says",
                )
                if self.collective.traits.equal_result:
                    assert len({rank[round][place] for rank in received}) == 1, (
                        "not the same bits on all ranks"
                    )

    @_EXAMPLES
    @given(
        number=st.integers(0, 10**6),
        shapes=_SHAPES,
        rounds=st.integers(1, 4),
        seed=st.integers(0, 10**6),
        threaded=st.booleans(),
        faulty=st.booleans(),
    )
    def test_result_is_as_expected(
        self, number: int, shapes: list[Shape], rounds: int, seed: int, threaded: bool, faulty: bool
    ) -> None:
        self.check(self._size(number), shapes, rounds, seed=seed, threaded=threaded, faulty=faulty)

    def test_late_ranks_are_answered(self) -> None:
        """Ranks come to each round one after the other, and each closes when its last round is done."""
        for size in self._sizes():
            self.check(size, [_SHAPE, replace(_SHAPE, index=3)], 3, lateness_s=0.01, resumed_at=2)

    def test_results_are_written_over_what_was_sent(self) -> None:
        """No value changes before it is sent, where `in_place` asks for one buffer for both."""
        for size in self._sizes()[:5]:
            shapes = [_SHAPE, replace(_SHAPE, index=3, trailer_numel=3)]
            self.check(size, shapes, 2, lateness_s=0.01, faulty=True, in_place=True)

    @_EXAMPLES
    @given(
        number=st.integers(0, 10**6), shapes=_SHAPES, seed=st.integers(0, 10**6), resumed_at=st.integers(0, 3)
    )
    def test_goes_on_where_it_was_saved(
        self, number: int, shapes: list[Shape], seed: int, resumed_at: int
    ) -> None:
        """A resumed run's new channel gives the same bits."""
        size = self._size(number)
        whole, resumed = (
            self.run(size, seed, exchange_rounds, self._case(shapes, 4, seed=seed, resumed_at=at).to_json())
            for at in (None, resumed_at)
        )
        assert whole == resumed

    @_EXAMPLES
    @given(number=st.integers(0, 10**6), shapes=_SHAPES, seeds=st.tuples(*[st.integers(0, 10**6)] * 2))
    def test_bits_do_not_depend_on_time(
        self, number: int, shapes: list[Shape], seeds: tuple[int, int]
    ) -> None:
        """The order of arrival and the ways of messages change no bit."""
        size = self._size(number)
        first, second = (
            self.run(size, seed, exchange_rounds, self._case(shapes, 2, threaded=late, faulty=late).to_json())
            for seed, late in zip(seeds, (False, True), strict=True)
        )
        assert first == second

    def test_sends_as_many_bytes_as_it_says(self) -> None:
        """The mean over rounds; the transport's own collectives are not made of messages there.

        Two runs with more and with fewer rounds are compared, so that opening and closing do not count.
        """
        few, rounds = 1, 2 if self.topology is None else 13
        for size in self._sizes()[::2]:
            worlds = [VirtualWorld(size) for _ in range(2)]
            for world, num in zip(worlds, (few, rounds), strict=True):
                _run_on(world, exchange_rounds, self._case([_SHAPE], num).to_json())
            if worlds[1].num_messages:
                said = self._cost(_SHAPE, size).bytes
                sent = worlds[1].num_bytes - worlds[0].num_bytes
                assert sent / size / (rounds - few) == pytest.approx(said)

    def test_takes_as_long_as_it_says(self) -> None:
        """The predicted time lies between the first rank's end and the last one's, but for polling."""
        case = self._case([_LONG], 1)
        for size in self._sizes()[1:5]:
            seconds = _run_on(VirtualWorld(size), time_round, case.to_json())
            said = self._cost(_LONG, size).seconds
            assert 0.95 * min(seconds) <= said <= 1.05 * max(seconds)

    def test_tokens_are_equal_where_results_are(self) -> None:
        """Ranks whose tokens in `results` are equal end with equal values."""
        case = self._case([_SHAPE], 1)
        for size in self._sizes():
            received = self.run(size, 0, exchange_rounds, case.to_json())
            tokens = results(self.collective, range(size), leader=0)
            assert len(tokens) == size
            for one in range(size):
                for other in range(size):
                    if tokens[one] == tokens[other]:
                        assert received[one] == received[other]

    def _expected(self, values: Array, round: int, shape: Shape) -> Array:
        if self.slot != "gradients":
            return self.expected(values, round, shape.index)
        data, trailer = np.split(values, [values.shape[1] - shape.trailer_numel], axis=1)
        results = (
            self.expected(data, round, shape.index),
            self.expected_trailer(trailer, round, shape.index),
        )
        return np.concatenate(results, axis=1)

    def _case(self, shapes: list[Shape], rounds: int, **others: Any) -> Case:
        exchange = {"collective": describe(self.collective)}
        if self.topology is not None:
            exchange["topology"] = describe(self.topology)
        if self.compressor is not None:
            exchange["compressor"] = describe(self.compressor)
        return Case(self.slot, exchange, shapes, rounds, **others)

    def _cost(self, shape: Shape, size: int) -> Cost:
        network = NetworkModel()
        nbytes = self.collective.message_bytes(self.compressor, shape_of(shape), size, network)
        return self.collective.cost(nbytes, size, self.topology, network)

    def _sizes(self) -> list[int]:
        return [size for size in self.sizes if _allows(self.collective, self.topology, size)]

    def _size(self, number: int) -> int:
        sizes = self._sizes()
        return sizes[number % len(sizes)]


def _run_on(world: VirtualWorld, body: Callable[..., T], *args: object) -> list[T]:
    def enter() -> T:
        peer = current_peer()
        assert peer is not None
        return body(peer, *args)

    return world.run(enter)


def _allows(collective: Collective, topology: Topology | None, size: int) -> bool:
    try:
        collective.check_size(size)
        if topology is not None:
            topology.check_size(size)
    except ValueError:
        return False
    return True
