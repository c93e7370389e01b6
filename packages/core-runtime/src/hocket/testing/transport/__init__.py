"""The contract of `hocket.transport.peer` as tests: what every transport passes, on every number of ranks.

A transport's tests are a subclass of `TransportConformance` with a `run` method. What the ranks do are functions of
this package's modules, so that a rank in another process can import them by name; their arguments and results are
JSON.
"""

from hocket.testing.transport.conformance import TransportConformance

__all__ = ["TransportConformance"]
