"""Who hears from whom: the interface of topologies and core's own."""

from hocket.topology.api import Neighbours, Topology
from hocket.topology.complete import Complete

__all__ = ["Complete", "Neighbours", "Topology"]
