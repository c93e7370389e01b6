"""All ranks as threads of one process, under a deterministic scheduler and a virtual clock.

For tests that are fast and repeatable, for faults on demand, and for what-if timing.
"""

from hocket.transport.network import NetworkModel
from hocket.transport.virtual.peer import VirtualPeer
from hocket.transport.virtual.world import VirtualWorld, current_peer

__all__ = ["NetworkModel", "VirtualPeer", "VirtualWorld", "current_peer"]
