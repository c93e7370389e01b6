"""Waits for operations that only polling advances, without burning a core.

A wait first polls without a pause (a small exchange ends within microseconds), then sleeps a little between polls
(large ones need a poll now and then to move on), and longer the longer it lasts: at most a sixteenth of the time since
it began, as a rank that waits for one that computes must not take its core. Measured on 2 cores with 4 ranks: with
these sleeps an allreduce of 1 to 100 MB takes as long as with none. Progress threads look by the same rule.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

from hocket.errors import ExchangeTimeoutError

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
# Measured with 32 idle ranks on 2 cores: looks every 0.1 ms burn 1.35 cores and notice within 0.43 ms; every 5 ms 0.10
# cores and 7.8 ms. So looks are frequent while an answer is likely, and rare afterwards.
_SHORTEST_SLEEP_S = 20e-6
_LONGEST_SLEEP_S = 0.001
_IDLE_AFTER_S = 5.0
_IDLE_SLEEP_S = 0.01


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


def back_off_s(waited_s: float) -> float:
    """Return the sleep before the next look at what has not moved for `waited_s`, both in seconds."""
    if waited_s >= _IDLE_AFTER_S:
        return _IDLE_SLEEP_S
    return min(max(_SHORTEST_SLEEP_S, waited_s / _SLEEPS_PER_WAIT), _LONGEST_SLEEP_S)


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
