"""The contract of `hocket.collective.api` as tests, for whoever writes a collective.

A collective's tests are a subclass of `CollectiveConformance` that names it and says in NumPy what it gives:

    class TestAllreduce(CollectiveConformance):
        collective = Allreduce()

        def expected(self, values, round, segment):
            return np.broadcast_to(values.mean(axis=0), values.shape)

What the ranks do are functions of this package's modules, so that a rank in another process can import them by name;
their arguments and results are JSON.
"""

from hocket.testing.collective.conformance import CollectiveConformance
from hocket.testing.collective.rounds import Shape

__all__ = ["CollectiveConformance", "Shape"]
