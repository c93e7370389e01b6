"""Who hears from whom: the interface of topologies and core's own."""

from hocket.arrays import MixingRows
from hocket.topology.api import Neighbours, Topology
from hocket.topology.complete import Complete
from hocket.topology.exponential import Exponential, Peers
from hocket.topology.random_matching import RandomMatching
from hocket.topology.ring import Ring

__all__ = [
    "Complete",
    "Exponential",
    "Neighbours",
    "Peers",
    "RandomMatching",
    "Ring",
    "MixingRows",
    "Topology",
]
