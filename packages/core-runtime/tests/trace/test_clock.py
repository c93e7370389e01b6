"""The ranks' clocks are brought to that of rank 0: offset and drift, to within a round trip."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

import hocket
from hocket.trace.clock import ClockReading, compare, to_rank_0

# Of the default network, with 8 bytes each way.
ROUND_TRIP_S = 42e-6

offsets = st.floats(-1e6, 1e6)
drifts = st.floats(-1e-4, 1e-4)


@given(st.lists(st.tuples(offsets, drifts), min_size=1, max_size=3))
def test_a_moment_has_one_time(others: list[tuple[float, float]]) -> None:
    clocks = [(0.0, 0.0), *others]

    def body() -> list[float]:
        peer = hocket.join()
        offset_s, drift = clocks[peer.rank]

        def now() -> float:
            return offset_s + (1 + drift) * peer.clock.now()

        lane = peer.lane("clocks")
        readings = [compare(lane, now)]
        moments = []
        for _ in range(4):
            peer.clock.elapse(10.0 - peer.clock.now() % 10.0)  # at the same true time everywhere
            moments.append(now())
        readings.append(compare(lane, now))
        return to_rank_0(moments, readings)

    for times in hocket.virtual(len(clocks)).run(body):
        assert all(abs(time - 10.0 * (k + 1)) < ROUND_TRIP_S for k, time in enumerate(times))


def test_one_clock_is_left_alone() -> None:
    def body() -> float:
        peer = hocket.join()
        return compare(peer.lane("clocks"), peer.clock.now).offset_s

    assert hocket.virtual(4).run(body) == [0.0] * 4


def test_outside_of_the_readings_the_offset_stays() -> None:
    readings = [ClockReading(10.0, 1.0), ClockReading(20.0, 3.0)]
    assert to_rank_0([0.0, 10.0, 15.0, 20.0, 30.0], readings) == [1.0, 11.0, 17.0, 23.0, 33.0]
    assert to_rank_0([0.0, 5.0], readings[:1]) == [1.0, 6.0]
