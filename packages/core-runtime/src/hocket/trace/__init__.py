"""Events of a session while it trains, and a trace of it for Perfetto.

An `Observer` is told of every exchange, wait and phase of a step. `Trace` is one that also traces the transport's
messages and writes everything into one file. With no observer, nothing is made and nobody is told.
"""

from hocket.trace.observer import ExchangeEvent, Observer
from hocket.trace.trace import Trace, merge_left

__all__ = ["ExchangeEvent", "Observer", "Trace", "merge_left"]
