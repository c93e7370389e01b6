"""The host path: ranks of one host work on each other's memory instead of sending messages."""

from hocket.transport.host.collectives import HostCollectives
from hocket.transport.host.exchange import HostExchange, HostLane
from hocket.transport.host.marks import MARK_BYTES, Marks
from hocket.transport.host.memory import SMALLEST_BYTES, HostMemory, Shared, find_shared
from hocket.transport.host.mixing import HostMixer
from hocket.transport.host.progress import HostProgress, SharedNetwork

__all__ = [
    "MARK_BYTES",
    "SMALLEST_BYTES",
    "HostCollectives",
    "HostExchange",
    "HostLane",
    "HostMemory",
    "HostMixer",
    "HostProgress",
    "Marks",
    "Shared",
    "SharedNetwork",
    "find_shared",
]
