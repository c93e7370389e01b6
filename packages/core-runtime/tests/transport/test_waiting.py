"""The one wait: its timeout, its report of a stall, its look at the other ranks, and how long it sleeps."""

from __future__ import annotations

import itertools
import threading

import pytest

from hocket.errors import ExchangeTimeoutError, PeerLostError
from hocket.transport.single import SinglePeer
from hocket.transport.waiting import CHECK_EVERY_S, DOUBT_EVERY_S, STALL_REPORT_AFTER_S, back_off_s, wait


class Sleeper:
    """A clock that only sleeps move."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.sleeps: list[tuple[float, float]] = []

    def now(self) -> float:
        return self.now_s

    def __call__(self, waited_s: float, longest_s: float) -> None:
        self.sleeps.append((waited_s, longest_s))
        self.now_s += longest_s


def test_a_wait_ends_when_it_is_over_and_says_how_long_it_took() -> None:
    sleeper = Sleeper()
    assert wait(lambda: sleeper.now_s >= 0.5, 10.0, str, sleeper, now=sleeper.now) == pytest.approx(0.6)
    assert sleeper.sleeps[0] == (0.0, CHECK_EVERY_S)
    assert wait(lambda: True, 0.0, str) < 1.0


def test_a_wait_reports_once_looks_at_the_ranks_and_gives_up_in_time(
    capfd: pytest.CaptureFixture[str],
) -> None:
    sleeper, looks = Sleeper(), [0]

    def look() -> None:
        looks[0] += 1

    with pytest.raises(ExchangeTimeoutError, match=r"it: no end after 60.1 s"):
        wait(lambda: False, 60.1, lambda outcome: f"it: {outcome}", sleeper, check=look, now=sleeper.now)
    assert sleeper.now_s == pytest.approx(60.1), "the last sleep ends with the timeout"
    assert looks[0] == len(sleeper.sleeps) >= 60.1 / CHECK_EVERY_S
    err = capfd.readouterr().err
    assert err.count("hocket: it: for") == 1
    assert f"for {STALL_REPORT_AFTER_S:.0f} s so far" in err


def test_a_wait_in_vain_is_given_up_and_says_how_long_it_lasted() -> None:
    sleeper, doubts = Sleeper(), list[float]()

    def in_vain() -> bool:
        doubts.append(sleeper.now_s)
        return sleeper.now_s > 5.1

    with pytest.raises(ExchangeTimeoutError, match=r"^it: no end after (5\.\d) s$") as caught:
        wait(
            lambda: False,
            60.0,
            lambda outcome: f"it: {outcome}",
            sleeper,
            is_in_vain=in_vain,
            now=sleeper.now,
        )
    assert f"{doubts[-1]:.1f} s" in str(caught.value)
    assert doubts[0] >= DOUBT_EVERY_S, "others may have waited for this rank, and get on now"
    assert all(later - earlier >= DOUBT_EVERY_S for earlier, later in itertools.pairwise(doubts))


def test_a_wait_for_another_thread_ends_when_a_rank_has_died() -> None:
    peer = SinglePeer()

    def lost() -> None:
        raise PeerLostError("rank 1 has died")

    peer.status.check_lost = lost  # type: ignore[method-assign]
    over = threading.Event()
    thread = peer.threads.spawn("helper", over.wait)
    with pytest.raises(PeerLostError, match="rank 1"):
        thread.wait(5.0)
    with pytest.raises(PeerLostError, match="rank 1"):
        peer.threads.event().wait(lambda: "an event", 5.0)
    over.set()
    del peer.status.check_lost
    assert thread.wait(5.0) is True


def test_a_thread_that_does_not_end_is_named() -> None:
    peer, over = SinglePeer(), threading.Event()
    thread = peer.threads.spawn("helper", over.wait)
    with pytest.raises(
        ExchangeTimeoutError, match=r"rank 0 waits for its thread 'helper' to end: no end after 0.05 s"
    ):
        thread.wait(0.05)
    over.set()
    thread.wait(5.0)


def test_looks_come_seldom_the_longer_a_wait_lasts() -> None:
    pauses = [back_off_s(waited_s) for waited_s in (0.0, 0.008, 0.1, 1.0, 10.0)]
    assert pauses == sorted(pauses)
    assert pauses[0] < 1e-4 < pauses[-1] <= 0.01
