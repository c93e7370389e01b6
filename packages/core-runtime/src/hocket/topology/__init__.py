"""Topologies, the graphs of who sends to whom: the interface and core's own."""

from hocket.arrays import MixingRows
from hocket.topology.api import Neighbours, Topology
from hocket.topology.drawn import RandomMatching
from hocket.topology.plain import Complete, Exponential, Peers, Ring

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
