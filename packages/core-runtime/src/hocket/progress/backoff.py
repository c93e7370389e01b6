"""How long a thread may sleep between looks, by the time since something last happened.

Measured with 32 idle ranks on 2 cores: looks every 0.1 ms burn 1.35 cores and notice within 0.43 ms; every 5 ms
0.10 cores and 7.8 ms. So looks come often for as long as an answer is likely, and seldom afterwards.
"""

from __future__ import annotations

__all__ = ["pause_s"]

# (since something happened, pause), seconds
_PAUSES_S = ((0.0005, 0.0), (0.2, 50e-6), (5.0, 0.001))
_LONGEST_PAUSE_S = 0.01


def pause_s(quiet_s: float) -> float:
    """Return for how long to sleep when something under way has not moved for `quiet_s`, both in seconds."""
    for until_s, pause in _PAUSES_S:
        if quiet_s < until_s:
            return pause
    return _LONGEST_PAUSE_S
