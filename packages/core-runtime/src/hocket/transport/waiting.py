"""Waits for operations that only polling advances, without burning a core.

A wait first polls without a pause (a small exchange ends within microseconds), then sleeps a little between polls
(large ones need a poll now and then to move on), and longer the longer it lasts: at most a sixteenth of the time since
it began, as a rank that waits for one that computes must not take its core. Measured on 2 cores with 4 ranks: with
these sleeps an allreduce of 1 to 100 MB takes as long as with none. A wait that begins where another has just ended is
expected to last as long (`WaitsInARow`): waiting for a model's layers, one after the other, is one long wait.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable

from hocket.errors import ExchangeTimeoutError

__all__ = [
    "POLL_RESOLUTION_S",
    "CHECK_EVERY_S",
    "DOUBT_EVERY_S",
    "LONG_WAIT_S",
    "STALL_REPORT_AFTER_S",
    "WaitsInARow",
    "back_off",
    "back_off_s",
    "never",
    "poll_briefly",
    "wait",
]

#: poll(2) counts in milliseconds; shorter sleeps do not listen.
POLL_RESOLUTION_S = 1e-3

#: After this many seconds of waiting, a report on standard error says who waits for whom.
STALL_REPORT_AFTER_S = 30.0

#: What sleeps without a look at the transport looks so often, in seconds, whether all ranks still live.
CHECK_EVERY_S = 0.2

#: So often, in seconds, a wait that may be in vain is doubted.
DOUBT_EVERY_S = 0.5

_EAGER_S = 0.0005
#: Where a wait has taken so long, in seconds, the next one of its kind does not begin with polls: in training, ranks
#: that share cores come one after the other, step after step.
LONG_WAIT_S = 0.005
_SLEEPS_PER_WAIT = 16
_POLLS_A_LOOK = 32  # between looks at the clock
_SHORT_SLEEP_S = 20e-6
_SHORT_SLEEPS_S = 0.5
_LONG_SLEEP_S = 0.001
_LONG_SLEEPS_S = 5.0
_IDLE_SLEEP_S = 0.005


class WaitsInARow:
    """The length of the last wait, as an estimate for one that begins soon after."""

    def __init__(self) -> None:
        self._ended_s = -math.inf
        self._took_s = 0.0

    def expected_s(self) -> float:
        """Return the expected length of a wait that begins now, in seconds; 0 if unknown."""
        since_s = time.monotonic() - self._ended_s
        return self._took_s if since_s < self._took_s / 4 else 0.0

    def ended(self, took_s: float) -> None:
        """Note the length of an ended wait, unless it was over at once."""
        if took_s >= _SHORT_SLEEP_S:
            self._ended_s = time.monotonic()
            self._took_s = took_s if took_s > _EAGER_S else 0.0


def poll_briefly(done: Callable[[], bool], yields: bool) -> bool:
    """Poll `done` for half a millisecond and return whether it came true.

    Args:
        done: advances the operation and says whether it has finished.
        yields: give the core to other ranks between polls, where `done` does not do so itself. (Open MPI does
            where there are more ranks than cores; doing it twice costs a tenth of a small exchange.)
    """
    end_s = time.monotonic() + _EAGER_S
    while True:
        for _ in range(_POLLS_A_LOOK):
            if done():
                return True
            if yields:
                os.sched_yield()
        if time.monotonic() > end_s:
            return False


def back_off_s(waited_s: float, expected_s: float = 0.0) -> float:
    """Return the sleep of a wait before its next look, in seconds.

    Args:
        waited_s: its length so far, in seconds.
        expected_s: its expected length, in seconds; a longer one means fewer looks.
    """
    if waited_s < _SHORT_SLEEPS_S:
        pause_s = max(waited_s, expected_s) / _SLEEPS_PER_WAIT
        return min(max(_SHORT_SLEEP_S, pause_s), _LONG_SLEEP_S)
    return _LONG_SLEEP_S if waited_s < _LONG_SLEEPS_S else _IDLE_SLEEP_S


def back_off(waited_s: float, longest_s: float) -> None:
    """Sleep between two looks at an operation that only looks advance."""
    time.sleep(min(back_off_s(waited_s), longest_s))


def never() -> bool:
    """Return False: for a wait that nothing but its timeout ends early."""
    return False


def wait(
    until: Callable[[], bool],
    timeout_s: float,
    describe: Callable[[str], str],
    sleep: Callable[[float, float], object] = back_off,
    *,
    check: Callable[[], None] = lambda: None,
    is_in_vain: Callable[[], bool] = never,
    now: Callable[[], float] = time.monotonic,
) -> float:
    """Block until `until()` is true and return the wait's seconds: all waits but the simulation's run through here.

    Args:
        until: returns whether the wait has ended; advances the operation where looks do so.
        timeout_s: seconds to wait at most.
        describe: returns who waits for whom and what, given a phrase on the time; for errors and reports only.
        sleep: sleeps until another look makes sense, given the seconds waited and the most to sleep (`CHECK_EVERY_S`).
        check: checks that all ranks live, between looks.
        is_in_vain: asked every `DOUBT_EVERY_S`, not at once, as others may have waited for this rank; True gives up.
        now: the clock, in seconds.

    Raises:
        ExchangeTimeoutError: not in time, or given up; contains the result of `describe`.
        PeerLostError: raised by `check` or `until`.
    """
    start_s, reported, next_doubt_s = now(), False, DOUBT_EVERY_S
    while not until():
        waited_s = now() - start_s
        if waited_s >= timeout_s:
            raise ExchangeTimeoutError(describe(f"no end after {timeout_s:g} s"))
        if waited_s >= next_doubt_s:
            next_doubt_s = waited_s + DOUBT_EVERY_S
            if is_in_vain():
                raise ExchangeTimeoutError(describe(f"no end after {waited_s:.1f} s"))
        if not reported and waited_s > STALL_REPORT_AFTER_S:
            reported = True
            print(f"hocket: {describe(f'for {waited_s:.0f} s so far')}", file=sys.stderr, flush=True)
        check()
        sleep(waited_s, min(CHECK_EVERY_S, timeout_s - waited_s))
    return now() - start_s
