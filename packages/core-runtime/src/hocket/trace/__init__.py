"""Events of a session while it trains, and a trace of it for Perfetto.

An `Observer` gets an event for every exchange, wait and phase of a step. `Trace` is one that also traces the
transport's messages and writes everything into one file. Without an observer, no events are made.
"""

from hocket.trace.observer import ExchangeEvent, Observer
from hocket.trace.trace import Trace, merge_left

__all__ = ["ExchangeEvent", "Observer", "Trace", "merge_left"]
