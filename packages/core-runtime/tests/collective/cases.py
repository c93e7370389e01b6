"""Core's collectives and what they give, in NumPy."""

from __future__ import annotations

import numpy as np

from hocket.arrays import Array
from hocket.collective.allreduce import Allreduce, AllreduceAlgorithm
from hocket.collective.gossip import Gossip
from hocket.collective.rooted import Broadcast, Reduce
from hocket.collective.sparse import Mean, SparseAlgorithm, SparseAllreduce
from hocket.compressor.topk import TopK
from hocket.testing.collective import CollectiveConformance
from hocket.topology import Complete, Exponential, RandomMatching, Ring
from hocket.topology.plain import Peers


class _Mean(CollectiveConformance):
    def expected(self, values: Array, round: int, segment: int) -> Array:
        return np.broadcast_to(values.mean(axis=0), values.shape)


class NativeAllreduce(_Mean):
    collective = Allreduce()


class RecursiveDoubling(_Mean):
    collective = Allreduce(AllreduceAlgorithm.RECURSIVE_DOUBLING)


class RingAllreduce(_Mean):
    collective = Allreduce(AllreduceAlgorithm.RING)
    slot = "gradients"


class Rabenseifner(_Mean):
    collective = Allreduce(AllreduceAlgorithm.RABENSEIFNER)


class BinomialTree(_Mean):
    collective = Allreduce(AllreduceAlgorithm.TREE)
    slot = "gradients"


class Sparse(_Mean):
    collective = SparseAllreduce()
    slot = "gradients"


class ScalableSparse(_Mean):
    collective = SparseAllreduce(algorithm=SparseAlgorithm.SCALABLE)
    compressor = TopK(1.0)
    slot = "gradients"


class ScalableSparseOfContributors(ScalableSparse):
    """All contribute all elements."""

    collective = SparseAllreduce(Mean.CONTRIBUTORS, SparseAlgorithm.SCALABLE)


class FromTheLeader(CollectiveConformance):
    collective = Broadcast()

    def expected(self, values: Array, round: int, segment: int) -> Array:
        return np.broadcast_to(values[0], values.shape)


class FromRank1(CollectiveConformance):
    collective = Broadcast(root=1)

    def expected(self, values: Array, round: int, segment: int) -> Array:
        return np.broadcast_to(values[1], values.shape)


class ToTheLeader(CollectiveConformance):
    collective = Reduce()
    root = 0

    def expected(self, values: Array, round: int, segment: int) -> Array:
        results = values.copy()
        results[self.root] = values.mean(axis=0)
        return results


class ToRank1(ToTheLeader):
    collective = Reduce(root=1)
    root = 1


class _Gossip(CollectiveConformance):
    collective = Gossip()

    def expected(self, values: Array, round: int, segment: int) -> Array:
        assert self.topology is not None
        return self.topology.mixing_matrix(len(values), round, segment) @ values


class GossipInARing(_Gossip):
    topology = Ring()


class GossipOfGradients(GossipInARing):
    slot = "gradients"


class GossipWithAll(_Gossip):
    topology = Complete()


class GossipAtPowersOfTwo(_Gossip):
    topology = Exponential()


class GossipAtAllPowersOfTwo(_Gossip):
    topology = Exponential(Peers.ALL)


class GossipInPairs(_Gossip):
    topology = RandomMatching()


CASES = [
    NativeAllreduce,
    RecursiveDoubling,
    RingAllreduce,
    Rabenseifner,
    BinomialTree,
    Sparse,
    ScalableSparse,
    ScalableSparseOfContributors,
    FromTheLeader,
    FromRank1,
    ToTheLeader,
    ToRank1,
    GossipInARing,
    GossipOfGradients,
    GossipWithAll,
    GossipAtPowersOfTwo,
    GossipAtAllPowersOfTwo,
    GossipInPairs,
]
